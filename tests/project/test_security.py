"""No pickle, no shell, no network at run time: nothing of the kind is in the sources that are shipped."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = [path for folder in ("python", "triton_kernels", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
CPP = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]

# Whoever imports one of these loads pickles, or speaks to the network.
MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
MODULES |= {"aiohttp", "ftplib", "http", "httpx", "requests", "smtplib", "socket", "socketserver", "telnetlib"}
MODULES |= {"urllib", "urllib3", "webbrowser", "xmlrpc"}
CALLS = {"os.system", "os.popen", "torch.hub.load", "torch.hub.load_state_dict_from_url", "eval", "exec"}
CPP_CALLS = re.compile(r"\b(?:std::)?(?:system|popen|execl[pe]?|execv[pe]?|socket|connect|getaddrinfo|dlopen)\s*\(")


def mistakes(code: str) -> list[str]:
    """What in Python code is against the rules, with its line."""
    found = []
    for node in ast.walk(ast.parse(code)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [f"{node.lineno}: imports {name}" for name in names if name.partition(".")[0] in MODULES]
        if isinstance(node, ast.Call):
            found += [f"{node.lineno}: {what}" for what in _mistakes_of_call(node)]
    return found


def _mistakes_of_call(call: ast.Call) -> list[str]:
    name, keywords = ast.unparse(call.func), {word.arg: ast.unparse(word.value) for word in call.keywords}
    found = [f"calls {name}"] if name in CALLS else []
    if keywords.get("shell", "False") != "False":
        found.append("starts a shell")
    if name == "torch.load" and keywords.get("weights_only") != "True":
        found.append("torch.load without weights_only=True")
    if "allow_pickle" in keywords and keywords["allow_pickle"] != "False":
        found.append("allows pickle")
    return found


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "def f():\n    from urllib.request import urlopen",
        "import os\nos.system('ls')",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=wanted)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "eval(text)",
    ],
)
def test_a_mistake_is_seen(code):
    assert mistakes(code)


@pytest.mark.parametrize(
    "code", ["import socketry", "model.eval()", "subprocess.run(['ls'])", "torch.load(f, weights_only=True)"]
)
def test_what_is_no_mistake_is_not_reported(code):
    assert not mistakes(code)


def test_the_python_sources():
    assert len(PYTHON) > 80
    assert {str(path.relative_to(ROOT)): found for path in PYTHON if (found := mistakes(path.read_text()))} == {}


def test_the_cpp_sources():
    assert len(CPP) > 40
    assert CPP_CALLS.search('std::system("ls")') and not CPP_CALLS.search("solve_system(a)")
    codes = {str(path.relative_to(ROOT)): re.sub(r"//.*", "", path.read_text()) for path in CPP}
    found = {path: CPP_CALLS.findall(code) for path, code in codes.items()}
    assert {path: calls for path, calls in found.items() if calls} == {}
