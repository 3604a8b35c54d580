"""frequency_norms, frequency_filter and de_escalate: public function → contract → kernel.

The gradients (MATH.md §2–3), which the kernels compute with the same centred sums as forward:
    ∂norms    low:  LFC[x]/‖LFC‖      high:  HFC[x]/‖HFC‖      zero at a zero norm
    ∂filter   x:    the filter of the gradient (Π is symmetric); causal: the adjoint of the running mean
              low:  Σ LFC[x] ⊙ G      high:  Σ HFC[x] ⊙ G
A gradient of a gradient is taken through the reference.
"""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from overtone import _transforms as transforms
from overtone import _validate as validate
from overtone import reference
from overtone.backends import select
from overtone.ops import registry
from overtone.types import FrequencyNorms

__all__ = ["de_escalate", "frequency_filter", "frequency_norms"]


def frequency_norms(x: Tensor, *, mask: Tensor | None = None, backend: str | None = None) -> FrequencyNorms:
    """Frobenius norms of the low- and high-frequency components of tokens.

    LFC[x] repeats the mean over tokens, HFC[x] is what remains; their ratio goes to zero as tokens become equal.

    Args:
        x: tokens [..., N, C], any strides; float32, float64, bfloat16 or float16.
        mask: bool, broadcastable to [..., N]; False marks padding, which is not read.
        backend: "reference", "cpu", "triton", or None to choose.

    Returns:
        FrequencyNorms(low, high), each [...], float32 (float64 for float64 tokens), differentiable.
    """
    x = validate.tokens("frequency_norms", "x", x)
    mask = validate.token_mask("frequency_norms", mask, x)
    if select("frequency_norms", backend, x) == "reference":
        return reference.frequency_norms(x, mask=mask)
    return FrequencyNorms(*torch.ops.overtone.frequency_norms(x, mask))


def frequency_filter(
    x: Tensor,
    low: Tensor | float,
    high: Tensor | float,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    backend: str | None = None,
) -> Tensor:
    """low ⊙ LFC[x] + high ⊙ HFC[x].

    Args:
        x: tokens [..., N, C], any strides.
        low, high: numbers, or tensors of shape [] or [C]; differentiable.
        mask: bool, broadcastable to [..., N]; False marks padding, which is not read, and is zero in the result.
        is_causal: the mean over tokens becomes the running mean, so that no token sees a later one.
        backend: "reference", "cpu", "triton", or None to choose.

    Returns:
        A contiguous tensor of x's shape and dtype.
    """
    x = validate.tokens("frequency_filter", "x", x)
    mask = validate.token_mask("frequency_filter", mask, x)
    low = validate.channel_gain("frequency_filter", "low", low, x)
    high = validate.channel_gain("frequency_filter", "high", high, x)
    is_causal = validate.flag("frequency_filter", "is_causal", is_causal)
    if select("frequency_filter", backend, x) == "reference":
        return reference.frequency_filter(x, low, high, mask=mask, is_causal=is_causal)
    return torch.ops.overtone.frequency_filter(x, low, high, mask, is_causal)


def de_escalate(
    x: Tensor,
    tau: Tensor | float = 1.0,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    backend: str | None = None,
) -> Tensor:
    """(I − τΠ)x: takes the share τ of the token mean off (Yu and Zhang); the filter with gains 1 − τ and 1."""
    x = validate.tokens("de_escalate", "x", x)
    if not isinstance(tau, Real):
        tau = validate.channel_gain("de_escalate", "tau", tau, x)
    return frequency_filter(x, 1 - tau, 1.0, mask=mask, is_causal=is_causal, backend=backend)


