"""Cases of overtone.linalg, and the check that decompositions share."""

from __future__ import annotations

import torch
from torch import Tensor

from overtone.benchmarks.harness.case import Function, Results
from overtone.benchmarks.harness.check import Check

MAX_RATIO = 10  # LAPACK's own test programs accept 20 to 50


def perturbed(solver: Function) -> Function:
    """`solver` of matrices that are off by E, ‖E‖_F = n ε ‖A‖_F: a tenth of the residual that LAPACK's ratios allow.

    In float64 plain PyTorch is the truth itself; how far this is from it shows what the problem makes of rounding.
    """

    def function(a: Tensor) -> Results:
        noise = torch.randn(a.shape, generator=torch.Generator().manual_seed(3), dtype=a.dtype)
        size = torch.linalg.matrix_norm(a.detach(), keepdim=True) * torch.finfo(a.dtype).eps
        return solver(a + size * noise.to(a.device))

    return function


def judge_ratios(residual: Tensor, loss: Tensor, n: int, dtype: torch.dtype) -> Check:
    """The worst matrix's relative residual and loss of orthogonality, in units of n ε."""
    unit = n * torch.finfo(dtype).eps
    error, tolerance = max(residual.max().item(), loss.max().item()), MAX_RATIO * unit
    passed = error <= tolerance and bool((residual.isfinite() & loss.isfinite()).all())
    message = f"ratios {residual.max().item() / unit:.2g}, {loss.max().item() / unit:.2g}; at most {MAX_RATIO} each"
    return Check(passed, error, tolerance, "" if passed else message)
