"""Which eigenvalue dominates (MATH §5): with A and H repeated over depth, X is a sum of (1 + λ^H λ^A)^L terms.

If the largest modulus belongs to A's Perron eigenvalue, 1, whose eigenvector is constant over tokens, tokens become
equal: oversmoothing. If it belongs to another eigenvalue of A they do not. Where the two sides are closer than the
error of the eigenvalues the answer is "undecided", with the reason.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from overtone.reference.linalg import eig_ex, inverse


class Verdict(IntEnum):
    """One case of `dominance`. The last three are undecided."""

    OTHER = 0  #: another eigenvalue of A dominates: no oversmoothing
    PERRON = 1  #: the Perron eigenvalue dominates: oversmoothing
    TIE = 2  #: both sides are equal: the winning λ^H is zero, or A's eigenvalue 1 is not simple
    CLOSE = 3  #: the two sides are closer than the error bound
    INVALID = 4  #: A is not row-stochastic (a row attends to nothing, say), or A or H is not finite


class Dominance(NamedTuple):
    """The verdicts of `dominance`, one per case; every field is [...]."""

    verdict: Tensor  #: int8, a Verdict
    margin: Tensor  #: max_j |1 + λ_j^H| − max_{j, i ≠ Perron} |1 + λ_j^H λ_i^A|: positive for PERRON
    error: Tensor  #: how far the margin may be off

    @property
    def perron(self) -> Tensor:
        return self.verdict == Verdict.PERRON

    @property
    def other(self) -> Tensor:
        return self.verdict == Verdict.OTHER

    @property
    def undecided(self) -> Tensor:
        return self.verdict > Verdict.PERRON

    def counts(self) -> dict[str, int]:
        """How many cases have which verdict, by name."""
        return {verdict.name.lower(): int((self.verdict == verdict).sum()) for verdict in Verdict}


class Eigenvalues(NamedTuple):
    """Complex eigenvalues [..., n], and a bound on the error of each."""

    values: Tensor
    error: Tensor


@torch.no_grad()
def dominance(attention: Tensor, weight: Tensor, *, is_causal: bool = False) -> Dominance:
    """Which (1 + λ^H λ^A) dominates, for every pair of attention [..., N, N] and weight [..., d, d].

    Leading dimensions broadcast. weight is H, or W_V W_proj = Hᵀ, which has the same eigenvalues. For one head take
    `head_weights`: H_h itself has d − k zero eigenvalues, and zero is a tie. With is_causal the eigenvalues of A are
    its diagonal. One token: Perron, by an infinite margin. Not differentiable.
    """
    for name, matrix in (("attention", attention), ("weight", weight)):
        if matrix.dim() < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] == 0:
            raise ValueError(f"dominance: {name}: got shape {list(matrix.shape)}, wanted square matrices [..., n, n]")
    spectrum = causal_eigenvalues(attention) if is_causal else matrix_eigenvalues(attention)
    result = eigenvalue_dominance(spectrum, matrix_eigenvalues(weight), radius=ergodicity(attention))
    return result._replace(verdict=result.verdict.masked_fill(~attention_is_stochastic(attention), Verdict.INVALID))


@torch.no_grad()
def eigenvalue_dominance(attention: Eigenvalues, weight: Eigenvalues, radius: Tensor | float = 1.0) -> Dominance:
    """`dominance` from the eigenvalues of A [..., N] and of H [..., d].

    Every eigenvalue of A but the Perron one has a modulus of at most `radius`: a bound that still holds where A is
    defective and its eigenvalues' own error bounds say nothing.
    """
    a, a_error = attention.values[..., None, :], attention.error[..., None, :]  # [..., 1, N]
    h, h_error = weight.values[..., :, None], weight.error[..., :, None]  # [..., d, 1]
    radius = torch.as_tensor(radius, dtype=a_error.dtype, device=a_error.device)[..., None, None]
    is_perron = torch.nn.functional.one_hot((a - 1).abs().argmin(-1), a.shape[-1]).bool()  # [..., 1, N]

    perron = (1 + h).abs()  # [..., d, 1]: A's Perron eigenvalue is 1 exactly
    perron_bounds = perron - h_error, perron + h_error
    other = (1 + h * a).abs().masked_fill(is_perron, -math.inf)  # [..., d, N]
    other_bounds = (
        torch.maximum(other - h.abs() * a_error, 1 - h.abs() * radius) - h_error * radius,
        torch.minimum(other + h.abs() * a_error, 1 + h.abs() * radius) + h_error * radius,
    )
    perron_low, perron_high = (_largest(bound) for bound in perron_bounds)
    other_low, other_high = (_largest(bound.masked_fill(is_perron, -math.inf)) for bound in other_bounds)

    margin = _largest(perron) - _largest(other)
    error = torch.maximum(margin - (perron_low - other_high), perron_high - other_low - margin)
    is_tie = (margin == 0) | _winner_is_tied(other, attention, weight)
    verdict = torch.full_like(margin, Verdict.CLOSE, dtype=torch.int8)
    verdict = verdict.masked_fill(is_tie, Verdict.TIE)
    verdict = verdict.masked_fill(perron_low > other_high, Verdict.PERRON)
    verdict = verdict.masked_fill(other_low > perron_high, Verdict.OTHER)
    verdict = verdict.masked_fill(margin.isnan(), Verdict.INVALID)
    return Dominance(verdict, margin, error.masked_fill(margin.isinf(), 0))


@torch.no_grad()
def matrix_eigenvalues(matrix: Tensor) -> Eigenvalues:
    """The eigenvalues of [..., n, n], computed in float64, with a first-order bound on their error.

    The bound is the eigenvalue's condition number, ‖left eigenvector‖·‖right eigenvector‖ where their product is one,
    times how far the matrix is off: the rounding of its entries to their dtype, and the solver's backward error.
    """
    values, vectors, _ = eig_ex(matrix.to(torch.complex128 if matrix.is_complex() else torch.float64))
    condition = torch.linalg.vector_norm(vectors, dim=-2) * torch.linalg.vector_norm(inverse(vectors), dim=-1)
    condition = bounded_condition(condition.nan_to_num(math.inf, posinf=math.inf))
    rounding = torch.finfo(matrix.dtype).eps + matrix.shape[-1] * torch.finfo(torch.float64).eps
    size = torch.linalg.matrix_norm(matrix.to(vectors.dtype))
    return Eigenvalues(values, condition * rounding * size[..., None])


def ergodicity(attention: Tensor) -> Tensor:
    """Dobrushin's coefficient ½ max_ik Σ_j |a_ij − a_kj|: no eigenvalue but the Perron one is larger in modulus."""
    rows = attention.double()
    return torch.cdist(rows, rows, p=1).amax((-2, -1)) / 2 + torch.finfo(attention.dtype).eps


