"""spectral_attention: public function → contract → kernel.

The kernel returns y, y before rounding (where that is wanted and differs), and what backward needs: the heads' outputs
O, and maximum and sum of every softmax. With G = ∂L/∂y (MATH.md §2):
    ∂U = diag(λ) Oᵀ G     ∂λ = Σ_tokens O ⊙ G Uᵀ     ∂O = (G Uᵀ) diag(λ)     ∂R = G     and attention's own from ∂O
A gradient of a gradient is taken through the reference.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overtone import reference
from overtone.backends import device_backend, select
from overtone.ops import checks, library
from overtone.types import FrequencyNorms

__all__ = ["spectral_attention"]


def spectral_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    eigenvalues: Tensor,
    basis: Tensor,
    *,
    residual: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    head_gain: Tensor | None = None,
    return_norms: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, FrequencyNorms]:
    """Attention fused with a spectral projection: residual + concat_h(A_h V_h) · diag(eigenvalues) · basis.

    Half-precision inputs are multiplied and summed in float32, and y is rounded once, at the end.
    Under autocast query, key, value, basis and residual are cast to its dtype; eigenvalues and head_gain are not.

    Args:
        query: [B, H, N, D], any strides.
        key, value: [B, H, M, D] in query's dtype; finite, also where they are masked.
        eigenvalues: [H·D], one per row of basis, in query's dtype or float32.
        basis: [H·D, E] in query's dtype.
        residual: [B, N, E] in query's dtype; None adds nothing.
        attn_mask: broadcastable to [B, H, N, M]; bool (True = the key takes part) or float (added to the logits, −inf =
            takes no part). A row in which no key takes part is zero, before the residual.
        is_causal: row i sees keys 0..i only, together with attn_mask if there is one.
        scale: of the logits; None is 1/√D.
        head_gain: [H], AttnScale's ω, in query's dtype or float32: A_h becomes (1 + ω_h)·A_h − ω_h·Π, where Π averages
            over the keys that take part in the row.
        return_norms: return FrequencyNorms of y too, each [B], float32 (float64), taken before y is rounded.
        backend: "reference", "cpu", "triton" (head widths to 128), or None to choose.

    Returns:
        y [B, N, E] in query's dtype, or (y, FrequencyNorms); differentiable in every floating-point argument.
    """
    query, key, value, basis, residual = (_autocast(x) for x in (query, key, value, basis, residual))
    query = checks.heads(_NAME, "query", query)
    batch, heads, length, width = query.shape
    key = checks.matching(_NAME, "key", key, (batch, heads, "M", width), query)
    value = checks.matching(_NAME, "value", value, tuple(key.shape), query)
    eigenvalues = checks.matching(_NAME, "eigenvalues", eigenvalues, (heads * width,), query, wide=True)
    basis = checks.matching(_NAME, "basis", basis, (heads * width, "E"), query)
    if residual is not None:
        residual = checks.matching(_NAME, "residual", residual, (batch, length, basis.shape[1]), query)
    attn_mask = checks.attention_mask(_NAME, attn_mask, query, key)
    is_causal = checks.flag(_NAME, "is_causal", is_causal)
    scale = checks.optional_number(_NAME, "scale", scale)
    if head_gain is not None:
        head_gain = checks.matching(_NAME, "head_gain", head_gain, (heads,), query, wide=True)
    return_norms = checks.flag(_NAME, "return_norms", return_norms)
    if select(_NAME, backend, query) == "reference":
        with _float32_products(query):
            return reference.spectral_attention(
                query, key, value, eigenvalues, basis, residual=residual, attn_mask=attn_mask, is_causal=is_causal,
                scale=scale, head_gain=head_gain, return_norms=return_norms,
            )  # fmt: skip
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    call = _Call(query, key, value, basis, _kernel_mask(attn_mask, query, key), is_causal, scale)
    eigenvalues = eigenvalues.to(checks.statistics_dtype(query.dtype))
    if head_gain is None:
        y, wide = call.attend(eigenvalues, residual, need_wide=return_norms)
    else:
        y, wide = call.attend_with_gain(eigenvalues, head_gain, residual)
    return (y, FrequencyNorms(*torch.ops.overtone.frequency_norms(wide, None))) if return_norms else y


class _Call(NamedTuple):
    """What the kernel is called with, whatever the eigenvalues."""

    query: Tensor
    key: Tensor
    value: Tensor
    basis: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float

    def attend(self, eigenvalues: Tensor, residual: Tensor | None, *, need_wide: bool) -> tuple[Tensor, Tensor]:
        """y, and y before it is rounded (the same tensor where nothing is rounded)."""
        y, wide, _, _ = torch.ops.overtone.spectral_attention(
            self.query, self.key, self.value, eigenvalues, self.basis, residual, self.attn_mask, self.is_causal,
            self.scale, need_wide,
        )  # fmt: skip
        return y, wide if need_wide and y.dtype != eigenvalues.dtype else y

    def attend_with_gain(
        self, eigenvalues: Tensor, head_gain: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """AttnScale: (1 + ω_h) A_h − ω_h Π in place of A_h, by linearity: a part with A, and a part with Π."""
        gain = head_gain.to(eigenvalues.dtype).repeat_interleave(self.query.shape[-1])
        _, wide = self.attend(eigenvalues * (1 + gain), None, need_wide=True)
        wide = wide - self._mean_of_values(eigenvalues * gain)
        if residual is not None:
            wide = wide + residual
        return wide.to(self.query.dtype), wide

    def _mean_of_values(self, eigenvalues: Tensor) -> Tensor:
        """concat_h(Π V_h) diag(eigenvalues) U, where Π averages over the keys that take part in the row."""
        if self.attn_mask is None and not self.is_causal:
            mean = self.value.to(eigenvalues.dtype).mean(2).flatten(1)  # [B, H·D], the same for every row
            return ((mean * eigenvalues) @ self.basis.to(eigenvalues.dtype))[:, None, :]
        mask = self.attn_mask
        if mask is not None and mask.dtype != torch.bool:
            mask = mask != -math.inf
        uniform = self._replace(query=torch.zeros_like(self.query), attn_mask=mask)  # equal logits: the mean
        return uniform.attend(eigenvalues, None, need_wide=True)[1]


def _kernel_mask(attn_mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask at full shape (strides 0 where it is broadcast): bool, or a bias of the statistics' dtype."""
    if attn_mask is None:
        return None
    if attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.to(checks.statistics_dtype(query.dtype))
    return attn_mask.expand(*query.shape[:3], key.shape[2])


