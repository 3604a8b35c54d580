"""The MLP of a Transformer block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """GELU(x W₁ᵀ + b₁) W₂ᵀ + b₂, with GELU(h) = h Φ(h)."""
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)
