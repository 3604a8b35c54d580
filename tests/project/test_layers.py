"""Who may import, and include, whom: imports point down. One table, the one that DESIGN.md explains."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "overtone": "python/overtone",
    "overtone.triton_kernels": "triton_kernels",
    "overtone.benchmarks": "benchmarks",
}
BASE = {
    "types",
    "_validate",
    "_files",
    "_extension",
    "_precision",
    "_transforms",
    "_deprecated",
    "hardware",
    "libraries",
}
MAY = dict.fromkeys(BASE, BASE) | {
    "_C": set(),
    "_extension": BASE | {"_C"},
    "triton_kernels": set(),
    "reference": {"types", "_transforms", "_precision"},
    "backends": BASE | {"triton_kernels"},
    "ops": BASE | {"reference", "backends"},
    "linalg": {"ops"},
    "spectrum": BASE | {"reference", "ops"},
    "nn": BASE | {"reference", "ops", "spectrum"},
    "models": BASE | {"ops", "spectrum", "nn"},
    "integrations": BASE | {"ops", "linalg", "spectrum", "nn"},
    "report": BASE,
    "analysis": BASE | {"reference", "ops", "linalg", "report"},
    "training": BASE | {"spectrum", "models"},
    "study": BASE | {"backends", "models", "nn", "analysis", "training", "report", "overtone"},
    "tools": {"triton_kernels", "_extension"},
    "benchmarks": BASE | {"overtone", "reference", "ops", "nn", "models", "backends", "report"},
}
# The root's underscore modules are for the library itself; whole files are everybody's.
FOR_THE_LIBRARY = ("study", "benchmarks", "cli")
MAY["cli"] = set(MAY) | {"overtone"}
# csrc/cpu: what an op's folder may include besides itself and the headers of csrc/cpu and csrc.
CPP = {
    "isa": set(),
    "bench": set(),
    "simd": {"isa"},
    "gemm": {"isa", "simd"},
    "frequency": {"isa", "simd", "gemm"},
    "layer_norm": {"isa", "simd"},
    "linear": {"isa", "simd", "gemm"},
    "linalg": {"isa", "simd", "gemm"},
    "attention": {"isa", "simd", "gemm", "frequency"},
}


def layer(module: str) -> str:
    """`overtone.ops.linalg.qr` is in ops; a name of the package root that is no module is in overtone."""
    head = module.removeprefix("overtone").removeprefix(".").partition(".")[0]
    return head if head in MAY else "overtone"


def imported(source: str) -> Iterator[tuple[str, int]]:
    """The modules of ours that a source imports, wherever in it, and the lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not used here"
            is_root = node.module == "overtone"
            names = [f"overtone.{alias.name}" for alias in node.names] if is_root else [str(node.module)]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name.partition(".")[0] == "overtone")


def violations(own: str, source: str) -> list[str]:
    allowed = set(MAY) | {"overtone"} if own == "overtone" else MAY[own] | {own}
    if own in FOR_THE_LIBRARY:
        allowed = {name for name in allowed if name == "_files" or not name.startswith("_")}
    return [
        f"line {line}: {own} imports {layer(name)}" for name, line in imported(source) if layer(name) not in allowed
    ]


def include_violations(own: str, source: str) -> list[str]:
    allowed = CPP[own] | {own}
    return [f"{own} includes {other}/" for other in re.findall(r'#include "cpu/(\w+)/', source) if other not in allowed]


@pytest.mark.parametrize("package", FOLDERS)
def test_imports_point_down(package):
    folder = ROOT / FOLDERS[package]
    wrong = []
    for path in sorted(folder.rglob("*.py")):
        own = layer(".".join((package, *path.relative_to(folder).with_suffix("").parts)))
        wrong += [f"{path.relative_to(ROOT)}: {found}" for found in violations(own, path.read_text())]
    assert not wrong, "\n".join(wrong)


def test_includes_point_down():
    wrong = []
    for path in sorted((ROOT / "csrc/cpu").rglob("*.*")):
        own = path.relative_to(ROOT / "csrc/cpu").parts[0]
        if own in CPP:
            wrong += [f"{path.relative_to(ROOT)}: {found}" for found in include_violations(own, path.read_text())]
    assert not wrong, "\n".join(wrong)


def test_cuda_includes_nothing_of_the_cpu():
    wrong = [path for path in (ROOT / "csrc/cuda").rglob("*.*") if '#include "cpu/' in path.read_text()]
    assert not wrong


@pytest.mark.parametrize(
    ("own", "source"),
    [
        ("ops", "from overtone.nn.attention import SpectralAttention"),
        ("reference", "import overtone.ops.qr"),
        ("triton_kernels", "def f():\n    from overtone.backends import select"),
        ("analysis", "import overtone as ot"),
        ("study", "from overtone import _extension"),
    ],
)
def test_a_planted_import_is_found(own, source):
    assert len(violations(own, source)) == 1


def test_a_planted_include_is_found():
    assert include_violations("gemm", '#include "cpu/simd/vector.h"\n#include "cpu/attention/params.h"\n') == [
        "gemm includes attention/"
    ]
