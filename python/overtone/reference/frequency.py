"""LFC, HFC, their norms, and the filter family (MATH: LFC[X] = ΠX, HFC[X] = (I − Π)X, F(X; a, b) = a⊙LFC + b⊙HFC).

With a mask the mean is over valid tokens, and masked tokens are zero in every result: padding may hold anything, NaN
included, and gets no gradient. Statistics are float32 for float32 and narrower tokens, float64 for float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overtone.types import FrequencyNorms


def widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def zero_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x.masked_fill(~mask[..., None], 0)


def _mean(x: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """The mean over (valid, and if causal: previous and present) tokens, at every token."""
    valid = torch.ones_like(x[..., :1]) if mask is None else mask[..., None].to(x.dtype).expand_as(x[..., :1])
    if is_causal:
        return x.cumsum(-2) / valid.cumsum(-2).clamp(min=1)
    return x.sum(-2, keepdim=True) / valid.sum(-2, keepdim=True).clamp(min=1)


def _first_token(x: Tensor, mask: Tensor | None) -> Tensor:
    """The first valid token, [..., 1, C]."""
    if mask is None or x.shape[-2] == 0:
        return x[..., :1, :]
    index = mask.int().argmax(-1, keepdim=True)[..., None].expand(*x.shape[:-2], 1, 1)
    return x.take_along_dim(index, -2)


def frequency_components(x: Tensor, *, mask: Tensor | None = None, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """LFC[x] and HFC[x], [..., N, C] each.

    HFC is taken of the tokens' differences from the first one, which are exact where tokens are almost equal, so it
    keeps its digits far from zero; subtracting the rounded mean of the tokens themselves would lose them.
    """
    wide = zero_masked(widen(x), mask)
    anchor = _first_token(wide, mask).detach()  # HFC does not depend on it, so neither does the gradient
    difference = zero_masked(wide - anchor, mask)
    low = zero_masked(_mean(wide, mask, is_causal).expand_as(wide), mask)
    high = zero_masked(difference - _mean(difference, mask, is_causal), mask)
    return low, high


def rounding_share(dtype: torch.dtype) -> float:
    """The share of ‖LFC‖ up to which ‖HFC‖ of statistics in this dtype is rounding (MATH §1): 2.5 ε, five roundings.

    Tokens that are equal but for the rounding of what made them reach 2.4 ε (the rows of attention). Of float32
    tokens it leaves HFC/LFC = 1e-6 alone.
    """
    return 2.5 * torch.finfo(dtype).eps


def power_near_largest(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """A power of two near the largest element over dims (kept), to divide by before squares are taken; no gradient.

    Dividing by it is exact, so it changes no bit of a norm whose squares neither overflow nor vanish. Three quarters of
    the exponents are enough for that, and keep products of the power with a gradient away from the ends of the range.
    """
    x = x.detach()
    if 0 in (x.shape[dim] for dim in dims):
        return x.new_ones([1 if dim - x.dim() in dims else size for dim, size in enumerate(x.shape)])
    _, exponent = x.abs().amax(dims, keepdim=True).nan_to_num(1.0, 1.0).frexp()
    most = 96 if x.dtype == torch.float32 else 768
    return torch.ldexp(x.new_ones(exponent.shape), exponent.clamp(-most, most))


def _frobenius(x: Tensor) -> Tensor:
    """Frobenius norm over tokens and channels, its gradient at zero zero; two short sums round less than a long one."""
    return torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=-1), dim=-1)


def frequency_norms(x: Tensor, *, mask: Tensor | None = None) -> FrequencyNorms:
    """‖LFC[x]‖ and ‖HFC[x]‖ of every sample: [..., N, C] -> two of [...].

    Where ‖HFC‖ is no more than rounding, it is zero and sends no gradient back: that would be a unit vector of noise.
    """
    x = zero_masked(widen(x), mask)
    unit = power_near_largest(x, (-2, -1))
    low, high = (_frobenius(component) for component in frequency_components(x / unit, mask=mask))
    high = torch.where(high <= rounding_share(high.dtype) * low, 0, high)
    unit = unit[..., 0, 0]
    return FrequencyNorms(low * unit, high * unit)


def frequency_filter(
    x: Tensor, low: Tensor | float, high: Tensor | float, *, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """low ⊙ LFC[x] + high ⊙ HFC[x]; low and high are numbers or vectors over channels."""
    low_part, high_part = frequency_components(x, mask=mask, is_causal=is_causal)
    return (low * low_part + high * high_part).to(x.dtype)


def de_escalate(x: Tensor, tau: Tensor | float = 1.0, *, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """(I − τΠ)x, the filter with gains 1 − τ and 1."""
    return frequency_filter(x, 1 - tau, 1.0, mask=mask, is_causal=is_causal)
