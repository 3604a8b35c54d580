"""The MLP of a Transformer's block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overtone.ops.linear import mlp

__all__ = ["Mlp"]


class Mlp(nn.Module):
    """fc2(GELU(fc1(x))), in one op."""

    def __init__(self, dim: int, hidden: int, *, device=None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if _is_plain(self.fc1) and _is_plain(self.fc2):
            return mlp(x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        return self.fc2(F.gelu(self.fc1(x)))


def _is_plain(layer: nn.Module) -> bool:
    """Nobody has put another module there, quantised or of low rank, or a hook that wants to see it run."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return type(layer) is nn.Linear and not any(hooks)
