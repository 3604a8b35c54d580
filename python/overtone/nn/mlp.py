"""The MLP of a Transformer's block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overtone.nn.linear import is_fusible
from overtone.ops.linear import mlp

__all__ = ["Mlp"]


class Mlp(nn.Module):
    """fc2(GELU(fc1(x))), in one op."""

    def __init__(self, dim: int, hidden: int, *, device=None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if is_fusible(self.fc1) and is_fusible(self.fc2) and None not in (self.fc1.bias, self.fc2.bias):
            return mlp(x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        return self.fc2(F.gelu(self.fc1(x)))
