"""Peak memory of a call: known allocations are counted, whoever makes them, and freed ones that were reused as well."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from overtone.benchmarks.harness import memory
from overtone.benchmarks.harness.case import Call

MB = 1_000_000
# Pages that a call touches by the way: stacks, Python's own objects, the kernel's counters per thread.
SLACK = 2 * MB


def peak(function) -> int:
    """The median of three: a kernel that is short of memory may take pages back between two looks at its count."""
    call = Call(lambda _: function())
    call.results()
    found = [memory.peak_bytes(call) for _ in range(3)]
    if None in found:
        pytest.skip("this system does not say how much memory a call takes")
    return sorted(found)[1]


def ones(megabytes: int) -> torch.Tensor:
    return torch.ones(megabytes * MB // 4)


def test_a_result_counts():
    assert peak(lambda: (ones(64),)) == pytest.approx(64 * MB, abs=SLACK)


def test_a_temporary_counts_even_if_its_memory_was_free_before():
    def squeeze():
        return ((ones(48) + 1).sum(),)  # two of 48 at once

    for _ in range(2):
        assert peak(squeeze) == pytest.approx(96 * MB, abs=SLACK)


def test_small_blocks_count():
    """The allocator takes them from its heap, not from the system."""
    assert peak(lambda: [torch.ones(4096) for _ in range(2000)]) == pytest.approx(2000 * 4096 * 4, abs=SLACK)


def test_memory_that_torch_knows_nothing_of_counts():
    assert peak(lambda: (np.ones(32 * MB // 8),)) == pytest.approx(32 * MB, abs=SLACK)


def test_inputs_and_what_was_prepared_do_not_count():
    given = ones(64)
    assert peak(lambda: (given.sum(),)) < SLACK
    prepared = Call(lambda state: (state.sum(),), prepare=lambda: ones(64))
    prepared.results()
    found = memory.peak_bytes(prepared)
    assert found is None or found < SLACK


def test_a_system_that_does_not_say_gives_none(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "CLEAR", tmp_path / "missing" / "clear_refs")
    assert memory.peak_bytes(Call(lambda _: (ones(1),))) is None
