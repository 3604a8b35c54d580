"""The sdist and the wheels: built from a clean copy, installed into an empty environment, and used there."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).resolve().parents[2]
SWITCHES = ("OVERTONE_SKIP_EXTENSION", "OVERTONE_CUDA", "OVERTONE_CUDA_ARCHS", "OVERTONE_SANITIZE", "OVERTONE_DEBUG")

RUN_AN_OP = """
import warnings
import torch
import overtone as ot
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    x = torch.randn(2, 5, 3, requires_grad=True)
    for _ in range(2):
        ot.frequency_norms(x{backend}).high.sum().backward()
        y = ot.frequency_filter(x, 0.5, 2.0{backend})
torch.testing.assert_close(y, ot.reference.frequency_filter(x, 0.5, 2.0))
print(ot.__file__)
print(len(caught), *(warning.message for warning in caught))
"""


RUN_EVERY_FAMILY = """
import torch
import overtone as ot
torch.manual_seed(0)
x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
q, k, v = torch.randn(3, 2, 3, 5, 2, dtype=torch.float64)
a = torch.randn(4, 6, 6, dtype=torch.float64)
basis, r = ot.linalg.qr(a[0], backend="cpu")
arguments = (q, k, v, torch.rand(6, dtype=torch.float64), basis)
y = ot.spectral_attention(*arguments, residual=x, backend="cpu")
torch.testing.assert_close(y, ot.reference.spectral_attention(*arguments, residual=x))
torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], 2 * y)
torch.testing.assert_close(ot.frequency_norms(x, backend="cpu"), ot.reference.frequency_norms(x))
torch.testing.assert_close(ot.linalg.eigvalsh(a + a.mT, backend="cpu"), torch.linalg.eigvalsh(a + a.mT))
torch.testing.assert_close(ot.linalg.eigvals(a, backend="cpu").sum(-1).real, a.diagonal(dim1=-2, dim2=-1).sum(-1))
compiled = torch.compile(lambda x: ot.frequency_filter(x, 0.5, 2.0, backend="cpu"), backend="aot_eager", fullgraph=True)
torch.testing.assert_close(compiled(x), ot.reference.frequency_filter(x, 0.5, 2.0))
"""


CONSUMER = """
import torch
import overtone as ot

x = torch.randn(2, 5, 6)
norms: ot.FrequencyNorms = ot.frequency_norms(x)
ratio: torch.Tensor = norms.ratio
values: torch.Tensor = ot.linalg.eigh(x @ x.mT).eigenvalues
model = ot.models.vit_tiny(16, 4, num_classes=3, regime="sharpen")
handle = ot.reparameterize(model, regime="smooth")
handle.restore()
with ot.use_backend("reference"):
    y: torch.Tensor = ot.de_escalate(x, tau=0.5)
