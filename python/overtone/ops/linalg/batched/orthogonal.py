"""A = QR with diag(R) > 0 of tall or square matrices, by shifted CholeskyQR."""

from __future__ import annotations

import torch
from torch import Tensor

# A pass takes R from the Cholesky factor of AᵀA, which squares the condition number κ; rounding makes it indefinite
# where κ² reaches 1/ε. A shift of the size of that rounding, s, keeps it definite and brings κ down by about √s.
# Two passes without a shift finish: the first from κ < 1/√ε to rounding · κ², the second to rounding.
# float32: the first pass is in float64, where no κ that float32 can express is too much. float64: κ = 10¹³ takes two
# passes with a shift.
_PASSES = {torch.float32: ("wide", "plain", "plain"), torch.float64: ("shifted", "shifted", "plain", "plain")}


def orthogonalize(a: Tensor) -> tuple[Tensor, Tensor]:
    """Q [..., m, n] and R [..., n, n] of a [..., m, n], m ≥ n, with independent columns; not finite gives nan."""
    scale = _column_scale(a)  # Q does not depend on it, and κ may be due to it alone
    q = a * scale[..., None, :]
    r = torch.diag_embed(1 / scale)
    for kind in _PASSES[a.dtype]:
        factor = _factor(q, kind)
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


def _factor(q: Tensor, kind: str) -> Tensor:
    """The upper triangular factor of one pass, in q's dtype."""
    wide = q.double() if kind == "wide" else q
    gram = wide.mT @ wide
    if kind != "plain":
        gram = gram + torch.diag_embed(_shift(gram, q.shape[-2])[..., None].expand(gram.shape[:-1]))
    return torch.linalg.cholesky_ex(gram, upper=True).L.to(q.dtype)


def _shift(gram: Tensor, rows: int) -> Tensor:
    """[...]: more than rounding took from the eigenvalues of the Gram matrix and will take from its factor."""
    if gram.shape[-1] == 0:
        return gram.sum((-2, -1))
    size = gram.abs().sum(-1).amax(-1)  # at least the largest eigenvalue
    return 2 * (rows + gram.shape[-1]) * torch.finfo(gram.dtype).eps * size
