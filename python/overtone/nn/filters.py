"""What is applied to a block's output: frequency filters, low ⊙ LFC[x] + high ⊙ HFC[x] (MATH §3), and ContraNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overtone.ops.frequency import de_escalate, frequency_filter


class DeEscalation(nn.Module):
    """(I − τΠ)x: subtracts tau times the mean of the tokens (Yueyao Yu and Yin Zhang).

    forward(x [..., N, C], mask=None, is_causal=False): tokens where mask is False (padding) are left out of the mean
    and zero in the result; is_causal takes the running mean, so that no token sees a later one.
    """

    def __init__(self, tau: float = 1.0) -> None:
        super().__init__()
        self.tau = float(tau)

    def forward(self, x: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return de_escalate(x, self.tau, mask=mask, is_causal=is_causal)

    def extra_repr(self) -> str:
        return f"tau={self.tau}"


class FeatScale(nn.Module):
    """(1 + s) ⊙ LFC[x] + (1 + t) ⊙ HFC[x], s and t learned per channel, initially zero (Wang et al. 2022)."""

    def __init__(self, dim: int, *, device=None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))
        self.high = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return frequency_filter(x, 1 + self.low, 1 + self.high, mask=mask, is_causal=is_causal)


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

    def extra_repr(self) -> str:
        return f"scale={self.scale}, temperature={self.temperature}"
