"""The host stand-in for CUDA's execution model finds the mistakes it exists for, and only those."""

from __future__ import annotations

import pytest
import torch

ORDERS = ("forward", "reverse", 1, 2)


@pytest.mark.parametrize("order", ORDERS)
class TestMistakes:
    @pytest.mark.parametrize(
        ("name", "report"),
        [
            ("barrier not reached by all", "waits at __syncthreads for thread 40, which is at its end"),
            ("mask without the caller", "is not in its own mask at a shuffle"),
            ("masks that differ", "which is at __syncwarp with another mask"),
            ("shuffle from outside of the mask", "shuffles from lane 20, outside of its mask"),
            ("lanes at different operations", "waits at __syncwarp for thread .*, which is at a vote"),
            ("write behind shared memory", "wrote outside of its shared memory"),
            ("write before shared memory", "wrote outside of its shared memory"),
        ],
    )
    def test_reported(self, host_cuda, name, report, order):
        with pytest.raises(host_cuda.module.Mistake, match=report):
            host_cuda.mistake(name, order)

    @pytest.mark.parametrize("name", ["missing barrier", "missing warp barrier", "memory nobody wrote"])
    def test_poison_shows(self, host_cuda, name, order):
        assert host_cuda.mistake(name, order).isnan().any()

    @pytest.mark.parametrize("name", ["neighbour", "neighbour lane"])
    def test_what_is_right_is_not_reported(self, host_cuda, name, order):
        i = torch.arange(64)
        wanted = (i + 1) % 64 if name == "neighbour" else i - i % 32 + (i + 1) % 32
        assert torch.equal(host_cuda.mistake(name, order), wanted.float())

    def test_parts_of_a_warp(self, host_cuda, order):
        lane = torch.arange(64) % 32
        summed = torch.where(lane < 16, lane + (lane ^ 1), lane)
        votes = torch.where(lane < 16, 1, 1)  # lower half: one of them is lane 3; upper half: all are above 3
        assert torch.equal(host_cuda.mistake("half warps", order), (summed + votes).float())


def test_the_order_of_warps_shows_in_what_they_read(host_cuda):
    """A barrier too few at the end of a loop: no poison is read, but results depend on who goes first."""
    results = {tuple(host_cuda.mistake("missing second barrier", order).tolist()) for order in ORDERS}
    assert len(results) > 1


def test_a_seed_repeats_its_order(host_cuda):
    first, again = (host_cuda.mistake("missing second barrier", 7) for _ in range(2))
    assert torch.equal(first, again)
