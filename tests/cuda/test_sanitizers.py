"""The CUDA kernels, run on the host, under ThreadSanitizer (a missing barrier is a race) and AddressSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support import cuda_emulator

SANITIZERS = {
    "thread": ["-fsanitize=thread"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the sanitizers' fiber interface is tested on Linux"),
]


@pytest.fixture(scope="module")
def check():
    """Runs tests/cuda/emulator/check.cpp, built with a sanitizer, on all kernels or on one mistake."""

    def run(sanitizer: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        flags = ["-O1", "-g", "-fno-omit-frame-pointer", *SANITIZERS[sanitizer]]
        program = cuda_emulator.build(f"check-{sanitizer}", ["check.cpp", "emulator.cpp"], *flags)
        environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}
        return subprocess.run([program, *arguments], env=environment, capture_output=True, text=True, check=False)

    return run


def reports(result: subprocess.CompletedProcess[str]) -> list[str]:
    """What a sanitizer said, without AddressSanitizer's remark on fibers in general."""
    return [line for line in result.stderr.splitlines() if "ASan doesn't fully support makecontext" not in line]


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_every_kernel(check, sanitizer):
    result = check(sanitizer)
    assert result.returncode == 0, result.stdout + result.stderr[-5000:]
    assert result.stdout == "every kernel ran\n" and not reports(result)


@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("name", ["neighbour", "neighbour lane", "half warps"])
def test_what_is_no_mistake_is_not_reported(check, sanitizer, name):
    result = check(sanitizer, name)
    assert result.returncode == 0 and not reports(result), result.stderr[-5000:]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("missing barrier", "neighbour<false>"),
        ("missing warp barrier", "neighbour_lane<false>"),
        ("shuffle for a barrier", "shuffle_for_barrier"),
        ("missing second barrier", "missing_second_barrier"),
        ("blocks that meet", "blocks_that_meet"),
    ],
)
def test_a_race_is_reported_at_its_line(check, name, function):
    result = check("thread", name)
    assert result.returncode != 0
    assert "ThreadSanitizer: data race" in result.stderr and "mistakes.h" in result.stderr
    assert function in result.stderr


@pytest.mark.parametrize(
    "name", ["write behind shared memory", "write before shared memory", "read behind shared memory"]
)
def test_memory_outside_is_reported(check, name):
    result = check("address", name)
    assert result.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in result.stderr and "mistakes.h" in result.stderr
