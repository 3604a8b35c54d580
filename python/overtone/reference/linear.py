"""Linear layers, and the MLP of a Transformer's block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b."""
    return F.linear(x, weight, bias)


def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """GELU(x W₁ᵀ + b₁) W₂ᵀ + b₂, with GELU(h) = h Φ(h)."""
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)