def head_weights(w_v: Tensor, w_proj: Tensor, num_heads: int) -> Tensor:
    """W_proj,h W_V,h for every head, [..., H, k, k]: its eigenvalues are the non-zero ones of W_V,h W_proj,h.

    w_v is [..., d, H·k] and w_proj [..., H·k, d], as they multiply tokens: X W_V W_proj (nn.Linear stores transposes).
    """
    width = w_v.shape[-1] // num_heads
    return w_proj.unflatten(-2, (num_heads, width)) @ w_v.mT.unflatten(-2, (num_heads, width)).mT


def causal_eigenvalues(attention: Tensor) -> Eigenvalues:
    """The diagonal, which is exact up to the rounding of its entries."""
    values = attention.double().diagonal(dim1=-2, dim2=-1)
    return Eigenvalues(values.to(torch.complex128), values.abs() * torch.finfo(attention.dtype).eps)


def attention_is_stochastic(attention: Tensor) -> Tensor:
    """Whether every row sums to one, up to far more than rounding and far less than a row without keys."""
    tolerance = math.sqrt(torch.finfo(attention.dtype).eps)
    return ((attention.sum(-1, dtype=torch.float64) - 1).abs() < tolerance).all(-1)


def bounded_condition(condition: Tensor) -> Tensor:
    """Condition numbers without inf and nan, which would give nan when they are multiplied by zero."""
    return condition.nan_to_num(nan=_USELESS).clamp(max=_USELESS)


# A condition number that says nothing.
_USELESS = 1e100

# An eigenvalue whose error is larger than this is not known well enough to be called zero or one.
_SHARP = 1e-2


def _largest(pairs: Tensor) -> Tensor:
    return pairs.amax((-2, -1))


def _winner_is_tied(other: Tensor, attention: Eigenvalues, weight: Eigenvalues) -> Tensor:
    """Whether the winning λ^H is zero, or the winning λ^A is a second eigenvalue 1, within their errors."""
    winner = other.flatten(-2).argmax(-1)[..., None]  # index of (j, i)
    zero = weight.values.abs() <= weight.error.clamp(max=_SHARP)  # [..., d]
    one = (attention.values - 1).abs() <= attention.error.clamp(max=_SHARP)  # [..., N]
    tied = zero[..., :, None] | one[..., None, :]
    return tied.expand_as(other).flatten(-2).gather(-1, winner)[..., 0]
