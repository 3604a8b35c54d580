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

from overtone.reference.enclosures import (
    EPS,
    TINY,
    Eigenvalues,
    Solver,
    enclosed_eigenvalues,
    frobenius,
    on_mean_zero,
    reference_solver,
    size_of_moduli,
)


class Verdict(IntEnum):
    """One case of `dominance`. The last three are undecided."""

    OTHER = 0  #: another eigenvalue of A dominates: no oversmoothing
    PERRON = 1  #: the Perron eigenvalue dominates: oversmoothing
    TIE = 2  #: both sides are equal: the winning λ^H is zero, or A's eigenvalue 1 is not simple
    CLOSE = 3  #: the two sides are closer than the error bound
    INVALID = 4  #: A is not row-stochastic (a row attends to nothing, say) or, if promised, not causal; or not finite


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


@torch.no_grad()
def dominance(attention: Tensor, weight: Tensor, *, is_causal: bool = False) -> Dominance:
    """Which (1 + λ^H λ^A) dominates, for every pair of attention [..., N, N] and weight [..., d, d].

    Leading dimensions broadcast. weight is H, or W_V W_proj = Hᵀ, which has the same eigenvalues. For one head take
    `head_weights`: H_h itself has d − k zero eigenvalues, and zero is a tie. With is_causal the eigenvalues of A are
    its diagonal. One token: Perron, by an infinite margin. Not differentiable.

    What is decided holds of every row-stochastic matrix within `deviation` of A, and every H that rounds to `weight`.
    """
    for name, matrix in (("attention", attention), ("weight", weight)):
        if matrix.dim() < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] == 0:
            raise ValueError(f"dominance: {name}: got shape {list(matrix.shape)}, wanted square matrices [..., n, n]")
    others = causal_eigenvalues(attention) if is_causal else other_eigenvalues(attention)
    result = eigenvalue_dominance(others, matrix_eigenvalues(weight), radius=ergodicity(attention))
    is_valid = attention_is_stochastic(attention, is_causal) & weight.isfinite().all(-1).all(-1)
    return invalidated(result, ~is_valid)


@torch.no_grad()
def eigenvalue_dominance(others: Eigenvalues, weight: Eigenvalues, radius: Tensor | float = 1.0) -> Dominance:
    """`dominance` from the eigenvalues of A but the Perron one, [..., N − 1], and those of H, [..., d].

    No modulus of the former is above `radius`: a bound that still holds where A is defective and errors are large.
    """
    a, h, h_error = others.values[..., None, :], weight.values[..., :, None], weight.error[..., :, None]
    radius = torch.as_tensor(radius, dtype=h_error.dtype, device=h_error.device)[..., None, None]
    a_error = torch.minimum(others.error[..., None, :], a.abs() + radius)  # [..., 1, N − 1]
    length = h.abs()

    perron, other = gain(h), gain(h * a)  # [..., d, 1], [..., d, N − 1]
    off = h_error * radius + gain_rounding(h, a.abs() + radius)
    low = torch.maximum(other - length * a_error, -length * radius) - off
    high = torch.minimum(other + length * a_error, length * radius) + off
    off = h_error + gain_rounding(h, 1)
    result = certified(
        _largest(perron - off) - _largest(high),
        _largest(perron + off) - _largest(low),
        _largest(perron) - _largest(other),
    )
    is_tie = (result.verdict == Verdict.CLOSE) & ((result.margin == 0) | _winner_is_tied(other, others, weight))
    return result._replace(verdict=result.verdict.masked_fill(is_tie, Verdict.TIE))


def certified(low: Tensor, high: Tensor, margin: Tensor) -> Dominance:
    """The verdict on a true margin between low and high, of which `margin` is an estimate. Not known is CLOSE."""
    margin = torch.minimum(torch.maximum(margin, low), high)
    rounding = 4 * EPS * (low.abs() + high.abs())
    error = torch.maximum(margin - low, high - margin) + rounding
    # One token: there is no other eigenvalue, and margins are infinite.
    error = torch.where(margin == math.inf, 0, error.nan_to_num(nan=math.inf, posinf=math.inf))
    verdict = torch.full_like(margin, Verdict.CLOSE, dtype=torch.int8)
    verdict = verdict.masked_fill(margin > error, Verdict.PERRON).masked_fill(margin < -error, Verdict.OTHER)
    return Dominance(verdict, margin, error)


def invalidated(result: Dominance, is_invalid: Tensor) -> Dominance:
    """Of invalid cases nothing is known."""
    values = (Verdict.INVALID, math.nan, math.inf)
    return Dominance(*(field.masked_fill(is_invalid, value) for field, value in zip(result, values, strict=True)))


def gain(z: Tensor) -> Tensor:
    """|1 + z| − 1 of complex128, right to 8ε|z|: small and huge z lose nothing, and 1 falls out of margins."""
    x, y = z.real, z.imag
    denominator = 1 + torch.hypot(1 + x, y)
    return x * ((2 + x) / denominator) + y * (y / denominator)


def gain_rounding(h: Tensor, reach: Tensor | float) -> Tensor:
    """A bound on that of gain(h z) and of sums of a few such numbers, |z| ≤ reach."""
    return 32 * EPS * h.abs() * reach + TINY


