"""The documentation builds without a warning, offline; its code and examples run; its tables are complete."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import overtone
from overtone.cli import COMMANDS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
README = ROOT / "README.md"
EXAMPLES = sorted((DOCS / "examples").glob("*.py"))
TOUR = DOCS / "examples" / "tour.py"
ON_TWO_PROCESSES = DOCS / "examples" / "two_processes.py"
CODE = ("python", "triton_kernels", "benchmarks")  # folders of Python that is shipped


def page_name(page: Path) -> str:
    return str(page.relative_to(DOCS))


def page(name: str) -> str:
    return (DOCS / name).read_text()


def rows(text: str) -> list[list[str]]:
    """The cells of every table's rows, headings left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    rules = [place for place, row in enumerate(lines) if set(row) <= set("|-")]
    return [row for place, row in enumerate(cells) if place not in rules and place + 1 not in rules]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site as `make docs` builds it."""
    for package in ("sphinx", "myst_parser", "furo"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed: pip install 'overtone[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", f"{folder}/doctrees"]
    result = subprocess.run([*command, str(DOCS), f"{folder}/html"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return folder / "html"


class TestSite:
    def test_every_page_is_built(self, site):
        built = {str(path.relative_to(site).with_suffix(".md")) for path in site.rglob("*.html")}
        assert {page_name(path) for path in PAGES} <= built

    def test_nothing_is_loaded_from_elsewhere(self, site):
        loading = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc="https?:|<link\b[^>]*\bhref="https?:""")
        for path in site.rglob("*.html"):
            assert not loading.findall(path.read_text()), path
        for path in site.rglob("*.css"):
            assert not re.findall(r"""(?:@import\s+|url\()\s*["']?https?:""", path.read_text()), path

    def test_every_public_name_is_in_the_reference(self, site):
        anchors = set(re.findall(r'id="(?:module-)?(overtone[\w.]*)"', (site / "api.html").read_text()))
        namespaces = ("linalg", "spectrum", "nn", "models", "analysis", "reference")
        wanted = {f"overtone.{name}" for name in overtone.__all__}
        wanted |= {f"overtone.{space}.{name}" for space in namespaces for name in getattr(overtone, space).__all__}
        assert len(wanted) > 60
        assert wanted - anchors == set()


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", [path for path in PAGES if python_blocks(path.read_text())], ids=page_name)
def test_code_runs(path):
    names: dict = {}
    for code in python_blocks(path.read_text()):
        exec(compile(code, str(path), "exec"), names)


def test_every_guide_has_code():
    guides = sorted((DOCS / "guides").glob("*.md"))
    assert len(guides) == 4 and all(python_blocks(path.read_text()) for path in guides)


class TestReadme:
    def test_code_runs(self):
        names: dict = {}
        for code in python_blocks(README.read_text()):
            exec(compile(code, "README.md", "exec"), names)
        assert names["analysis"].samples == 8

    def test_names_the_two_commands(self):
        commands = README.read_text().partition("## Install")[0]
        assert "make study" in commands and "make test" in commands


