"""LayerNorm: with weights that keep their sign, and rounded where only products read it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overtone.nn.linear import has_global_hooks, is_ordinary, is_plain
from overtone.ops.layer_norm import rounded_layer_norm
from overtone.ops.linear import has_backend


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


def normalize_for_products(norm: nn.Module, x: Tensor) -> Tensor:
    """norm(x), for layers that cast what they take: under autocast to bfloat16 it is rounded on the way."""
    if isinstance(norm, nn.LayerNorm) and _is_rounded(norm, x):
        return rounded_layer_norm(x, norm.weight, norm.bias, norm.eps)
    return norm(x)


def _is_rounded(norm: nn.LayerNorm, x: Tensor) -> bool:
    if x.device.type != "cpu" or x.dtype != torch.float32 or not torch.is_autocast_enabled("cpu"):
        return False
    if torch.get_autocast_dtype("cpu") != torch.bfloat16 or not is_plain(norm, nn.LayerNorm) or has_global_hooks():
        return False
    parameters = (norm.weight, norm.bias)
    return (
        tuple(norm.normalized_shape) == x.shape[-1:]
        and all(p is not None and is_ordinary(p) and p.dtype == torch.float32 for p in parameters)
        and has_backend("rounded_layer_norm")
    )