@torch.no_grad()
def matrix_eigenvalues(matrix: Tensor, solver: Solver = reference_solver) -> Eigenvalues:
    """The eigenvalues of all matrices that round to [..., n, n] in its dtype; computed in float64."""
    wide = matrix.to(torch.complex128 if matrix.is_complex() else torch.float64)
    return enclosed_eigenvalues(wide, _spread(matrix, half_ulp(matrix.dtype)), solver)


@torch.no_grad()
def other_eigenvalues(attention: Tensor, solver: Solver = reference_solver) -> Eigenvalues:
    """The eigenvalues but the Perron one of the row-stochastic matrices within `deviation` of [..., N, N].

    A 1 = 1: on vectors of mean zero, in an orthonormal basis, A has exactly the others.
    """
    n, wide = attention.shape[-1], attention.double()
    rounding = (n + 8) * EPS * frobenius(wide)
    return enclosed_eigenvalues(on_mean_zero(wide), _spread(attention, deviation(attention)) + rounding, solver)


def _spread(matrix: Tensor, relative: Tensor | float) -> Tensor:
    """‖E‖₂ if |e_ij| ≤ relative·|m_ij|, up to the underflow of M's dtype."""
    return relative * size_of_moduli(matrix) + matrix.shape[-1] * underflow(matrix.dtype)


def deviation(attention: Tensor) -> Tensor:
    """How far the entries of the matrices that a verdict speaks of may be off those given, [...], relatively.

    ε/2 for those that round to what was given, and more where the sums of rows are off by more, so that the matrix
    whose rows are divided by their sums is always among them. Infinite where sums say nothing.
    """
    n = attention.shape[-1]
    sizes = attention.abs().sum(-1, dtype=torch.float64)
    off = ((attention.sum(-1, dtype=torch.float64) - 1).abs() + n * EPS / 2 * sizes).amax(-1)
    return torch.where(off < 1, off / (1 - off) * (1 + 4 * EPS), math.inf).clamp(min=half_ulp(attention.dtype))


def half_ulp(dtype: torch.dtype) -> float:
    """How far a number may be off the one it rounds to, relatively."""
    return torch.finfo(dtype).eps / 2 * (1 + 4 * EPS)


def underflow(dtype: torch.dtype) -> float:
    """How far an entry may be off by underflow: of bfloat16 and wider types that may be flushed to zero."""
    info = torch.finfo(dtype)
    return info.tiny * (info.eps if dtype == torch.float16 else 1)


def ergodicity(attention: Tensor) -> Tensor:
    """Dobrushin's coefficient ½ max_ik Σ_j |a_ij − a_kj|: no eigenvalue but the Perron one is larger in modulus.

    Of all matrices within `deviation`.
    """
    rows, n = attention.double(), attention.shape[-1]
    distance = torch.cdist(rows, rows, p=1).amax((-2, -1)) / 2 * (1 + (n + 4) * EPS)
    size = rows.abs().sum(-1).amax(-1) * (1 + n * EPS)
    return distance + deviation(attention) * size + n * underflow(attention.dtype)


def head_weights(w_v: Tensor, w_proj: Tensor, num_heads: int) -> Tensor:
    """W_proj,h W_V,h for every head, [..., H, k, k]: its eigenvalues are the non-zero ones of W_V,h W_proj,h.

    w_v is [..., d, H·k] and w_proj [..., H·k, d], as they multiply tokens: X W_V W_proj (nn.Linear stores transposes).
    """
    width = w_v.shape[-1] // num_heads
    return w_proj.unflatten(-2, (num_heads, width)) @ w_v.mT.unflatten(-2, (num_heads, width)).mT


def causal_eigenvalues(attention: Tensor) -> Eigenvalues:
    """The diagonal but its first entry, which is the Perron eigenvalue."""
    values = attention.double().diagonal(dim1=-2, dim2=-1)[..., 1:]
    error = values.abs() * deviation(attention)[..., None] * (1 + EPS) + underflow(attention.dtype)
    return Eigenvalues(values.to(torch.complex128), error)


def attention_is_stochastic(attention: Tensor, is_causal: bool = False) -> Tensor:
    """Whether every row sums to one, up to far more than rounding and far less than a row without keys.

    With is_causal, whether nothing stands above the diagonal either.
    """
    tolerance = math.sqrt(torch.finfo(attention.dtype).eps)
    is_stochastic = ((attention.sum(-1, dtype=torch.float64) - 1).abs() < tolerance).all(-1)
    return is_stochastic & (attention.triu(1) == 0).all(-1).all(-1) if is_causal else is_stochastic


# An eigenvalue whose error is larger than this is not known well enough to be called zero or one.
_SHARP = 1e-2


def _largest(pairs: Tensor) -> Tensor:
    return pairs.amax((-2, -1)) if pairs.shape[-1] else pairs.new_full(pairs.shape[:-2], -math.inf)


def _winner_is_tied(other: Tensor, attention: Eigenvalues, weight: Eigenvalues) -> Tensor:
    """Whether the winning λ^H is zero, or the winning λ^A is a second eigenvalue 1, within their errors."""
    if other.shape[-1] == 0:
        return other.new_zeros(other.shape[:-2], dtype=torch.bool)
    winner = other.flatten(-2).argmax(-1)[..., None]  # index of (j, i)
    zero = weight.values.abs() <= weight.error.clamp(max=_SHARP)  # [..., d]
    one = (attention.values - 1).abs() <= attention.error.clamp(max=_SHARP)  # [..., N]
    tied = zero[..., :, None] | one[..., None, :]
    return tied.expand_as(other).flatten(-2).gather(-1, winner)[..., 0]