class TestExamples:
    @pytest.mark.parametrize("path", [p for p in EXAMPLES if p != ON_TWO_PROCESSES], ids=lambda path: path.stem)
    def test_runs(self, path, tmp_path):
        """As a user runs them, without anything that the tests set up. They assert what they claim, and print it."""
        for library in ("timm", "transformers"):
            if re.search(rf"^(import|from) {library}\b", path.read_text(), re.MULTILINE):
                if importlib.util.find_spec(library) is None:
                    pytest.skip(f"the package {library} is not installed")
        environment = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
        result = subprocess.run(
            [sys.executable, str(path)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr
        assert "assert " in path.read_text() and result.stdout

    def test_runs_on_two_processes(self):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        result = subprocess.run([*launcher, str(ON_TWO_PROCESSES)], capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        losses = [float(loss) for loss in re.findall(r"on 2 processes: loss (\S+)", result.stdout)]
        assert len(losses) == 3 and losses[2] < losses[0]

    def test_the_tour_has_a_page(self):
        assert f"{{literalinclude}} examples/{TOUR.name}\n" in page("tour.md")

    @pytest.mark.parametrize("path", [p for p in EXAMPLES if p != TOUR], ids=lambda path: path.stem)
    def test_is_short_and_in_a_guide(self, path):
        assert len(path.read_text().splitlines()) < 40
        guides = "".join(guide.read_text() for guide in (DOCS / "guides").glob("*.md"))
        assert f"{{literalinclude}} ../examples/{path.name}\n" in guides


def test_files_named_in_words_exist():
    """Links of the documents beside the site, and paths in backticks anywhere: `tests/test_x.py`."""
    documents = [ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md")]
    for document in documents:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
            assert "://" in link or (ROOT / link).exists(), f"{document.name}: {link}"
    for path in PAGES:
        for name in re.findall(r"`((?:tests|scripts|csrc|python|triton_kernels|docs)/[\w/.]+)`", path.read_text()):
            assert (ROOT / name).exists(), f"{page_name(path)}: {name}"


def environment_variables() -> set[str]:
    """OVERTONE_* as Python, the build and the shell read them, and what C++ asks getenv for."""
    scripts = [ROOT / "setup.py", ROOT / "scripts" / "setup"]
    scripts += [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    found = {name for path in scripts for name in re.findall(r"\bOVERTONE_[A-Z]\w*", path.read_text())}
    cpp = "\n".join(path.read_text() for path in (ROOT / "csrc").rglob("*") if path.is_file())
    macros = set(re.findall(r"\bOVERTONE_\w+", cpp))
    return found - macros | set(re.findall(r'getenv\("(\w+)"\)', cpp))


def test_every_environment_variable_is_in_the_table():
    named = {row[0].strip("`") for row in rows(page("install.md"))}
    variables = environment_variables()
    assert {"OVERTONE_CPU_ISA", "OVERTONE_AUTOTUNE", "OVERTONE_CUDA"} <= variables
    assert variables - named == set()
    assert {name for name in named if name.startswith("OVERTONE_")} - variables == set()


@cache
def source_texts() -> list[str]:
    """Every string in the Python sources, a formatted one with … for what it is given; other sources as they are."""
    texts = []
    files = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    for path in [*files, ROOT / "setup.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                texts.append("".join(map(str, parts)))
    others = [ROOT / "scripts" / "setup", *(ROOT / "csrc").rglob("*.cpp")]
    return texts + [path.read_text() for path in others]


def test_every_build_switch_is_in_the_table():
    switches = set(re.findall(r"`(OVERTONE_\w+|MAX_JOBS|CXX)`", (ROOT / "setup.py").read_text()))
    build = page("install.md").partition("## Build switches")[2].partition("## Run-time variables")[0]
    assert switches and switches == {row[0].strip("`") for row in rows(build)}


def test_every_message_is_one_of_ours():
    quoted = [row[0] for row in rows(page("troubleshooting.md").partition("## Without a message")[0])]
    assert len(quoted) > 40
    for message in quoted:
        assert re.fullmatch(r"`[^`]+`", message), message
        for part in filter(None, (part.strip() for part in message.strip("`").split("…"))):
            assert any(part in text for text in source_texts()), f"{message}: {part!r} is nowhere in the sources"


def test_every_command_is_in_the_table():
    commands = [row[0] for row in rows(page("cli.md")) if row[0].startswith("`overtone ")]
    assert commands == [f"`overtone {name}`" for name in COMMANDS]


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = {"required": project["project"]["dependencies"], "build": project["build-system"]["requires"]}
    groups |= project["project"]["optional-dependencies"]
    wanted = {(group, re.match(r"[\w-]+", name)[0]) for group, names in groups.items() for name in names}
    packages = page("install.md").partition("## What is installed")[2].partition("## Build switches")[0]
    table = [row for row in rows(packages) if len(row) == 3]
    assert {(group.strip("`"), package) for group, package, _ in table} == wanted
    assert all(reason for _, _, reason in table)
