"""LFC, HFC, their norms, and the filter family (MATH: LFC[X] = ΠX, HFC[X] = (I − Π)X, F(X; a, b) = a⊙LFC + b⊙HFC).

With a mask the mean is over valid tokens, and masked tokens are zero in every result: padding may hold anything, NaN
included, and gets no gradient. Statistics are float32 for float32 and narrower tokens, float64 for float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overtone.types import FrequencyNorms


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _blank(x: Tensor, mask: Tensor | None) -> Tensor:
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
    wide = _blank(_widen(x), mask)
    anchor = _first_token(wide, mask).detach()  # HFC does not depend on it, so neither does the gradient
    difference = _blank(wide - anchor, mask)
    low = _blank(_mean(wide, mask, is_causal).expand_as(wide), mask)
    high = _blank(difference - _mean(difference, mask, is_causal), mask)
    return low, high


def _frobenius(x: Tensor) -> Tensor:
    """Frobenius norm over tokens and channels, its gradient at zero zero; two short sums round less than a long one."""
    return torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=-1), dim=-1)


def frequency_norms(x: Tensor, *, mask: Tensor | None = None) -> FrequencyNorms:
    """‖LFC[x]‖ and ‖HFC[x]‖ of every sample: [..., N, C] -> two of [...]."""
    low, high = frequency_components(x, mask=mask)
    return FrequencyNorms(_frobenius(low), _frobenius(high))


def frequency_filter(
    x: Tensor, low: Tensor | float, high: Tensor | float, *, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """low ⊙ LFC[x] + high ⊙ HFC[x]; low and high are numbers or vectors over channels."""
    low_part, high_part = frequency_components(x, mask=mask, is_causal=is_causal)
    return (low * low_part + high * high_part).to(x.dtype)


def de_escalate(x: Tensor, tau: Tensor | float = 1.0, *, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """(I − τΠ)x, the filter with gains 1 − τ and 1."""
    return frequency_filter(x, 1 - tau, 1.0, mask=mask, is_causal=is_causal)
