"""linear and mlp: function → schema → kernel, for overtone.nn's modules.

With G = ∂L/∂y, linear has ∂x = G W, ∂W = Gᵀ x, ∂b = Σ_tokens G. mlp is two of them, with a = GELU(h) between; its
kernel keeps h = x W₁ᵀ + b₁ alone and computes a again:
    ∂W₂ = Gᵀ a     ∂b₂ = Σ_tokens G     ∂h = (G W₂) ⊙ GELU'(h)     ∂W₁ = ∂hᵀ x     ∂b₁ = Σ_tokens ∂h     ∂x = ∂h W₁
A gradient of a gradient is taken through the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overtone import _transforms as transforms
from overtone import _validate as validate
from overtone import reference
from overtone.backends import SUPPORT, active_backend, select
from overtone.ops import registry

__all__ = ["has_backend", "linear", "mlp"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """x Wᵀ + b, as torch.nn.functional.linear.

    Under autocast it is PyTorch's.

    Args:
        x: [..., N, C], any strides.
        weight, bias: [E, C] and [E] or None, in x's dtype.
        backend: "reference", "cpu" (float32 and float64), or None to choose.

    Returns:
        y [..., N, E], differentiable in every argument.
    """
    if backend is None and _is_autocast(x):
        return reference.linear(x, weight, bias)
    x = validate.tokens("linear", "x", x)
    weight = validate.matching("linear", "weight", weight, ("E", x.shape[-1]), x)
    if bias is not None:
        bias = validate.matching("linear", "bias", bias, (weight.shape[0],), x).contiguous()
    if 0 in weight.shape or select("linear", backend, x) == "reference":
        return reference.linear(x, weight, bias)
    y = torch.ops.overtone.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, *, backend: str | None = None) -> Tensor:
    """GELU(x W₁ᵀ + b₁) W₂ᵀ + b₂, the MLP of a Transformer's block, in one op.

    Under autocast it is PyTorch's.

    Args:
        x: [..., N, C], any strides.
        w1, b1: [H, C] and [H], as in nn.Linear; everything in x's dtype.
        w2, b2: [E, H] and [E].
        backend: "reference", "cpu" (float32 and float64), or None to choose.

    Returns:
        y [..., N, E], differentiable in every argument.
    """
    if backend is None and _is_autocast(x):
        return reference.mlp(x, w1, b1, w2, b2)
    x = validate.tokens("mlp", "x", x)
    w1 = validate.matching("mlp", "w1", w1, ("H", x.shape[-1]), x)
    b1 = validate.matching("mlp", "b1", b1, (w1.shape[0],), x).contiguous()
    w2 = validate.matching("mlp", "w2", w2, ("E", w1.shape[0]), x)
    b2 = validate.matching("mlp", "b2", b2, (w2.shape[0],), x).contiguous()
    if 0 in (*w1.shape, w2.shape[0]) or select("mlp", backend, x) == "reference":
        return reference.mlp(x, w1, b1, w2, b2)
    save_for_backward = transforms.needs_gradient(x, w1, b1, w2, b2)
    y, _ = torch.ops.overtone.mlp(x.reshape(-1, x.shape[-1]), w1, b1, w2, b2, save_for_backward)
    return y.reshape(*x.shape[:-1], w2.shape[0])


def has_backend(op: str) -> bool:
    """Whether what `use_backend` names has this op; if not, a layer is PyTorch's own and does not call it."""
    return active_backend() in (None, "reference", *SUPPORT[op])


def _is_autocast(x: Tensor) -> bool:
    """Whether autocast chooses the dtypes of products."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _fake_linear(x, weight, bias):
    return x.new_empty(x.shape[0], weight.shape[0])


def _fake_linear_backward(grad_y, x, weight, need_x, need_weight):
    shapes = (weight.shape, weight.shape[:1])
    return x.new_empty(x.shape if need_x else (0,)), *(x.new_empty(s if need_weight else (0,)) for s in shapes)


# Rows of h are a multiple of a cache line.
_CACHE_LINE_FLOATS = 16


def _fake_mlp(x, w1, b1, w2, b2, save_for_backward):
    stride = (w1.shape[0] + _CACHE_LINE_FLOATS - 1) // _CACHE_LINE_FLOATS * _CACHE_LINE_FLOATS
    return x.new_empty(x.shape[0], w2.shape[0]), x.new_empty((x.shape[0], stride) if save_for_backward else (0,))


def _fake_mlp_backward(grad_y, x, w1, w2, pre, need_x, need_weights):
    shapes = (w1.shape, w1.shape[:1], w2.shape, w2.shape[:1])
    return x.new_empty(x.shape if need_x else (0,)), *(x.new_empty(s if need_weights else (0,)) for s in shapes)


def _save_linear(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _linear_backward(ctx, grad_y):
    x, weight, bias = ctx.saved_tensors
    if grad_y is None:
        return None, None, None
    if transforms.open_for(grad_y):
        given = (x, weight) if bias is None else (x, weight, bias)
        grads = registry.double_backward_via_reference(reference.linear, given, (grad_y,))
        return *grads, *(None,) * (3 - len(grads))
    need_x, *need_weight = ctx.needs_input_grad
    grads = torch.ops.overtone.linear_backward(grad_y, x, weight, need_x, any(need_weight))
    return _wanted(grads, ctx.needs_input_grad)


def _save_mlp(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:5], output[1])


def _mlp_backward(ctx, grad_y, _grad_pre):
    *given, pre = ctx.saved_tensors
    if grad_y is None:
        return (None,) * 6
    if transforms.open_for(grad_y):
        return *registry.double_backward_via_reference(reference.mlp, tuple(given), (grad_y,)), None
    x, w1, _, w2, _ = given
    need_x, *need_weights = ctx.needs_input_grad[:5]
    grads = torch.ops.overtone.mlp_backward(grad_y, x, w1, w2, pre, need_x, any(need_weights))
    return *_wanted(grads, ctx.needs_input_grad[:5]), None


def _wanted(grads: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))


registry.register(
    registry.Op(
        schema="linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
        fake=_fake_linear,
        save=_save_linear,
        backward=_linear_backward,
        reference=reference.linear,
        vmap=registry.Vmap(batched=(0,), merges=True, contiguous=(2,)),
    )
)
registry.register(
    registry.Op(
        # What is not needed comes back empty; the bias' gradient comes with the weight's.
        schema="linear_backward(Tensor grad_y, Tensor x, Tensor weight, bool need_x, bool need_weight)"
        " -> (Tensor x, Tensor weight, Tensor bias)",
        fake=_fake_linear_backward,
    )
)
registry.register(
    registry.Op(
        # save_for_backward: whoever wants a gradient must ask for h, which is otherwise empty.
        schema="mlp(Tensor x, Tensor w1, Tensor b1, Tensor w2, Tensor b2, bool save_for_backward)"
        " -> (Tensor y, Tensor pre)",
        fake=_fake_mlp,
        save=_save_mlp,
        backward=_mlp_backward,
        reference=lambda x, w1, b1, w2, b2, _: (reference.mlp(x, w1, b1, w2, b2), x.new_empty(0)),
        vmap=registry.Vmap(batched=(0,), merges=True, contiguous=(2, 4)),
    )
)
registry.register(
    registry.Op(
        schema="mlp_backward(Tensor grad_y, Tensor x, Tensor w1, Tensor w2, Tensor pre, bool need_x, bool need_weights)"
        " -> (Tensor x, Tensor w1, Tensor b1, Tensor w2, Tensor b2)",
        fake=_fake_mlp_backward,
    )
)
