"""The MLP of a Vision Transformer's block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overtone.backends import KERNELS, forced_backend
from overtone.ops.mlp import mlp

__all__ = ["Mlp"]


class Mlp(nn.Module):
    """Linear, GELU, Linear, with timm's names; on the CPU in one op."""

    def __init__(self, dim: int, hidden: int, **factory) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden, **factory)
        self.fc2 = nn.Linear(hidden, dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        if self._is_fusible(x):
            return mlp(x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        return self.fc2(F.gelu(self.fc1(x)))

    def _is_fusible(self, x: Tensor) -> bool:
        """Not where autocast chooses dtypes, where a backend is forced that has no MLP, or where someone has put another
        module (quantised, of low rank) in place of a linear one."""
        return (
            not torch.is_autocast_enabled(x.device.type)
            and forced_backend() in (None, "reference", *KERNELS["mlp"])
            and type(self.fc1) is type(self.fc2) is nn.Linear
        )