"""


def environment(**switches: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if name not in SWITCHES}, **switches}


def run(*command: object, cwd: Path, **switches: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment(**switches),
        capture_output=True,
        text=True,
        check=False,
    )


def run_well(*command: object, cwd: Path, **switches: str) -> str:
    result = run(*command, cwd=cwd, **switches)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def copy_of_the_tree(target: Path) -> Path:
    """What a clone would hold: no build, no .venv."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a clone: the list of the project's files comes from it")
    names = run_well("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


class Environment:
    """A new environment with nothing but one wheel, which borrows the packages that overtone depends on."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        run_well(sys.executable, "-m", "venv", "--without-pip", folder, cwd=wheel.parent)
        self.python = folder / "bin/python"
        self.install(wheel)
        # A path file adds the folder only; path files inside it, such as the one of the editable overtone, stay unread.
        (self.site_packages() / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def install(self, wheel: Path) -> None:
        run_well(
            *(sys.executable, "-m", "pip", "--python", self.python, "install", "--no-deps", "--no-index", wheel),
            cwd=self.folder,
        )

    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    def run(self, *arguments: str) -> str:
        return run_well(self.python, "-W", "default", *arguments, cwd=self.folder)


def build(tree: Path, *arguments: str, **switches: str) -> Path:
    run_well(sys.executable, "-m", "build", "--no-isolation", *arguments, cwd=tree, **switches)
    return tree / "dist"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> Path:
    """The sdist, and the wheel that is built from it (not from the tree)."""
    return build(copy_of_the_tree(tmp_path_factory.mktemp("tree")))


@pytest.fixture(scope="module")
def pure_distributions(tmp_path_factory) -> Path:
    tree = copy_of_the_tree(tmp_path_factory.mktemp("pure"))
    return build(tree, "--wheel", OVERTONE_SKIP_EXTENSION="1")


@pytest.fixture(scope="module")
def installed(distributions, tmp_path_factory) -> Environment:
    return Environment(tmp_path_factory.mktemp("installed"), next(distributions.glob("*.whl")))


@pytest.fixture(scope="module")
def installed_pure(pure_distributions, tmp_path_factory) -> Environment:
    return Environment(tmp_path_factory.mktemp("installed_pure"), next(pure_distributions.glob("*.whl")))


@pytest.mark.slow
def test_twine_finds_nothing_wrong(distributions):
    """The metadata, and the README as a package index would show it."""
    run_well(sys.executable, "-m", "twine", "check", "--strict", *distributions.iterdir(), cwd=distributions)


@pytest.mark.slow
class TestSdist:
    def test_has_what_a_build_needs(self, distributions):
        with tarfile.open(next(distributions.glob("*.tar.gz"))) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        expected = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
        expected |= {"LICENSE", "Makefile", "README.md", "requirements-dev.txt", "scripts/setup", "tests/conftest.py"}
        assert expected <= names
        assert not [name for name in names if name.endswith((".so", ".pyc"))]


@pytest.mark.slow
class TestWheel:
    def test_has_every_package_and_one_extension(self, distributions):
        names = zipfile.ZipFile(next(distributions.glob("*.whl"))).namelist()
        assert sum(name.startswith("overtone/_C.") and name.endswith(".so") for name in names) == 1
        python_files = {path.relative_to(ROOT / "python").as_posix() for path in (ROOT / "python").rglob("*.py")}
        for folder in ("benchmarks", "triton_kernels"):
            python_files |= {f"overtone/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
        assert python_files <= set(names)

    def test_has_what_the_package_reads(self, distributions):
        """Templates, style sheets and types: every file of the package that is not Python, and nothing compiled."""
        names = zipfile.ZipFile(next(distributions.glob("*.whl"))).namelist()
        tracked = run_well("git", "ls-files", "-z", "python", cwd=ROOT).split("\0")
        data = {name.removeprefix("python/") for name in tracked if name and not name.endswith(".py")}
        assert "overtone/report/page.html.j2" in data <= set(names)

    def test_needs_torch_without_an_upper_bound(self, distributions):
        archive = zipfile.ZipFile(next(distributions.glob("*.whl")))
        metadata = archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()
        assert "Requires-Dist: torch>=2.10\n" in metadata
        # ROCm's torch has a Triton of its own, which no requirement of ours may replace.
        triton = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: triton")]
        assert triton == ['Requires-Dist: triton>=3.6; sys_platform == "linux" and extra == "triton"']

    def test_runs_its_own_kernels(self, installed):
        lines = installed.run("-c", RUN_AN_OP.format(backend=", backend='cpu'")).splitlines()
        assert lines[0].startswith(str(installed.site_packages()))
        assert lines[1] == "0"

    def test_imports_the_mapped_packages(self, installed):
        installed.run("-c", "import overtone.benchmarks, overtone.triton_kernels")

    def test_command_line(self, installed):
        text = run_well(installed.folder / "bin/overtone", "info", cwd=installed.folder)
        assert "available: C++ kernels" in text

    def test_uses_only_the_stable_abi(self, installed):
        """What the extension takes from torch are C functions that torch 2.10's stable headers declare.

        The installed headers know which version each function came with; with 2.9 as the target some are missing.
        """
        if shutil.which("nm") is None or shutil.which("readelf") is None:
            pytest.skip("needs nm and readelf (binutils)")
        library = next(installed.site_packages().glob("overtone/_C.*.so"))
        from_torch = needed_symbols(library) & defined_symbols(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
        assert "torch_library_impl" in from_torch
        assert from_torch - stable_functions("0x020a000000000000") == set()
        assert "torch_library_impl" not in stable_functions("0x0209000000000000")
        needed = run_well("readelf", "-d", library, cwd=installed.folder)
        assert "libtorch_cpu" in needed
        assert "libtorch_python" not in needed
        assert "libc10" not in needed

    def test_runs_under_another_torch(self, distributions, tmp_path):
        """The same wheel, not built again: OVERTONE_TEST_PYTHON is a Python that has another torch ≥ 2.10."""
        python = os.environ.get("OVERTONE_TEST_PYTHON")
        if python is None:
            pytest.skip("no other torch: OVERTONE_TEST_PYTHON names no Python that has one")
        zipfile.ZipFile(next(distributions.glob("*.whl"))).extractall(tmp_path)
        version = run_well(python, "-c", "import torch; print(torch.__version__)", cwd=tmp_path).strip()
        assert version.partition("+")[0] != torch.__version__.partition("+")[0]
        run_well(python, "-c", RUN_EVERY_FAMILY, cwd=tmp_path, PYTHONPATH=str(tmp_path))


def needed_symbols(library: Path) -> set[str]:
    """What a library cannot do without: marked U, where w would mean that it looks first whether it is there."""
    lines = run_well("nm", "-D", "--undefined-only", library, cwd=ROOT).splitlines()
    return {name for kind, name in map(str.split, lines) if kind == "U"}


def defined_symbols(library: Path) -> set[str]:
    """Without those of the C++ standard library, of which every library exports some."""
    lines = run_well("nm", "-D", "--defined-only", library, cwd=ROOT).splitlines()
    return {name for *_, name in map(str.split, lines) if not re.match(r"_ZN?K?S", name)}


def stable_functions(target_version: str) -> set[str]:
    """Every name in the headers of the stable ABI, as a build for that version of torch sees them."""
    headers = ("torch/csrc/stable/c/shim.h", "torch/csrc/inductor/aoti_torch/c/shim.h")
    command = shlex.split(os.environ.get("CXX") or "c++")
    command += [*("-E", "-P", "-x", "c++", "-std=c++20", f"-DTORCH_TARGET_VERSION={target_version}")]
    command += [f"-I{path}" for path in include_paths()] + ["-"]
    source = "".join(f"#include <{header}>\n" for header in headers)
    text = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\w+", text))


@pytest.mark.slow
class TestPureWheel:
    def test_is_for_any_machine(self, pure_distributions):
        wheel = next(pure_distributions.glob("*.whl"))
        assert wheel.name.endswith("-py3-none-any.whl")
        assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]

    def test_types_reach_a_consumer(self, installed_pure):
        """A module of a user's type-checks against the installed wheel, and a mistake in it is found."""
        module = installed_pure.folder / "consumer.py"
        module.write_text(CONSUMER)
        check = (sys.executable, "-m", "mypy", "--strict", "--python-executable", installed_pure.python, module)
        run_well(*check, cwd=installed_pure.folder)
        module.write_text(CONSUMER + 'ot.frequency_norms("tokens")\n')
        result = run(*check, cwd=installed_pure.folder)
        assert result.returncode == 1 and 'Argument 1 to "frequency_norms"' in result.stdout, (
            result.stdout + result.stderr
        )

    def test_runs_on_the_reference_and_says_so_once(self, installed_pure):
        lines = installed_pure.run("-c", RUN_AN_OP.format(backend="")).splitlines()
        assert lines[0].startswith(str(installed_pure.site_packages()))
        assert lines[1].startswith("1 falling back to the PyTorch reference")

    def test_refuses_the_cpu_backend_by_name(self, installed_pure):
        code = RUN_AN_OP.format(backend=", backend='cpu'")
        result = run(installed_pure.python, "-c", code, cwd=installed_pure.folder)
        assert result.returncode != 0
        assert "BackendError" in result.stderr
        assert "the C++ extension was not built" in result.stderr

    def test_info_says_that_the_extension_is_missing(self, installed_pure):
        assert "not available: the C++ extension was not built" in installed_pure.run("-m", "overtone", "info")


def complaint_of_setup_py(tree: Path, **switches: str) -> str:
    result = run(sys.executable, "setup.py", "--version", cwd=tree, **switches)
    assert result.returncode != 0
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr


class TestSwitches:
    @pytest.mark.parametrize(
        ("name", "value", "wanted"),
        [
            ("OVERTONE_SKIP_EXTENSION", "yes", "wanted one of 0, 1"),
            ("OVERTONE_CUDA", "yes", "wanted one of auto, 1, 0"),
            ("OVERTONE_CUDA_ARCHS", "sm_80", "wanted a list such as '8.0;9.0;12.0+PTX'"),
            ("OVERTONE_SANITIZE", "memory", "wanted one of address, thread"),
            ("OVERTONE_DEBUG", "2", "wanted one of 0, 1"),
        ],
    )
    def test_a_value_without_meaning_is_an_error(self, name, value, wanted):
        line = complaint_of_setup_py(ROOT, **{name: value})
        assert line.startswith(f"overtone: {name}={value!r}: ")
        assert wanted in line

    @pytest.mark.skipif(torch.version.cuda is not None, reason="torch is a CUDA build")
    def test_cuda_cannot_be_forced_with_a_cpu_build_of_torch(self, tmp_path):
        tree = copy_of_the_tree(tmp_path)
        assert "is not a CUDA build; install one" in complaint_of_setup_py(tree, OVERTONE_CUDA="1")
        run_well(sys.executable, "setup.py", "--version", cwd=tree, OVERTONE_CUDA="auto")

    def test_without_a_compiler_pip_says_so_and_names_the_way_out(self, tmp_path):
        tree = copy_of_the_tree(tmp_path)
        result = run(
            *(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "."),
            cwd=tree,
            CXX="no-such-compiler",
        )
        assert result.returncode != 0
        lines = [line for line in (result.stdout + result.stderr).splitlines() if "overtone: " in line]
        assert len(lines) == 1
        assert "no C++ compiler: 'no-such-compiler' was not found" in lines[0]
        assert "OVERTONE_SKIP_EXTENSION=1" in lines[0]
        assert "Traceback" not in result.stdout + result.stderr

    @pytest.mark.parametrize(("free_gigabytes", "cores", "jobs"), [(3.5, 8, "3"), (64, 8, "8"), (0.2, 8, "1")])
    def test_jobs_are_limited_by_free_memory(self, monkeypatch, free_gigabytes, cores, jobs):
        pages = {"SC_AVPHYS_PAGES": int(free_gigabytes * 2**30) // 4096, "SC_PAGE_SIZE": 4096}
        monkeypatch.setattr(os, "sysconf", pages.__getitem__)
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.setenv("MAX_JOBS", "")  # so that it is restored afterwards
        monkeypatch.delenv("MAX_JOBS")
        runpy.run_path(str(ROOT / "setup.py"), run_name="not main")["limit_jobs_by_memory"]()
        assert os.environ["MAX_JOBS"] == jobs
