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
from overtone._precision import autocast
from overtone.backends import SUPPORT, active_backend, select
from overtone.ops import registry

__all__ = ["linear", "mlp"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """x Wᵀ + b, as torch.nn.functional.linear.

    Under autocast x is cast to its dtype, as PyTorch does; the kernels cast the weight while they pack it.

    Args:
        x: [..., N, C], any strides.
        weight, bias: [E, C] and [E] or None, in x's dtype or, with bfloat16 and float16, in float32. Their gradients
            have their dtypes.
        backend: "reference", "cpu", or None to choose.

    Returns:
        y [..., N, E] in x's dtype, differentiable in every argument.
    """
    if backend is None and _casts_elsewhere(x):
        return reference.linear(x, weight, bias)
    x = validate.tokens("linear", "x", autocast(x))
    weight = validate.matching("linear", "weight", _like(x, weight), ("E", x.shape[-1]), x, wide=True)
    if bias is not None:
        bias = validate.matching("linear", "bias", _like(x, bias), (weight.shape[0],), x, wide=True).contiguous()
    if 0 in weight.shape or select("linear", backend, x) == "reference":
        return _reference_linear(x, weight, bias)
    y = registry.call("linear", x.reshape(-1, x.shape[-1]), weight, bias)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def mlp(
    x: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    *,
    residual: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """residual + GELU(x W₁ᵀ + b₁) W₂ᵀ + b₂, the MLP of a Transformer's block, in one op.

    Autocast does what it does to `linear`.

    Args:
        x: [..., N, C], any strides.
        w1, b1: [H, C] and [H], as in nn.Linear; in x's dtype or, with bfloat16 and float16, in float32.
        w2, b2: [E, H] and [E].
        residual: [..., N, E] or None, in x's dtype or float32: the sum is not rounded before it is added.
        backend: "reference", "cpu", or None to choose.

    Returns:
        y [..., N, E] in x's dtype, or in that of the residual; differentiable in every argument.
    """
    if backend is None and _casts_elsewhere(x):
        y = reference.mlp(x, w1, b1, w2, b2)
        return y if residual is None else residual + y
    x = validate.tokens("mlp", "x", autocast(x))
    w1 = validate.matching("mlp", "w1", _like(x, w1), ("H", x.shape[-1]), x, wide=True)
    b1 = validate.matching("mlp", "b1", _like(x, b1), (w1.shape[0],), x, wide=True).contiguous()
    w2 = validate.matching("mlp", "w2", _like(x, w2), ("E", w1.shape[0]), x, wide=True)
    b2 = validate.matching("mlp", "b2", _like(x, b2), (w2.shape[0],), x, wide=True).contiguous()
    if residual is not None:
        shape = (*x.shape[:-1], w2.shape[0])
        residual = validate.matching("mlp", "residual", _like(x, residual), shape, x, wide=True)
    if 0 in (*w1.shape, w2.shape[0]) or select("mlp", backend, x) == "reference":
        return _reference_mlp(x, w1, b1, w2, b2, residual)
    save_for_backward = transforms.needs_gradient(x, w1, b1, w2, b2, residual)
    flat_residual = None if residual is None else residual.reshape(-1, residual.shape[-1])
    y, _ = registry.call("mlp", x.reshape(-1, x.shape[-1]), w1, b1, w2, b2, flat_residual, save_for_backward)
    return y.reshape(*x.shape[:-1], w2.shape[0])


def has_backend(op: str) -> bool:
    """Whether what `use_backend` names has this op; if not, a layer is PyTorch's own and does not call it."""
    return active_backend() in (None, "reference", *SUPPORT[op])


def _casts_elsewhere(x: Tensor) -> bool:
    """Whether autocast chooses the dtypes of PyTorch's products, which ours are not: on other devices."""
    device = x.device.type
    return device != "cpu" and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _like(x: Tensor, tensor: Tensor) -> Tensor:
    """Under autocast a parameter of another half in x's dtype, as autocast would cast it."""
    if isinstance(tensor, Tensor) and tensor.dtype not in (x.dtype, torch.float32) and autocast(tensor) is not tensor:
        return tensor.to(x.dtype)
    return tensor


def _reference_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The op's contract on the reference: parameters may be wider than x."""
    return reference.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _reference_mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, residual: Tensor | None) -> Tensor:
    y = reference.mlp(x, *(weight.to(x.dtype) for weight in (w1, b1, w2, b2)))
    return y if residual is None else residual + y


def _fake_linear(x, weight, bias):
    return x.new_empty(x.shape[0], weight.shape[0])


def _fake_linear_backward(grad_y, x, weight, need_x, need_weight):
    shapes = (weight.shape, weight.shape[:1])
    return x.new_empty(x.shape if need_x else (0,)), *(weight.new_empty(s if need_weight else (0,)) for s in shapes)


# Rows of h are a multiple of a cache line.
_CACHE_LINE_FLOATS = 16


def _fake_mlp(x, w1, b1, w2, b2, residual, save_for_backward):
    stride = (w1.shape[0] + _CACHE_LINE_FLOATS - 1) // _CACHE_LINE_FLOATS * _CACHE_LINE_FLOATS
    y = (x if residual is None else residual).new_empty(x.shape[0], w2.shape[0])
    return y, x.new_empty((x.shape[0], stride) if save_for_backward else (0,))


def _fake_mlp_backward(grad_y, x, w1, w2, pre, need_x, need_weights):
    shapes = (w1.shape, w1.shape[:1], w2.shape, w2.shape[:1])
    weights = (w1, w1, w2, w2)
    return x.new_empty(x.shape if need_x else (0,)), *(
        weight.new_empty(shape if need_weights else (0,)) for weight, shape in zip(weights, shapes, strict=True)
    )


def _save_linear(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _linear_backward(ctx, grad_y):
    x, weight, bias = ctx.saved_tensors
    if grad_y is None:
        return None, None, None
    if transforms.open_for(grad_y):
        given = (x, weight) if bias is None else (x, weight, bias)
        grads = registry.double_backward_via_reference(_linear_of, given, (grad_y,))
        return *grads, *(None,) * (3 - len(grads))
    need_x, *need_weight = ctx.needs_input_grad
    grads = torch.ops.overtone.linear_backward(grad_y, x, weight, need_x, any(need_weight))
    return _wanted(grads, (x, weight, bias), ctx.needs_input_grad)


def _linear_of(x, weight, bias=None):
    return _reference_linear(x, weight, bias)


def _save_mlp(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:5], output[1])


def _mlp_backward(ctx, grad_y, _grad_pre):
    *given, pre = ctx.saved_tensors
    if grad_y is None:
        return (None,) * 7
    grad_residual = grad_y if ctx.needs_input_grad[5] else None
    if transforms.open_for(grad_y):
        grads = registry.double_backward_via_reference(_mlp_of, tuple(given), (grad_y.to(given[0].dtype),))
        return *grads, grad_residual, None
    x, w1, _, w2, _ = given
    need_x, *need_weights = ctx.needs_input_grad[:5]
    grads = torch.ops.overtone.mlp_backward(grad_y, x, w1, w2, pre, need_x, any(need_weights))
    return *_wanted(grads, given, ctx.needs_input_grad[:5]), grad_residual, None


def _mlp_of(x, w1, b1, w2, b2):
    return _reference_mlp(x, w1, b1, w2, b2, None)


def _wanted(grads: tuple[Tensor, ...], given: tuple, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """A bias' gradient comes in the weight's dtype."""
    return tuple(grad.to(of.dtype) if need else None for grad, of, need in zip(grads, given, needs, strict=True))


# Weights, biases, residuals and grad_y are in x's dtype or in that of its sums.
registry.register(
    registry.Op(
        schema="linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
        fake=_fake_linear,
        save=_save_linear,
        backward=_linear_backward,
        reference=_reference_linear,
        vmap=registry.Vmap(batched=(0,), merges=True, contiguous=(2,)),
    )
)
registry.register(
    registry.Op(
        # What is not needed comes back empty; the bias' gradient comes with the weight's, in its dtype.
        schema="linear_backward(Tensor grad_y, Tensor x, Tensor weight, bool need_x, bool need_weight)"
        " -> (Tensor x, Tensor weight, Tensor bias)",
        fake=_fake_linear_backward,
    )
)
registry.register(
    registry.Op(
        # save_for_backward: whoever wants a gradient must ask for h, which is otherwise empty.
        schema="mlp(Tensor x, Tensor w1, Tensor b1, Tensor w2, Tensor b2, Tensor? residual, bool save_for_backward)"
        " -> (Tensor y, Tensor pre)",
        fake=_fake_mlp,
        save=_save_mlp,
        backward=_mlp_backward,
        reference=lambda *args: (_reference_mlp(*args[:6]), args[0].new_empty(0)),
        vmap=registry.Vmap(batched=(0, 5), merges=True, contiguous=(2, 4)),
    )
)
registry.register(
    registry.Op(
        schema="mlp_backward(Tensor grad_y, Tensor x, Tensor w1, Tensor w2, Tensor pre, bool need_x, bool need_weights)"
        " -> (Tensor x, Tensor w1, Tensor b1, Tensor w2, Tensor b2)",
        fake=_fake_mlp_backward,
    )
)
