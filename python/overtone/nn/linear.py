"""When a fused op may read a layer's weight in place of calling it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules import module as torch_module
from torch.utils.module_tracker import ModuleTracker

__all__ = ["has_global_hooks", "is_fusible", "is_hooked", "is_ordinary", "is_plain"]

# The last two stand for ordinary tensors while a graph is traced.
_ORDINARY = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)


def is_fusible(layer: nn.Module) -> bool:
    """Whether x Wᵀ + b of the layer's own tensors is all that calling it would do.

    Not so where a user has put something else in its place (adapters, quantised layers, wrappers), a subclass (which is
    also what parametrizations make of it), hooks (pruning is one), or a weight of another kind of tensor.
    """
    if not is_plain(layer, nn.Linear) or has_global_hooks():
        return False
    return is_ordinary(layer.weight) and (layer.bias is None or is_ordinary(layer.bias))


def is_ordinary(tensor: Any) -> bool:
    """Not of a subclass with a multiplication of its own: quantised, sharded."""
    return type(tensor) in _ORDINARY


def is_plain(module: Any, *kinds: type) -> bool:
    """Whether the module is of one of these very classes, and nobody watches or changes its calls."""
    return type(module) in kinds and "forward" not in vars(module) and not is_hooked(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module calls something else too."""
    forward = module._forward_pre_hooks or module._forward_hooks
    return bool(forward or module._backward_pre_hooks or module._backward_hooks)


def has_global_hooks() -> bool:
    """Whether there are hooks on the calls of every module.

    torch's ModuleTracker (of FlopCounterMode) asks only whose an op is, and a fused op is the attention's.
    """
    return any(not isinstance(getattr(hook, "__self__", None), ModuleTracker) for hook in _global_hooks())


def _global_hooks() -> Iterator[Any]:
    return chain(
        torch_module._global_forward_pre_hooks.values(),
        torch_module._global_forward_hooks.values(),
        torch_module._global_backward_pre_hooks.values(),
        torch_module._global_backward_hooks.values(),
    )
