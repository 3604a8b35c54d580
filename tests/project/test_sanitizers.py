"""The C++ ops under AddressSanitizer and UndefinedBehaviorSanitizer, in an extension built for that."""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Kept between runs, so that only changed files are compiled again.
BUILD = ROOT / "build" / "sanitize-address"
COMPILER = shlex.split(os.environ.get("CXX") or "c++")

# What the sanitizers must report if they watch at all. The memory is torch's, as it is for the ops.
MISTAKES = """
#include <climits>
extern "C" double read_at(const double* data, long index) { return data[index]; }
extern "C" int add_to_largest(int amount) { return INT_MAX + amount; }
"""
MAKE_A_MISTAKE = """
import ctypes, torch
mistakes = ctypes.CDLL({library!r})
mistakes.read_at.restype = ctypes.c_double
data = torch.ones(7, dtype=torch.float64)
{call}
"""

# Of tests/project/fuzz_workload.py: half a minute under the sanitizers.
FUZZ_CALLS = "12000"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="preloading the sanitizers works on Linux"),
]


def runtime_libraries() -> str:
    """The libraries to preload: Python itself is not built with the sanitizers, so they must come first."""
    if shutil.which(COMPILER[0]) is None:
        pytest.skip(f"no C++ compiler: {COMPILER[0]!r} was not found")
    paths = []
    for name in ("libasan.so", "libstdc++.so"):
        command = [*COMPILER, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not os.path.isabs(path):
            pytest.skip(f"{COMPILER[0]} has no {name}")
        paths.append(path)
    return " ".join(paths)


@pytest.fixture(scope="module")
def watched_environment() -> dict[str, str]:
    return {
        **os.environ,
        "LD_PRELOAD": runtime_libraries(),
        # Python and torch keep what they allocate until the end; that is no leak of ours.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join([str(BUILD / "lib"), str(ROOT / "tests")]),
    }


@pytest.fixture(scope="module")
def watched_extension(watched_environment) -> None:
    shutil.rmtree(BUILD / "lib", ignore_errors=True)
    result = subprocess.run(
        [sys.executable, "setup.py", "build", "--build-lib", BUILD / "lib", "--build-temp", BUILD / "temp"],
        cwd=ROOT,
        env={**os.environ, "OVERTONE_SANITIZE": "address"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory) -> str:
    """A library of mistakes, compiled with the extension's flags, after those that Python brings along."""
    folder = tmp_path_factory.mktemp("mistakes")
    flags = runpy.run_path(str(ROOT / "setup.py"), run_name="not main")["SANITIZER_FLAGS"]["address"]
    (folder / "mistakes.cpp").write_text(MISTAKES)
    command = [*COMPILER, "-fwrapv", "-O1", "-g", "-shared", "-fPIC", *flags, "mistakes.cpp", "-o", "mistakes.so"]
    subprocess.run(command, cwd=folder, check=True)
    return str(folder / "mistakes.so")


def run_watched(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("call", "report"),
    [
        ("mistakes.read_at(ctypes.c_void_p(data.data_ptr()), ctypes.c_long(7))", "heap-buffer-overflow"),
        ("mistakes.add_to_largest(1)", "signed integer overflow"),
    ],
)
def test_a_mistake_is_reported(watched_environment, mistakes, call, report):
    code = MAKE_A_MISTAKE.format(library=mistakes, call=call)
    result = run_watched(watched_environment, "-c", code)
    assert result.returncode != 0
    assert report in result.stderr


def test_what_is_no_mistake_is_not_reported(watched_environment, mistakes):
    call = "assert mistakes.read_at(ctypes.c_void_p(data.data_ptr()), ctypes.c_long(6)) == 1"
    result = run_watched(watched_environment, "-c", MAKE_A_MISTAKE.format(library=mistakes, call=call))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("script", ["tests/project/sanitizer_workload.py", "tests/project/linalg_workload.py"])
def test_every_cpu_op(watched_environment, watched_extension, script):
    result = run_watched(watched_environment, script)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith("sanitizers: address"), result.stdout
    assert "runtime error" not in result.stderr


def test_calls_with_arguments_that_do_not_fit(watched_environment, watched_extension):
    """At every ISA level; a call returns or is refused, and never touches memory that is not its own."""
    result = run_watched(watched_environment, "-W", "ignore", "tests/project/fuzz_workload.py", FUZZ_CALLS)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
    assert result.stdout.strip().endswith("sanitizers: address"), result.stdout
    assert "runtime error" not in result.stderr


def test_the_tests_of_the_cpu_ops(watched_environment, watched_extension):
    """Without those of torch.compile: they would compile torch's C++ under the sanitizers, not ours."""
    result = run_watched(
        watched_environment,
        *("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not compil", "tests/ops/test_frequency.py"),
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
    assert " passed" in result.stdout
