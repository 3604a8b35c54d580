"""The model of the CUDA kernels' work against what the host stand-in counts."""

from __future__ import annotations

import argparse

import pytest
import torch
from test_eig import randn
from test_eigh import random_symmetric

from overtone.cli import kernels as command
from overtone.cuda_kernels import model

COUNT = 3


@pytest.mark.parametrize(("n", "path"), [(16, "warp"), (40, "block")])
def test_eigh(host_cuda, n, path):
    """Shuffles give the number of sweeps; the barriers follow exactly. Random matrices take the model's sweeps."""
    counts = host_cuda.eigh(random_symmetric(COUNT, n, dtype=torch.float32), path).counts
    warps = 1 if path == "warp" else 2
    barriers = counts["warp_barriers" if path == "warp" else "block_barriers"]
    reductions = counts["shuffles"] / (5 * warps)  # a butterfly of five in every warp
    sweeps = (reductions / COUNT - model.eigh_reductions(n, 0)) / 2
    assert barriers == COUNT * model.eigh_barriers(n, sweeps)
    assert sweeps == pytest.approx(model.QL_SWEEPS * n, rel=0.25)


def test_eigvals_of_a_warp(host_cuda):
    """Two barriers per step of the bulge; the rest is a small part."""
    n = 24
    counts = host_cuda.eigvals(randn(COUNT, n, n, dtype=torch.float32), "warp").counts
    assert counts["warp_barriers"] / COUNT == pytest.approx(model.eigvals_work(n, "warp").barriers, rel=0.3)


def test_eigvals_of_a_block(host_cuda):
    n = 40
    counts = host_cuda.eigvals(randn(COUNT, n, n, dtype=torch.float32), "block").counts
    assert counts["block_barriers"] / COUNT == pytest.approx(model.eigvals_work(n, "block").barriers, rel=0.3)


def test_the_model_is_printed(capsys):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["kernels", "--cuda", "--model"])
    assert args.run(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(model.BATCHES) * len(model.GPUS) + 1
    assert "not a measurement" in lines[-1]
    for line in lines[1:-1]:
        milliseconds, loop = (float(cell) for cell in line.split()[-3:-1])
        assert milliseconds < loop
