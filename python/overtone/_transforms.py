"""Forward-mode AD and the transforms of torch.func: whether they are at work, and on which tensors.

While the dispatcher works on a level of a transform, an op sees tensors wrapped by that level (and those beneath). At
the last, plain level no transform is active any more.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import _C, Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad

from overtone._precision import autocast_disabled


def differentiating() -> bool:
    """Whether a transform that differentiates (grad, vjp, jvp, …) or a forward-mode AD level is open."""
    if forward_ad._current_level >= 0:
        return True
    if not _C._are_functorch_transforms_active():
        return False
    if torch.compiler.is_compiling():  # it cannot look at the levels
        return True
    levels = (interpreter.key() for interpreter in _C._functorch.get_interpreter_stack())
    return any(level in (_C._functorch.TransformType.Grad, _C._functorch.TransformType.Jvp) for level in levels)


def active() -> bool:
    """Whether a transform of torch.func or a forward-mode AD level is open."""
    return forward_ad._current_level >= 0 or _C._are_functorch_transforms_active()


def tracked(args: tuple) -> bool:
    """Whether the derivative of a result is wanted by a transform of this level, or by forward-mode AD."""
    if torch.is_grad_enabled() and _C._are_functorch_transforms_active() and _C._any_requires_grad(*args):
        return True
    return has_tangent(args)


def open_for(*grads: Tensor | None) -> bool:
    """Whether gradients on their way back are to be differentiated, or mapped, themselves: no kernel can take them."""
    return torch.is_grad_enabled() or _C._are_functorch_transforms_active() or has_tangent(grads)


def has_tangent(args: tuple) -> bool:
    """Whether any of them is dual at this level."""
    if forward_ad._current_level < 0 or not _C._is_fwd_grad_enabled():
        return False
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in args)


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Around an op's call: in a transform the reference's products must be as wide as the kernels', and within the op
    itself torch.func does not listen any more."""
    return autocast_disabled(x) if _C._are_functorch_transforms_active() else nullcontext()


def is_plain(x: Tensor) -> bool:
    """Neither a transform's tensor nor a dual one."""
    return beneath(x) is x and not has_tangent((x,))


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether a result's gradient may be asked for; a tensor mapped by torch.vmap does not say so itself."""
    if not torch.is_grad_enabled():
        return False
    if any(x is not None and x.requires_grad for x in tensors):
        return True
    if not _C._are_functorch_transforms_active():
        return False
    # A compiler cannot look beneath.
    return torch.compiler.is_compiling() or any(x is not None and _beneath_requires(x) for x in tensors)


def _beneath_requires(x: Tensor) -> bool:
    while _C._functorch.is_functorch_wrapped_tensor(x):
        x = _C._functorch.get_unwrapped(x)
        if x.requires_grad:
            return True
    return False


def readable(x: Tensor) -> bool:
    """Whether Python may look at values: not where a transform is traced into a graph for later."""
    tracing = (_C._TorchDispatchModeKey.FAKE, _C._TorchDispatchModeKey.PROXY)
    is_real = type(x) is Tensor or not is_fake(x)  # the first is the quicker question
    return is_real and all(_C._get_dispatch_mode(mode) is None for mode in tracing)


def beneath(x: Tensor) -> Tensor:
    """The plain tensor inside every wrapper, with the mapped dimensions that these hide."""
    while _C._functorch.is_functorch_wrapped_tensor(x):
        x = _C._functorch.get_unwrapped(x)
    return x
