"""`make setup` with what a machine may lack, one thing at a time: one line says what is missing and what to do.

The set-up runs in a copy of the clone, on a PATH that holds only what a test puts there. Most tests use a stand-in
for Python that notes how it is called, so that nothing is installed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = "awk cat cmp cp df dirname env find grep head ln make mkdir rm sed sh sleep touch".split()
FAKE_PYTHON = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
*version_info*) echo "${FAKE_VERSION:-3.11}" ;;
*ensurepip*) exit "${FAKE_NO_VENV:-0}" ;;
*Python.h*) exit "${FAKE_NO_HEADERS:-0}" ;;
"-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
*"install"*"-r requirements-dev.txt"*)
    sleep "${FAKE_PIP_SECONDS:-0}"
    if [ -n "${FAKE_PIP_ERROR:-}" ]; then echo "$FAKE_PIP_ERROR"; exit 1; fi ;;
*build_ext*)
    if [ -n "${FAKE_BUILD_ERROR:-}" ]; then echo "$FAKE_BUILD_ERROR"; exit 1; fi ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


class Clone:
    """A copy of what set-up reads, and the machine it runs on."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a clone"  # with a space, as some home folders have
        self.bin = folder / "bin"
        self.calls_file = folder / "calls"
        self.environment = {"PATH": str(self.bin), "HOME": str(folder / "home"), "CALLS": str(self.calls_file)}
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.install("python3", FAKE_PYTHON)
        self.install("c++", "#!/bin/sh\ncat >/dev/null\n")
        for name in ("scripts", "csrc"):
            shutil.copytree(ROOT / name, self.root / name)
        for name in ("Makefile", "requirements-dev.txt", "requirements-no-deps.txt", "setup.py", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root)

    def install(self, command: str, text: str) -> None:
        (self.bin / command).unlink(missing_ok=True)
        (self.bin / command).write_text(text)
        (self.bin / command).chmod(0o755)

    def remove(self, command: str) -> None:
        (self.bin / command).unlink()

    def touch(self, name: str) -> None:
        """Make a file newer than every stamp."""
        later = time.time() + 1
        os.utime(self.root / name, (later, later))
        time.sleep(1.1)  # a stamp made from now on is newer still

    def make(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", *arguments],
            cwd=self.root,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    def steps(self, *arguments: str, **environment: str) -> list[str]:
        """The steps a make that must succeed carries out."""
        self.calls_file.write_text("")
        result = self.make(*arguments, **environment)
        assert result.returncode == 0, result.stderr
        marks = {"-r requirements-dev.txt": "requirements", "-e .": "package", "build_ext": "extension"}
        calls = self.calls_file.read_text().splitlines()
        return [step for call in calls for mark, step in marks.items() if mark in call]

    def complaint(self, *arguments: str, **environment: str) -> str:
        """The one line of a make that must fail; make adds only which of its targets failed."""
        result = self.make(*(arguments or ("setup",)), **environment)
        assert result.returncode != 0
        lines = [line for line in result.stderr.splitlines() if not line.startswith("make: ***")]
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("overtone: ")
        return lines[0]


@pytest.fixture
def clone(tmp_path) -> Clone:
    return Clone(tmp_path)


def test_a_missing_python(clone):
    clone.remove("python3")
    assert "'python3' was not found; install Python 3.10 or newer" in clone.complaint()


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.9"])
def test_an_old_python(clone, version):
    assert f"Python {version} is too old: install 3.10 or newer" in clone.complaint(FAKE_VERSION=version)


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.14"])
def test_a_python_that_is_new_enough(clone, version):
    assert clone.steps("setup", FAKE_VERSION=version) == ["requirements", "package", "extension"]


def test_another_python_can_be_named(clone):
    clone.install("python3.12", FAKE_PYTHON)
    assert clone.steps("setup", "PYTHON=python3.12", FAKE_VERSION="3.12")


def test_a_python_without_venv(clone):
    assert "no venv module: install it (Debian, Ubuntu: apt install python3.11-venv)" in clone.complaint(
        FAKE_NO_VENV="1"
    )


def test_a_python_without_headers(clone):
    assert "apt install python3.11-dev" in clone.complaint(FAKE_NO_HEADERS="1")


def test_a_missing_compiler(clone):
    clone.remove("c++")
    line = clone.complaint()
    assert "no C++ compiler: 'c++' was not found; install g++" in line
    assert "OVERTONE_SKIP_EXTENSION=1" in line


def test_a_compiler_that_is_gone_after_set_up(clone):
    clone.steps("setup")
    clone.remove("c++")
    clone.touch("csrc/module.cpp")
    assert "no C++ compiler" in clone.complaint()


def test_an_old_compiler(clone):
    clone.install("c++", "#!/bin/sh\nexit 1\n")
    assert "does not compile C++20; install g++ 10 or newer" in clone.complaint()


def test_without_a_compiler_the_extension_can_be_left_out(clone):
    clone.remove("c++")
    assert clone.steps("setup", OVERTONE_SKIP_EXTENSION="1") == ["requirements", "package"]


def test_a_full_disk_before_installing(clone):
    clone.install("df", "#!/bin/sh\necho head\necho disk 100 99 204800 99% /\n")
    assert "no disk: 204 MB free here, .venv needs 3 GB" in clone.complaint()


def test_a_disk_that_fills_while_installing(clone):
    error = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    assert "no disk left while installing; free some" in clone.complaint(FAKE_PIP_ERROR=error)


def test_no_build_for_this_python(clone):
    error = "ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: 2.9.0, 2.9.1)"
    line = clone.complaint(FAKE_PIP_ERROR=error, FAKE_VERSION="3.14")
    assert "torch==2.13.0 has no build for Python 3.14 here; name another Python" in line


def test_a_failing_build_names_its_reason_and_its_log(clone):
    line = clone.complaint(FAKE_BUILD_ERROR="csrc/x.cpp:1:1: error: expected ';'\nmore")
    assert "csrc/x.cpp:1:1: error: expected ';'" in line
    assert ".venv/extension.log" in line


@pytest.mark.parametrize(
    "settings",
    [
        {"PIP_NO_INDEX": "1"},
        {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"},  # nothing listens on the discard port
    ],
    ids=["no index", "unreachable index"],
)
def test_no_network(clone, settings):
    """With the real Python and pip."""
    clone.remove("python3")
    (clone.bin / "python3").symlink_to(sys.executable)
    line = clone.complaint(PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="", PIP_EXTRA_INDEX_URL="", **settings)
    assert "no network: pip reaches no package index; check the connection" in line
    assert not (clone.root / ".venv/requirements.done").exists()


def test_output_is_one_line_per_step(clone):
    lines = clone.make("setup").stdout.splitlines()
    assert len(lines) == 5
    assert "note: this path has a space" in lines[0]
    assert all(line.startswith("overtone: ") for line in lines)


def test_a_second_call_does_nothing(clone):
    assert clone.steps("setup") == ["requirements", "package", "extension"]
    assert clone.steps("setup") == []


@pytest.mark.parametrize(
    ("changed", "steps"),
    [
        ("csrc/module.cpp", ["extension"]),
        ("csrc/cpu/isa/isa.h", ["extension"]),
        ("pyproject.toml", ["package"]),
        ("setup.py", ["package", "extension"]),
        ("requirements-dev.txt", ["requirements", "package", "extension"]),
        ("requirements-no-deps.txt", ["requirements", "package", "extension"]),
    ],
)
def test_a_changed_file_repeats_the_steps_that_need_it(clone, changed, steps):
    clone.steps("setup")
    clone.touch(changed)
    assert clone.steps("setup") == steps
    assert clone.steps("setup") == []


def test_a_changed_switch_rebuilds_the_extension(clone):
    clone.steps("setup")
    assert clone.steps("setup", OVERTONE_DEBUG="1") == ["extension"]
    assert clone.steps("setup", OVERTONE_DEBUG="1") == []
    assert clone.steps("setup") == ["extension"]


def test_a_failed_step_is_done_again(clone):
    clone.complaint(FAKE_PIP_ERROR="ERROR: it broke")
    assert clone.steps("setup") == ["requirements", "package", "extension"]


def test_an_interrupted_step_is_done_again(clone):
    process = subprocess.Popen(
        ["make", "setup"],
        cwd=clone.root,
        env={**clone.environment, "FAKE_PIP_SECONDS": "30"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A test run in the background of a script ignores SIGINT, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in process.stdout:
        if "installing requirements" in line:
            break
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C sends
    assert process.wait(timeout=10) != 0
    assert clone.steps("setup") == ["requirements", "package", "extension"]


@pytest.mark.parametrize(
    ("target", "call"),
    [
        ("study", "-m overtone study"),
        ("bench", "-m overtone bench"),
        ("docs", "-m sphinx"),
        ("test", "-m pytest"),
        ("test-fast", "-m pytest"),
        ("lint", "-m ruff check"),
    ],
)
def test_every_target_sets_up_by_itself(clone, target, call):
    (clone.root / ".venv/bin").mkdir(parents=True)
    (clone.root / ".venv/bin/clang-format").write_text("#!/bin/sh\n")
    (clone.root / ".venv/bin/clang-format").chmod(0o755)
    steps = clone.steps(target)
    assert steps == (["requirements"] if target == "lint" else ["requirements", "package", "extension"])
    assert call in clone.calls_file.read_text()


def test_clean_keeps_the_environment(clone):
    for folder in ("python", "benchmarks", "triton_kernels", "tests"):
        (clone.root / folder).mkdir()
    clone.steps("setup")
    assert clone.make("clean").returncode == 0
    assert clone.steps("setup") == ["extension"]
    assert clone.make("clean-all").returncode == 0
    assert not (clone.root / ".venv").exists()


def test_ci_runs_make_test():
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("make test")
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_what_names_another_torch_is_installed_without_dependencies(clone):
    clone.steps("setup")
    calls = clone.calls_file.read_text().splitlines()
    (call,) = [call for call in calls if "requirements-no-deps.txt" in call]
    assert "--no-deps" in call


def test_kernels_are_written_once_per_instruction_set(tmp_path):
    """Sources that are there already keep their time, or ninja would compile them again; none names this machine."""
    spec = importlib.util.spec_from_file_location("overtone_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    sources = [Path(source) for source in setup.kernel_sources(tmp_path)]
    assert len(set(sources)) == sum(map(len, setup.KERNELS.values()))
    assert not any(str(tmp_path) in source.read_text() or str(ROOT) in source.read_text() for source in sources)
    for source in sources:
        os.utime(source, (1, 1))
    sources[0].write_text("// of an older version\n")
    setup.kernel_sources(tmp_path)
    assert [source.stat().st_mtime == 1 for source in sources] == [False, *[True] * (len(sources) - 1)]
    known = (ROOT / "csrc/cpu/isa/isa.h").read_text()
    assert all(f"X({isa}, __VA_ARGS__)" in known for isas in setup.KERNELS.values() for isa in isas)
    headers = {str(path.relative_to(ROOT / "csrc/cpu")) for path in (ROOT / "csrc/cpu").rglob("*kernels.h")}
    assert headers == set(setup.KERNELS)
