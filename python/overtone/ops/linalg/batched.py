"""Ops made of torch's batched matrix products, Cholesky and triangular solves, for CUDA tensors.

torch.linalg's QR, eigh and inverse loop over the matrices of a batch on GPUs, and wait for each; these products take
the whole batch at once, and the host never waits for the device: no branch depends on a number. The same code runs on
CPU tensors, where the tests prove it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

from overtone._precision import autocast_disabled, full_float32


def in_full_precision(function: Callable) -> Callable:
    """`function`, whose last argument is a tensor, with float32 products in float32, inside autocast too."""

    @wraps(function)
    def call(*args):
        with autocast_disabled(args[-1]), full_float32():
            return function(*args)

    return call


# CholeskyQR: a pass takes R from the Cholesky factor of AᵀA, which squares the condition number κ; rounding makes it
# indefinite where κ² reaches 1/ε. A shift of the size of that rounding, s, keeps it definite and brings κ down by about
# √s, a factor of 100 and more in float32 and of 10⁶ in float64: two passes with a shift take the largest κ that the
# dtype can express to one that is harmless. Two without finish: the first from there to rounding · κ², the second to
# rounding. All in the matrices' own dtype: consumer GPUs multiply float64 at 1/64 of float32's rate.
_SHIFTED_PASSES, _PLAIN_PASSES = 2, 2


@in_full_precision
def orthonormal(a: Tensor) -> tuple[Tensor, Tensor]:
    """Q [..., m, n] and R [..., n, n] of a [..., m, n], m ≥ n, with independent columns; not finite gives nan."""
    scale = _column_scale(a)  # Q does not depend on it, and κ may be due to it alone
    q = a * scale[..., None, :]
    r = torch.diag_embed(1 / scale)
    for number in range(_SHIFTED_PASSES + _PLAIN_PASSES):
        gram = q.mT @ q
        if number < _SHIFTED_PASSES:
            gram = gram + torch.diag_embed(_shift(gram, q.shape[-2])[..., None].expand(gram.shape[:-1]))
        factor = torch.linalg.cholesky_ex(gram, upper=True).L
        q = torch.linalg.solve_triangular(factor, q, upper=True, left=False)
        r = factor @ r
    return q, r.triu()


def _column_scale(a: Tensor) -> Tensor:
    """[..., n]: powers of two that take the largest element of every column to about one."""
    largest = a.abs().amax(-2) if a.shape[-2] else a.sum(-2)
    _, exponent = torch.frexp(torch.where(largest > 0, largest, 1))
    # 2^-e may be infinite where e is not.
    limit = 126 if a.dtype == torch.float32 else 1022
    return torch.ldexp(torch.ones_like(largest), (-exponent).clamp(-limit, limit))


def _shift(gram: Tensor, rows: int) -> Tensor:
    """[...]: more than rounding took from the eigenvalues of the Gram matrix and will take from its factor."""
    if gram.shape[-1] == 0:
        return gram.sum((-2, -1))
    size = gram.abs().sum(-1).amax(-1)  # at least the largest eigenvalue
    return 2 * (rows + gram.shape[-1]) * torch.finfo(gram.dtype).eps * size


@in_full_precision
def qr_backward(grad_Q: Tensor | None, grad_R: Tensor | None, Q: Tensor, R: Tensor) -> Tensor:
    """(∂Q + Q copyltu(R ∂Rᵀ − ∂Qᵀ Q)) R⁻ᵀ; zero for matrices that have no decomposition."""
    solved = R.isfinite().all(-1).all(-1)[..., None, None]
    identity = torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
    Q, R = Q.where(solved, 0), R.where(solved, identity)
    inner = torch.zeros_like(R)
    if grad_R is not None:
        inner = inner + R @ grad_R.where(solved, 0).mT
    if grad_Q is not None:
        grad_Q = grad_Q.where(solved, 0)
        inner = inner - grad_Q.mT @ Q
    mirrored = inner.tril() + inner.tril(-1).mT
    grad = Q @ mirrored if grad_Q is None else grad_Q + Q @ mirrored
    return torch.linalg.solve_triangular(R.mT, grad, upper=False, left=False).contiguous()


@in_full_precision
def inverse_ex(A: Tensor) -> tuple[Tensor, Tensor]:
    """A⁻¹ = R⁻¹ Qᵀ, and an info per matrix: 1 where it is singular or not finite, and its inverse nan."""
    q, r = orthonormal(A)
    inverse = torch.linalg.solve_triangular(r, q.mT, upper=True)
    failed = ~inverse.isfinite().all(-1).all(-1)
    return inverse.masked_fill(failed[..., None, None], math.nan).contiguous(), failed.to(torch.int32)


@in_full_precision
def eigh_backward(
    grad_values: Tensor | None, grad_vectors: Tensor | None, values: Tensor, vectors: Tensor, info: Tensor
) -> tuple[Tensor, Tensor]:
    """V (diag(∂λ) + K) Vᵀ, and per matrix a pair of eigenvalues for which K is not determined, or (−1, −1)."""
    n = values.shape[-1]
    solved = info == 0
    values, vectors = values.where(solved[..., None], 0), vectors.where(solved[..., None, None], 0)
    grad_values = torch.zeros_like(values) if grad_values is None else grad_values.where(solved[..., None], 0)
    pair = info.new_full((*info.shape, 2), -1)
    inner = torch.diag_embed(grad_values)
    if grad_vectors is not None and n > 0:
        m = vectors.mT @ grad_vectors.where(solved[..., None, None], 0)
        same = _same_eigenspace(values)
        gaps = values[..., None, :] - values[..., :, None]
        apart = (m - m.mT) / 2 / gaps.masked_fill(same, 1)
        factor, undetermined = _in_eigenspaces(grad_values, m, same)
        off_diagonal = ~torch.eye(n, dtype=torch.bool, device=m.device)
        inner = inner + torch.where(same, factor[..., None] * (m + m.mT) / 2 * off_diagonal, apart)
        pair = _first_pair(undetermined)
    return (vectors @ inner @ vectors.mT).contiguous(), pair


def _same_eigenspace(values: Tensor) -> Tensor:
    """[..., n, n]: whether two eigenvalues, ascending, are connected by steps of the size of rounding."""
    n = values.shape[-1]
    gap = 2 * math.sqrt(n) * torch.finfo(values.dtype).eps * torch.maximum(values[..., 0].abs(), values[..., -1].abs())
    begins = values.diff(dim=-1, prepend=values[..., :1]) > gap[..., None]
    space = begins.int().cumsum(-1)
    return space[..., :, None] == space[..., None, :]


def _in_eigenspaces(grad_values: Tensor, m: Tensor, same: Tensor) -> tuple[Tensor, Tensor]:
    """The factor c [..., n] of every member's eigenspace, and the pairs [..., n, n], i > j, that have none."""
    n = m.shape[-1]
    rounding = 4 * n * torch.finfo(m.dtype).eps
    negligible = rounding * m.abs().amax((-2, -1))[..., None]  # [..., 1]
    lower = same & torch.ones(n, n, dtype=torch.bool, device=m.device).tril(-1)
    depends_on_basis = lower & ~((m - m.mT).abs() <= negligible[..., None])
    sizes = m.abs().where(lower, 0)
    largest = _largest(sizes.amax(-1), same)
    own = m.diagonal(dim1=-2, dim2=-1)
    squares, products = _total(own * own, same), _total(grad_values * own, same)
    largest_grad = _largest(grad_values.abs(), same)
    has_factor = squares > negligible * negligible
    factor = torch.where(has_factor, products / squares.where(has_factor, 1), 0)
    misses = (grad_values - factor * own).abs() > rounding * largest_grad + factor.abs() * negligible
    fits = (largest_grad == 0) | (has_factor & (_total(misses.to(m.dtype), same) == 0))
    needed = largest > negligible
    without = lower & (needed & ~fits)[..., None] & (sizes >= largest[..., None])
    return torch.where(needed & (largest_grad > 0), factor, 0), depends_on_basis | without


def _total(x: Tensor, same: Tensor) -> Tensor:
    return (same.to(x.dtype) @ x[..., None])[..., 0]


def _largest(x: Tensor, same: Tensor) -> Tensor:
    return torch.where(same, x[..., None, :], 0).amax(-1)


def _first_pair(pairs: Tensor) -> Tensor:
    """[..., 2] int32: j < i of the first pair (i, j), or (−1, −1)."""
    n = pairs.shape[-1]
    place = pairs.flatten(-2).int().argmax(-1)
    pair = torch.stack((place % n, place // n), -1)
    return torch.where(pairs.flatten(-2).any(-1)[..., None], pair, -1).int()
