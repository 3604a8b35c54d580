"""mlp: public function → contract → kernel, for overtone.nn's module.

The kernel keeps h = x W₁ᵀ + b₁ alone for backward. With a = GELU(h) and G = ∂L/∂y:
    ∂W₂ = Gᵀ a     ∂b₂ = Σ_tokens G     ∂h = (G W₂) ⊙ GELU'(h)     ∂W₁ = ∂hᵀ x     ∂b₁ = Σ_tokens ∂h     ∂x = ∂h W₁
A gradient of a gradient is taken through the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overtone import reference
from overtone.backends import select
from overtone.ops import checks, library

__all__ = ["mlp"]

_NAME = "mlp"


def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, *, backend: str | None = None) -> Tensor:
    """GELU(x W₁ᵀ + b₁) W₂ᵀ + b₂, the MLP of a Transformer block, in one op.

    Args:
        x: [..., N, C], any strides.
        w1, b1: [H, C] and [H], as in nn.Linear; everything in x's dtype.
        w2, b2: [E, H] and [E].
        backend: "reference", "cpu" (float32 and float64), or None to choose.

    Returns:
        y [..., N, E], differentiable in every argument.
    """
    x = checks.tokens(_NAME, "x", x)
    w1 = checks.matching(_NAME, "w1", w1, ("H", x.shape[-1]), x)
    b1 = checks.matching(_NAME, "b1", b1, (w1.shape[0],), x)
    w2 = checks.matching(_NAME, "w2", w2, ("E", w1.shape[0]), x)
    b2 = checks.matching(_NAME, "b2", b2, (w2.shape[0],), x)
    if select(_NAME, backend, x) == "reference" or 0 in (*w1.shape, w2.shape[0]):  # without channels: nothing to run
        return reference.mlp(x, w1, b1, w2, b2)
    weights = (w1, b1.contiguous(), w2, b2.contiguous())
    need_backward = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights))
    y, _ = torch.ops.overtone.mlp(x.reshape(-1, x.shape[-1]), *weights, need_backward)
    return y.view(*x.shape[:-1], w2.shape[0])


# Rows of h are whole cache lines.
_MULTIPLE = 16


def _fake(x, w1, b1, w2, b2, need_backward):
    hidden = (w1.shape[0] + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE
    return x.new_empty(x.shape[0], w2.shape[0]), x.new_empty((x.shape[0], hidden) if need_backward else (0,))


def _fake_backward(grad_y, x, w1, w2, pre, need_x, need_weights):
    hidden, outputs = w1.shape[0], w2.shape[0]
    shapes = ((hidden, x.shape[1]), (hidden,), (outputs, hidden), (outputs,))
    return x.new_empty(x.shape if need_x else (0,)), *(x.new_empty(s if need_weights else (0,)) for s in shapes)


# need_backward: whoever wants a gradient must ask for h. What is not wanted comes back empty.
library.define(
    "mlp(Tensor x, Tensor w1, Tensor b1, Tensor w2, Tensor b2, bool need_backward) -> (Tensor y, Tensor pre)",
    fake=_fake,
)
library.define(
    "mlp_backward(Tensor grad_y, Tensor x, Tensor w1, Tensor w2, Tensor pre, bool need_x, bool need_weights)"
    " -> (Tensor x, Tensor w1, Tensor b1, Tensor w2, Tensor b2)",
    fake=_fake_backward,
)


def _save(ctx, inputs, output) -> None:
    x, w1, b1, w2, b2, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, w1, b1, w2, b2, output[1])


def _backward(ctx, grad_y, _grad_pre):
    x, w1, b1, w2, b2, pre = ctx.saved_tensors
    if grad_y is None:
        return (None,) * 6
    if torch.is_grad_enabled():
        return *library.differentiable_gradient(reference.mlp, (x, w1, b1, w2, b2), (grad_y,)), None
    need_x, *need_weights = ctx.needs_input_grad[:5]
    grads = torch.ops.overtone.mlp_backward(grad_y, x, w1, w2, pre, need_x, any(need_weights))
    needs = (need_x, *need_weights)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), None


library.differentiable(_NAME, setup=_save, backward=_backward)
library.without_vmap(_NAME, "put the mapped dimension in front of x's tokens")
