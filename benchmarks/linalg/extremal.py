"""The price of extremal_eigvals: λ_min and |λ₂| of softmax attention, where whole spectra are not needed.

Baselines take them out of all eigenvalues: torch.linalg, the same split over threads, and our own eigvals.
"""

from __future__ import annotations

import torch
from torch import Tensor

import overtone as ot
from overtone.benchmarks.harness.baselines import SplitOverThreads
from overtone.benchmarks.harness.case import Case, Function, Results, Workload
from overtone.benchmarks.harness.check import ERROR_FACTOR, Check, Expected

# (batch, n, sharpness of the logits): trained attention is sharper than random, its extremal eigenvalues stand apart.
SHAPES = ((64, 65, 2.0), (32, 197, 2.0), (32, 197, 4.0), (4, 384, 2.0))


def _attention(batch: int, n: int, sharpness: float) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = sharpness * torch.randn(batch, n, n, generator=generator, dtype=torch.float64)
    return (logits.softmax(-1).float(),)


def _ours(a: Tensor) -> Results:
    found = ot.linalg.extremal_eigvals(a)
    return found.smallest.real, found.second.abs()


def _of_all(solver: Function) -> Function:
    """The least real part and the largest modulus of all eigenvalues but the Perron one."""

    def extremes(a: Tensor) -> Results:
        values = solver(a)
        perron = (values - 1).abs().argmin(-1, keepdim=True)
        others = values.scatter(-1, perron, 0)
        return others.real.amin(-1), others.abs().amax(-1)

    return extremes


def _check(results: Results, expected: Expected) -> Check:
    """What the op promises, a residual of 100 √n ε; and plain PyTorch's own error, which shows the conditioning."""
    n, eps = expected.inputs[0].shape[-1], torch.finfo(results[0].dtype).eps
    judged = []
    for found, plain, true in zip(results, expected.plain, expected.truth, strict=True):
        allowed = ERROR_FACTOR * float((plain - true).abs().max()) + 100 * n**0.5 * eps
        judged.append((float((found - true).abs().max()), allowed))
    error, tolerance = max(judged, key=lambda pair: pair[0] / pair[1])
    passed = error <= tolerance
    return Check(passed, error, tolerance, "" if passed else f"error {error:.2g}, tolerance {tolerance:.2g}")


def _case(batch: int, n: int, sharpness: float) -> Case:
    by_torch = _of_all(torch.linalg.eigvals)
    return Case(
        op="extremal_eigvals",
        variant="" if sharpness == 2 else "sharp",
        shape=f"{batch}x{n} softmax",
        dtype=torch.float32,
        mode="forward",
        check=_check,
        workload=Workload(
            setup=lambda: _attention(batch, n, sharpness),
            ours=_ours,
            baselines={
                "torch": by_torch,
                "torch split": SplitOverThreads(by_torch),
                "our eigvals": _of_all(ot.linalg.eigvals),
            },
            flops=batch * 2 * 32 * n**2,  # 32 steps of Arnoldi
            bytes=batch * n**2 * 4,
            bound_by="matmul",
        ),
    )


def cases() -> list[Case]:
    return [_case(*shape) for shape in SHAPES]
