"""The model of the CUDA kernels' work against what the host stand-in counts."""

from __future__ import annotations

import argparse

import pytest
import torch
from ops.linalg.test_eig import randn
from ops.linalg.test_eigh import random_symmetric

from overtone.cli import kernels as command
from overtone.tools import cuda_cost

COUNT = 2
CLOSE = 0.1  # what the formulas leave out: sums, shifts, the search for windows


@pytest.mark.parametrize(("n", "path"), [(16, "warp"), (32, "warp"), (40, "block"), (64, "block")])
def test_eigh(host_cuda, n, path):
    """Shuffles give the sweeps, FLOPs the steps; barriers follow exactly and shared memory closely."""
    result = host_cuda.counting().eigh(random_symmetric(COUNT, n, dtype=torch.float32), path)
    assert not result.info.any()
    counts = {name: count / COUNT for name, count in result.counts.items()}
    warps = 1 if path == "warp" else 2
    sweeps = (counts["shuffles"] / (5 * warps) - cuda_cost.eigh_reductions(n, 0)) / 2
    assert counts["warp_barriers" if path == "warp" else "block_barriers"] == cuda_cost.eigh_barriers(n, sweeps)
    none, one = (cuda_cost.eigh_flops(n, sweeps, steps) for steps in (0, 1))
    steps = (counts["flops"] - none) / (one - none)
    assert counts["shared"] == pytest.approx(cuda_cost.eigh_shared(n, sweeps, steps), rel=CLOSE)
    assert sweeps == pytest.approx(cuda_cost.QL_SWEEPS * n, rel=0.2)
    assert steps == pytest.approx(cuda_cost.QL_SWEEPS * cuda_cost.QL_LENGTH * n * n, rel=0.2)


@pytest.mark.parametrize(("n", "path"), [(16, "warp"), (32, "warp"), (40, "block"), (64, "block"), (64, "packed")])
def test_eigvals(host_cuda, n, path):
    """Warp barriers give the steps; FLOPs, shared memory and the block's barriers follow closely."""
    result = host_cuda.counting().eigvals(randn(COUNT, n, n, dtype=torch.float32), path)
    assert not result.info.any()
    counts = {name: count / COUNT for name, count in result.counts.items()}
    # Two in a step, three in a sweep (five where the warp is the team), some at the end of windows.
    of_reduction = cuda_cost.eigvals_barriers(n, path, cuda_cost.Francis(0, 0, 0, 0)) if path == "warp" else 1.5 * n
    per_sweep = 5 if path == "warp" else 3
    per_eigenvalue = (counts["warp_barriers"] - of_reduction) / (n * n + per_sweep * n)
    francis = cuda_cost.Francis.of(n, per_eigenvalue)
    assert counts["flops"] == pytest.approx(cuda_cost.eigvals_flops(n, path, francis), rel=CLOSE)
    assert counts["shared"] == pytest.approx(cuda_cost.eigvals_shared(n, path, francis), rel=CLOSE)
    barriers = counts["warp_barriers" if path == "warp" else "block_barriers"]
    assert barriers == pytest.approx(cuda_cost.eigvals_barriers(n, path, francis), rel=CLOSE)
    assert per_eigenvalue == pytest.approx(cuda_cost.FRANCIS_SWEEPS, rel=0.2)


def test_the_model_is_printed(capsys):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["kernels", "--cuda", "--model"])
    assert args.run(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(cuda_cost.BATCHES) * len(cuda_cost.GPUS) + 1
    assert "not a measurement" in lines[-1]
    for line in lines[1:-1]:
        milliseconds, loop = (float(cell) for cell in line.split()[-3:-1])
        assert milliseconds < loop
