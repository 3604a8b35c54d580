"""Linear layers and the MLP on our ops, and when an op may read a layer's weight instead of calling the layer."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules import module as torch_module
from torch.utils.module_tracker import ModuleTracker

from overtone import _validate as validate
from overtone.ops.linear import has_backend, linear, mlp

__all__ = ["GELUS", "Mlp", "apply_linear", "has_global_hooks", "is_fusible", "is_hooked", "is_ordinary", "is_plain"]

# What GELU may be, and torch's name for it.
GELUS = {"exact": "none", "tanh": "tanh"}

# The last two stand for ordinary tensors while a graph is traced.
_ORDINARY = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)

_GLOBAL_HOOKS = (
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
    torch_module._global_backward_pre_hooks,
    torch_module._global_backward_hooks,
)


def is_fusible(layer: nn.Module) -> bool:
    """Whether calling the layer would do nothing but x Wᵀ + b with its own tensors.

    False for anything a user may have put in its place: adapters, quantized layers and wrappers, subclasses (which is
    also what a parametrization makes of a layer), hooks (pruning is one), and tensor subclasses as weights.
    """
    if not is_plain(layer, nn.Linear) or has_global_hooks():
        return False
    return is_ordinary(layer.weight) and (layer.bias is None or is_ordinary(layer.bias))


def is_ordinary(tensor: Any) -> bool:
    """Whether this is no subclass of Tensor with its own matrix product, such as a quantized or sharded weight."""
    return type(tensor) in _ORDINARY


def is_plain(module: Any, *kinds: type) -> bool:
    """Whether the module is of exactly one of these classes, without hooks and without a forward of its own."""
    return type(module) in kinds and "forward" not in vars(module) and not is_hooked(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module also calls hooks."""
    forward = module._forward_pre_hooks or module._forward_hooks
    return bool(forward or module._backward_pre_hooks or module._backward_hooks)


def has_global_hooks() -> bool:
    """Whether torch has hooks that run for every module.

    Those of torch's ModuleTracker (used by FlopCounterMode) do not count: they only ask which module an op belongs to,
    and a fused op belongs to the attention.
    """
    return any(_GLOBAL_HOOKS) and not all(map(_only_tracks, chain(*(hooks.values() for hooks in _GLOBAL_HOOKS))))


def _only_tracks(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), ModuleTracker)


def apply_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """layer(x), on our op if the layer is fusible."""
    return linear(x, layer.weight, layer.bias) if is_fusible(layer) and has_backend("linear") else layer(x)


class Mlp(nn.Module):
    """fc2(GELU(fc1(x))), in one op where GELU is exact; plus `residual` where given.

    Args:
        dim: channels of a token.
        hidden: channels between the two layers.
        gelu: "exact" or "tanh", GELU's approximation by tanh.
    """

    def __init__(
        self, dim: int, hidden: int, gelu: str = "exact", *, device=None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.gelu = validate.one_of("Mlp", "gelu", gelu, tuple(GELUS))
        self.fc1 = nn.Linear(dim, hidden, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, dim, device=device, dtype=dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        fusible = is_fusible(self.fc1) and is_fusible(self.fc2) and None not in (self.fc1.bias, self.fc2.bias)
        if fusible and self.gelu == "exact" and has_backend("mlp"):
            return mlp(x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias, residual=residual)
        y = apply_linear(self.fc2, F.gelu(apply_linear(self.fc1, x), approximate=GELUS[self.gelu]))
        return y if residual is None else residual + y
