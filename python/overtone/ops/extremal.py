"""The extremal eigenvalues of row-stochastic matrices by Arnoldi's method, for analysis: no gradient.

On the space of vectors modulo constants, A has all its eigenvalues but the Perron one: x ↦ A x − mean(A x) is that map
on vectors of mean zero. Arnoldi's Ritz pairs have a residual that costs nothing, |h_{m+1,m}|·|last component|. A matrix
whose two extremal pairs have not converged after MOST_STEPS steps is solved whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overtone import _transforms as transforms
from overtone.ops import checks
from overtone.ops.eig import eig_ex, eigvals_ex
from overtone.reference.linalg import NOT_STOCHASTIC, raise_unsolved, rows_sum_to_one

__all__ = ["ExtremalResult", "extremal_eigvals"]

STEPS_BETWEEN_CHECKS = 16
MOST_STEPS = 64


class ExtremalResult(NamedTuple):
    """Each is [...], of the eigenvalues other than the Perron one."""

    smallest: Tensor  #: the eigenvalue with the smallest real part
    second: Tensor  #: the eigenvalue with the largest modulus
    residual: Tensor  #: the larger of the two residuals ‖A v − λ v‖, ‖v‖ = 1; zero where A was solved whole


@torch.no_grad()
def extremal_eigvals(A: Tensor, *, tolerance: float | None = None) -> ExtremalResult:
    """λ with the smallest real part and λ₂, the largest in modulus but for the Perron one, of attention [..., n, n].

    Args:
        A: float32 or float64, n ≥ 2, every row summing to one.
        tolerance: of the residuals; None is 100 √n ε. One Arnoldi step costs a product with A, so matrices whose
            extremal eigenvalues stand apart, such as trained attention, take a small part of the time of eigvals.
    """
    A = checks.matrices("extremal_eigvals", "A", A, square=True)
    if not transforms.is_plain(A):
        raise NotImplementedError(
            "extremal_eigvals: A: got a tensor of a torch.func transform or of forward-mode AD, wanted a plain one"
            " [..., n, n]: it has no derivative and no torch.vmap; eigvals has both"
        )
    n, batch = A.shape[-1], A.shape[:-2]
    if A.dtype not in (torch.float32, torch.float64) or n < 2:
        wanted = "float32 or float64 of shape [..., n, n] with n ≥ 2"
        raise ValueError(f"extremal_eigvals: A: got {checks.describe(A)}, wanted {wanted}")
    tolerance = checks.optional_number("extremal_eigvals", "tolerance", tolerance)
    tolerance = 100 * n**0.5 * torch.finfo(A.dtype).eps if tolerance is None else tolerance
    A = A.reshape(-1, n, n)
    info = (
        torch.where(rows_sum_to_one(A), 0, NOT_STOCHASTIC).to(torch.int32).masked_fill(~A.isfinite().all(-1).all(-1), 1)
    )
    raise_unsolved("extremal_eigvals", info.reshape(batch))

    found = A.new_zeros(2, A.shape[0], dtype=torch.promote_types(A.dtype, torch.complex64))
    residual = A.new_full((A.shape[0],), torch.inf)
    if n > 2 * MOST_STEPS:
        # Eigenvalues of causal attention are its diagonal, but so ill-conditioned that a small residual means nothing.
        is_causal = (A.triu(1) == 0).all(-1).all(-1)
        _arnoldi(A, (~is_causal).nonzero().flatten(), tolerance, found, residual)
    left = (residual > tolerance).nonzero().flatten()
    if left.numel():
        values, info = eigvals_ex(A[left], row_stochastic=True)
        raise_unsolved(
            "extremal_eigvals", torch.zeros_like(residual).index_put((left,), info.to(A.dtype)).reshape(batch)
        )
        found[:, left] = torch.stack(_extremes(values[:, 1:])[0])
        residual[left] = 0
    smallest, second = found.reshape(2, *batch)
    return ExtremalResult(smallest, second, residual.reshape(batch))


def _extremes(values: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The extremal values [B], and their indices."""
    indices = [values.real.argmin(-1, keepdim=True), values.abs().argmax(-1, keepdim=True)]
    return [values.gather(-1, index)[:, 0] for index in indices], indices


def _arnoldi(A: Tensor, active: Tensor, tolerance: float, found: Tensor, residual: Tensor) -> None:
    """Fills `found` and `residual` for those of the matrices `active` that converge."""
    A = A[active] if len(active) < len(A) else A
    count, n, _ = A.shape
    start = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(A)
    start = start - start.mean()
    basis = A.new_zeros(count, MOST_STEPS + 1, n)  # rows are the Arnoldi vectors
    basis[:, 0] = start / start.norm()
    h = A.new_zeros(count, MOST_STEPS + 1, MOST_STEPS)
    for step in range(MOST_STEPS):
        _expand(A, basis, h, step)
        m = step + 1
        if m % STEPS_BETWEEN_CHECKS:
            continue
        values, vectors, _ = eig_ex(h[:, :m, :m])
        ritz, indices = _extremes(values)
        last = torch.cat([vectors[:, -1].gather(-1, index) for index in indices], -1).abs().amax(-1)
        size = h[:, m, step] * last
        done = size <= tolerance
        if done.any():
            found[:, active[done]] = torch.stack(ritz)[:, done]
            residual[active[done]] = size[done]
            active, A, basis, h = active[~done], A[~done], basis[~done], h[~done]
        if not active.numel():
            return


def _expand(A: Tensor, basis: Tensor, h: Tensor, step: int) -> None:
    """One more Arnoldi vector, orthogonalised twice."""
    new = torch.bmm(A, basis[:, step, :, None])
    new = new - new.mean(-2, keepdim=True)
    known = basis[:, : step + 1]
    for _ in range(2):
        part = torch.bmm(known, new)
        h[:, : step + 1, step] += part[..., 0]
        new = new - torch.bmm(known.mT, part)
    length = torch.linalg.vector_norm(new[..., 0], dim=-1)
    h[:, step + 1, step] = length
    # An invariant subspace: what follows is rounding. It has all eigenvalues, but zeros of ours would be added to them.
    basis[:, step + 1] = torch.where(length > torch.finfo(A.dtype).eps, 1 / length, torch.nan)[:, None] * new[..., 0]
