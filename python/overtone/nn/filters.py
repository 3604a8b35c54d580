"""What is applied to a block's output: frequency filters, low ⊙ LFC[x] + high ⊙ HFC[x] (MATH §3), and ContraNorm."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overtone import _validate as validate
from overtone.ops.frequency import frequency_filter


class RunningMean(NamedTuple):
    """The mean of all tokens so far, [B, 1, C] in the statistics' dtype, and how many they are."""

    mean: Tensor
    tokens: int

    @classmethod
    def of(cls, x: Tensor) -> RunningMean:
        return cls(x.to(validate.accumulate_dtype(x.dtype)).mean(-2, keepdim=True), x.shape[-2])

    def extend(self, x: Tensor) -> tuple[Tensor, RunningMean]:
        """The mean up to each of x's tokens, which come next, and that of all."""
        total = self.tokens + x.shape[-2]
        counts = torch.arange(self.tokens + 1, total + 1, device=x.device)[:, None]
        means = self.mean + (x.to(self.mean.dtype) - self.mean).cumsum(-2) / counts
        return means, RunningMean(means[..., -1:, :], total)


class FrequencyFilter(nn.Module):
    """low ⊙ LFC[x] + high ⊙ HFC[x] with the gains of a subclass.

    forward(x [..., N, C], mask=None, is_causal=False): tokens where mask is False (padding) are left out of the mean
    and zero in the result; is_causal takes the running mean, so that no token sees a later one.
    """

    def gains(self) -> tuple[Tensor | float, Tensor | float]:
        """low and high."""
        raise NotImplementedError

    def forward(self, x: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return frequency_filter(x, *self.gains(), mask=mask, is_causal=is_causal)

    def step(self, x: Tensor, state: RunningMean | None = None) -> tuple[Tensor, RunningMean]:
        """The causal filter on tokens that follow earlier ones, and the state to go on with; None: there were none."""
        if state is None:
            return self(x, is_causal=True), RunningMean.of(x)
        means, state = state.extend(x)
        low, high = self.gains()
        return (low * means + high * (x - means)).to(x.dtype), state


class DeEscalation(FrequencyFilter):
    """(I − τΠ)x: subtracts tau times the mean of the tokens (Yueyao Yu and Yin Zhang).

    forward(x [..., N, C], mask=None, is_causal=False): tokens where mask is False (padding) are left out of the mean
    and zero in the result; is_causal takes the running mean, so that no token sees a later one.
    """

    def __init__(self, tau: float = 1.0) -> None:
        super().__init__()
        self.tau = float(tau)

    def gains(self) -> tuple[Tensor | float, Tensor | float]:
        return 1 - self.tau, 1.0

    def extra_repr(self) -> str:
        return f"tau={self.tau}"


class FeatScale(FrequencyFilter):
    """(1 + s) ⊙ LFC[x] + (1 + t) ⊙ HFC[x], s and t learned per channel, initially zero (Wang et al. 2022)."""

    def __init__(self, dim: int, *, device=None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))
        self.high = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def gains(self) -> tuple[Tensor | float, Tensor | float]:
        return 1 + self.low, 1 + self.high


class ContraNorm(nn.Module):
    """(1 + s)x − s·softmax(x̂ x̂ᵀ / t)x, x̂ the tokens normalized to unit length (Guo et al. 2023).

    forward(x [..., N, C], mask=None, is_causal=False): tokens where mask is False (padding) are not attended to and
    zero in the result; with is_causal no token sees a later one.
    """

    def __init__(self, scale: float = 0.1, temperature: float = 1.0) -> None:
        super().__init__()
        self.scale, self.temperature = float(scale), float(temperature)

    def forward(self, x: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        unit = F.normalize(x, dim=-1)
        attn_mask = None
        if mask is not None:
            attn_mask = mask[..., None, :]
            if is_causal:  # SDPA takes either a mask or is_causal
                attn_mask = attn_mask & mask.new_ones(x.shape[-2], x.shape[-2]).tril()
        attended = F.scaled_dot_product_attention(
            unit, unit, x, attn_mask=attn_mask, is_causal=is_causal and mask is None, scale=1 / self.temperature
        )
        y = (1 + self.scale) * x - self.scale * attended
        return y if mask is None else y.masked_fill(~mask[..., None], 0)

    def step(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The causal filter on tokens that follow earlier ones, and the state to go on with; None: there were none."""
        if state is None:
            return self(x, is_causal=True), x
        every, earlier = torch.cat((state, x), -2), state.shape[-2]
        seen = torch.ones(x.shape[-2], every.shape[-2], dtype=torch.bool, device=x.device).tril(earlier)
        attended = F.scaled_dot_product_attention(
            F.normalize(x, dim=-1), F.normalize(every, dim=-1), every, attn_mask=seen, scale=1 / self.temperature
        )
        return (1 + self.scale) * x - self.scale * attended, every

    def extra_repr(self) -> str:
        return f"scale={self.scale}, temperature={self.temperature}"
