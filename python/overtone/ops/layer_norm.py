"""rounded_layer_norm: function → schema → kernel, for models under autocast, whose products take bfloat16.

LayerNorm of float32 tokens, rounded to bfloat16 while it is in a register; its gradient takes bfloat16 and gives
float32. PyTorch's own takes a pass over memory for each cast. A gradient of a gradient is taken through the reference.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from overtone import _transforms as transforms
from overtone import _validate as validate
from overtone.backends import select
from overtone.ops import registry

__all__ = ["rounded_layer_norm"]


def rounded_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, *, backend: str | None = None
) -> Tensor:
    """LayerNorm over the last dimension, as torch.nn.functional.layer_norm, rounded to bfloat16.

    Args:
        x: [..., N, C] in float32.
        weight, bias: [C], in float32.
        eps: added to the variance.
        backend: "reference", "cpu", or None to choose.

    Returns:
        y [..., N, C] in bfloat16, differentiable in x, weight and bias.
    """
    x = validate.tokens("rounded_layer_norm", "x", x)
    weight = validate.matching("rounded_layer_norm", "weight", weight, (x.shape[-1],), x)
    bias = validate.matching("rounded_layer_norm", "bias", bias, (x.shape[-1],), x)
    if select("rounded_layer_norm", backend, x) == "reference" or x.shape[-1] == 0:
        return _reference(x, weight, bias, eps)[0]
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    y, _ = registry.call("rounded_layer_norm", flat, weight.contiguous(), bias.contiguous(), eps)
    return y.reshape(x.shape)


def _reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps).bfloat16(), x.new_empty(0)


def _fake(x, weight, bias, eps):
    return x.new_empty(x.shape, dtype=torch.bfloat16), x.new_empty(x.shape[0], 2)


def _fake_backward(grad_y, x, weight, rows, need_x, need_weight):
    shape = weight.shape if need_weight else (0,)
    return x.new_empty(x.shape if need_x else (0,)), x.new_empty(shape), x.new_empty(shape)


def _save(ctx, inputs, output) -> None:
    *given, ctx.eps = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*given, output[1])


def _backward(ctx, grad_y, _grad_rows):
    x, weight, bias, rows = ctx.saved_tensors
    if grad_y is None:
        return (None,) * 4
    if transforms.open_for(grad_y):
        grads = registry.double_backward_via_reference(
            lambda *given: _reference(*given, ctx.eps)[0], (x, weight, bias), (grad_y,)
        )
        return *grads, None
    needs = ctx.needs_input_grad
    grads = torch.ops.overtone.rounded_layer_norm_backward(
        grad_y.contiguous(), x, weight, rows, needs[0], needs[1] or needs[2]
    )
    return *(grad if need else None for grad, need in zip(grads, needs, strict=False)), None


registry.register(
    registry.Op(
        # rows: the mean of every token, and one over its standard deviation.
        schema="rounded_layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor y, Tensor rows)",
        fake=_fake,
        save=_save,
        backward=_backward,
        reference=_reference,
        vmap=registry.Vmap(batched=(0,), merges=True, contiguous=(0, 1, 2)),
    )
)
registry.register(
    registry.Op(
        # grad_y is bfloat16 or float32. What is not needed comes back empty.
        schema="rounded_layer_norm_backward(Tensor grad_y, Tensor x, Tensor weight, Tensor rows, bool need_x,"
        " bool need_weight) -> (Tensor x, Tensor weight, Tensor bias)",
        fake=_fake_backward,
    )
)
