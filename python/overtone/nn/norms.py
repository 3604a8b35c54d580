"""LayerNorm whose weights keep their sign."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SignedLayerNorm(nn.LayerNorm):
    """LayerNorm with weights sign · |weight|: they stay positive or negative throughout training.

    A negative sign before attention swaps smoothing and sharpening, as if the spectrum were multiplied by −1.

    Args:
        dim: channels of a token.
        sign: 1 or −1.
        eps: added to the variance.
    """

    def __init__(
        self, dim: int, sign: int = 1, *, eps: float = 1e-6, device=None, dtype: torch.dtype | None = None
    ) -> None:
        if sign not in (1, -1):
            raise ValueError(f"SignedLayerNorm: sign: got {sign!r}, wanted 1 or -1")
        super().__init__(dim, eps=eps, device=device, dtype=dtype)
        self.sign = sign

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.sign * self.weight.abs(), self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sign={self.sign}"