_NAME = "spectral_attention"


def _autocast(x: Any) -> Any:
    """A tensor in autocast's dtype where that is on; float64 stays, as in autocast itself."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return x
    device = x.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _float32_products(tensor: Tensor) -> AbstractContextManager:
    """Keeps autocast from narrowing what the reference widened."""
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def _fake(query, key, value, eigenvalues, basis, residual, attn_mask, is_causal, scale, need_wide):
    batch, heads, length, width = query.shape
    dtype = checks.statistics_dtype(query.dtype)
    y = query.new_empty(batch, length, basis.shape[1])
    wide = query.new_empty(y.shape if need_wide and query.dtype != dtype else (0,), dtype=dtype)
    return (
        y,
        wide,
        query.new_empty((batch, length, heads * width), dtype=query.dtype if _runs_on_triton(query) else dtype),
        query.new_empty((batch, heads, length, 2), dtype=dtype),
    )


def _runs_on_triton(query: Tensor) -> bool:
    """Memory is what GPUs are short of: there the heads' outputs are kept, and grad_y is taken, in query's dtype."""
    return device_backend(query) == "triton"


_NEEDS = ("query", "key", "value", "eigenvalues", "basis", "attn_mask")


def _fake_backward(
    grad_y, query, key, value, eigenvalues, basis, attn_mask, is_causal, scale, heads, softmax_rows, needs
):
    dtype = eigenvalues.dtype
    logits = (*query.shape[:3], key.shape[2])
    results = (
        (query.shape, query.dtype),
        (key.shape, query.dtype),
        (value.shape, query.dtype),
        (eigenvalues.shape, dtype),
        (basis.shape, dtype),
        (logits, dtype),
    )
    return tuple(
        query.new_empty(shape if needs >> bit & 1 else (0,), dtype=dtype) for bit, (shape, dtype) in enumerate(results)
    )


library.define(
    "spectral_attention(Tensor query, Tensor key, Tensor value, Tensor eigenvalues, Tensor basis, Tensor? residual,"
    " Tensor? attn_mask, bool is_causal, float scale, bool need_wide)"
    " -> (Tensor y, Tensor wide_y, Tensor heads, Tensor softmax_rows)",
    fake=_fake,
    triton="attention.forward",
)
# `needs` has a bit for each of _NEEDS; what is not needed comes back empty. grad_y has the statistics' dtype, or on
# Triton any.
library.define(
    "spectral_attention_backward(Tensor grad_y, Tensor query, Tensor key, Tensor value, Tensor eigenvalues,"
    " Tensor basis, Tensor? attn_mask, bool is_causal, float scale, Tensor heads, Tensor softmax_rows, int needs)"
    " -> (Tensor query, Tensor key, Tensor value, Tensor eigenvalues, Tensor basis, Tensor logits)",
    fake=_fake_backward,
    triton="attention.backward",
)


def _save(ctx, inputs, output) -> None:
    query, key, value, eigenvalues, basis, residual, attn_mask, is_causal, scale, need_wide = inputs
    _, _, heads, softmax_rows = output
    ctx.is_causal, ctx.scale = is_causal, scale
    ctx.has_wide = need_wide and query.dtype != eigenvalues.dtype
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, eigenvalues, basis, attn_mask, heads, softmax_rows)


def _backward(ctx, grad_y, grad_wide, _grad_heads, _grad_softmax_rows):
    query, key, value, eigenvalues, basis, attn_mask, heads, softmax_rows = ctx.saved_tensors
    dtype = eigenvalues.dtype
    grad_wide = grad_wide if ctx.has_wide else None
    grads = [g for g in (grad_y, grad_wide) if g is not None]
    if not grads:
        return (None,) * 10
    grad = (grads[0] if len(grads) == 1 else grads[0].to(dtype) + grads[1]).contiguous()
    q, k, v, lam, u, r, m = ctx.needs_input_grad[:7]
    wanted = (q, k, v, lam, u, m)
    if torch.is_grad_enabled():
        results = _differentiable_backward(ctx, grad.to(dtype))
    else:
        grad = grad if _runs_on_triton(query) else grad.to(dtype)
        needs = sum(1 << bit for bit, need in enumerate(wanted) if need)
        results = torch.ops.overtone.spectral_attention_backward(
            grad, query, key, value, eigenvalues, basis, attn_mask, ctx.is_causal, ctx.scale, heads, softmax_rows, needs
        )
    dq, dk, dv, dlam, du, dm = (g if need else None for g, need in zip(results, wanted, strict=True))
    du = None if du is None else du.to(basis.dtype)
    dr = grad.to(ctx.residual_dtype) if r else None
    return dq, dk, dv, dlam, du, dr, dm, None, None, None


def _differentiable_backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, eigenvalues, basis, attn_mask, _, _ = ctx.saved_tensors
    has_bias = attn_mask is not None and attn_mask.dtype != torch.bool

    def wide_attention(query, key, value, eigenvalues, basis, *bias):
        mask = bias[0] if has_bias else attn_mask
        wide = (x.to(grad.dtype) for x in (query, key, value, eigenvalues, basis))
        return reference.spectral_attention(*wide, attn_mask=mask, is_causal=ctx.is_causal, scale=ctx.scale)

    inputs = (query, key, value, eigenvalues, basis, *([attn_mask] if has_bias else []))
    results = library.differentiable_gradient(wide_attention, inputs, (grad,))
    return results if has_bias else (*results, None)


library.differentiable("spectral_attention", setup=_save, backward=_backward)
