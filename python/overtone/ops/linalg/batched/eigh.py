"""The gradient of symmetric eigenproblems, as in csrc/cpu/linalg/eigh/backward.h; eigh.h there says what it is.

Eigenspaces, members whose neighbouring eigenvalues are equal to rounding, are squares of a mask [..., n, n]: sums and
maxima over one are products with it, so that no number of them is ever asked for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from overtone.ops.linalg.batched.precision import in_full_precision


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