def _fake_norms(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    dtype = validate.accumulate_dtype(x.dtype)
    return x.new_empty(x.shape[:-2], dtype=dtype), x.new_empty(x.shape[:-2], dtype=dtype)


def _fake_norms_backward(grad_low, grad_high, x, low, high, mask, addend) -> Tensor:
    return x.new_empty(x.shape)


def _fake_filter(x, low, high, mask, is_causal) -> Tensor:
    return x.new_empty(x.shape)


def _fake_filter_backward(grad_y, x, low, high, mask, is_causal, need_x) -> tuple[Tensor, Tensor, Tensor]:
    dtype = validate.accumulate_dtype(grad_y.dtype)
    gains = low.shape if x is not None else (0,)
    grad_x = grad_y.new_empty(grad_y.shape if need_x else (0,))
    return grad_x, grad_y.new_empty(gains, dtype=dtype), grad_y.new_empty(gains, dtype=dtype)


def _save_norms(ctx, inputs, output) -> None:
    x, mask = inputs
    ctx.save_for_backward(x, mask, *output)


def _norms_backward(ctx, grad_low: Tensor, grad_high: Tensor):
    x, mask, low, high = ctx.saved_tensors
    if transforms.open_for(grad_low, grad_high):
        return registry.double_backward_via_reference(
            lambda x: reference.frequency_norms(x, mask=mask), (x,), (grad_low, grad_high)
        ) + (None,)
    grads = grad_low.contiguous(), grad_high.contiguous()
    return torch.ops.overtone.frequency_norms_backward(*grads, x, low, high, mask, None), None


def _save_filter(ctx, inputs, output) -> None:
    x, low, high, mask, is_causal = inputs
    need_x, need_low, need_high = ctx.needs_input_grad[:3]
    ctx.is_causal = is_causal
    # The filter is linear in x: its gradient needs x only for the gains.
    ctx.save_for_backward(x if need_low or need_high else None, low, high, mask)


def _filter_backward(ctx, grad_y: Tensor):
    x, low, high, mask = ctx.saved_tensors
    need_x, need_low, need_high = ctx.needs_input_grad[:3]
    if transforms.open_for(grad_y):
        return _differentiable_filter_backward(ctx, grad_y)
    grad_x, grad_low, grad_high = torch.ops.overtone.frequency_filter_backward(
        grad_y, x, low, high, mask, ctx.is_causal, need_x
    )
    return grad_x if need_x else None, grad_low if need_low else None, grad_high if need_high else None, None, None


def _differentiable_filter_backward(ctx, grad_y: Tensor):
    x, low, high, mask = ctx.saved_tensors
    # Where no gain needs a gradient x was not saved; the filter being linear, any x gives the same gradient.
    x = torch.zeros_like(grad_y) if x is None else x
    grads = registry.double_backward_via_reference(
        lambda x, low, high: reference.frequency_filter(x, low, high, mask=mask, is_causal=ctx.is_causal),
        (x, low, high),
        (grad_y,),
    )
    return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)), None, None


registry.register(
    registry.Op(
        schema="frequency_norms(Tensor x, Tensor? mask) -> (Tensor low, Tensor high)",
        fake=_fake_norms,
        triton="frequency.launch.norms",
        save=_save_norms,
        backward=_norms_backward,
        reference=lambda x, mask: tuple(reference.frequency_norms(x, mask=mask)),
        vmap=registry.Vmap(batched=(0, 1)),
    )
)
# addend: another gradient of x, contiguous and of its dtype, that is added.
registry.register(
    registry.Op(
        schema="frequency_norms_backward(Tensor grad_low, Tensor grad_high, Tensor x, Tensor low, Tensor high,"
        " Tensor? mask, Tensor? addend) -> Tensor grad_x",
        fake=_fake_norms_backward,
        triton="frequency.launch.norms_backward",
    )
)
registry.register(
    registry.Op(
        schema="frequency_filter(Tensor x, Tensor low, Tensor high, Tensor? mask, bool is_causal) -> Tensor y",
        fake=_fake_filter,
        triton="frequency.launch.filter",
        save=_save_filter,
        backward=_filter_backward,
        reference=lambda x, low, high, mask, is_causal: reference.frequency_filter(
            x, low, high, mask=mask, is_causal=is_causal
        ),
        vmap=registry.Vmap(batched=(0, 3)),
    )
)
registry.register(
    registry.Op(
        # Without x the gains' gradients are not wanted, without need_x the tokens' is not: what is not wanted comes
        # back empty.
        schema="frequency_filter_backward(Tensor grad_y, Tensor? x, Tensor low, Tensor high, Tensor? mask,"
        " bool is_causal, bool need_x) -> (Tensor grad_x, Tensor grad_low, Tensor grad_high)",
        fake=_fake_filter_backward,
        triton="frequency.launch.filter_backward",
    )
)
