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

from overtone import _transforms as transforms
from overtone import _validate as validate
from overtone import reference
from overtone.backends import device_backend, select
from overtone.ops import registry
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

    Half-precision inputs are multiplied and summed in float32, and y is rounded once, at the end; the Triton kernels,
    and on CPUs with AMX those of bfloat16, also round the softmax and the heads on their way into matrix instructions,
    as PyTorch's fused attention does.
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
        backend: "reference", "cpu", "triton" (heads up to 128 wide), or None to choose.

    Returns:
        y [B, N, E] in query's dtype, or (y, FrequencyNorms); differentiable in every floating-point argument.
    """
    return _attend(
        (query, key, value), None, eigenvalues, basis, residual=residual, attn_mask=attn_mask, is_causal=is_causal,
        scale=scale, head_gain=head_gain, return_norms=return_norms, backend=backend,
    )  # fmt: skip


def spectral_attention_packed(
    qkv: Tensor, eigenvalues: Tensor, basis: Tensor, **options: Any
) -> Tensor | tuple[Tensor, FrequencyNorms]:
    """spectral_attention of a packed qkv [B, N, 3, H, D]; its gradient is made in one piece, with no copy.

    Three views of a packed tensor get a gradient each, which autograd then has to copy together.
    """
    qkv = _autocast(qkv)
    if not isinstance(qkv, Tensor) or qkv.dim() != 5 or qkv.shape[2] != 3:
        got = list(qkv.shape) if isinstance(qkv, Tensor) else type(qkv).__name__
        raise ValueError(f"{_NAME}: qkv must be [B, N, 3, H, D], got {got}")
    return _attend(heads_of(qkv), qkv, eigenvalues, basis, **options)


def heads_of(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [B, H, N, D] of a packed qkv [B, N, 3, H, D]: views."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def _attend(
    heads_in, qkv, eigenvalues, basis, *, residual=None, attn_mask=None, is_causal=False, scale=None, head_gain=None,
    return_norms=False, backend=None,
):  # fmt: skip
    """What both functions do, on query, key and value; qkv is what these are views of, or None."""
    query, key, value, basis, residual = (_autocast(x) for x in (*heads_in, basis, residual))
    query = validate.heads(_NAME, "query", query)
    batch, heads, length, width = query.shape
    key = validate.matching(_NAME, "key", key, (batch, heads, "M", width), query)
    value = validate.matching(_NAME, "value", value, tuple(key.shape), query)
    eigenvalues = validate.matching(_NAME, "eigenvalues", eigenvalues, (heads * width,), query, wide=True)
    basis = validate.matching(_NAME, "basis", basis, (heads * width, "E"), query)
    if residual is not None:
        residual = validate.matching(_NAME, "residual", residual, (batch, length, basis.shape[1]), query)
    attn_mask = validate.attention_mask(_NAME, attn_mask, query, key)
    is_causal = validate.flag(_NAME, "is_causal", is_causal)
    scale = validate.optional_number(_NAME, "scale", scale)
    if head_gain is not None:
        head_gain = validate.matching(_NAME, "head_gain", head_gain, (heads,), query, wide=True)
    return_norms = validate.flag(_NAME, "return_norms", return_norms)
    if select(_NAME, backend, query) == "reference":
        with _float32_products(query):
            return reference.spectral_attention(
                query, key, value, eigenvalues, basis, residual=residual, attn_mask=attn_mask, is_causal=is_causal,
                scale=scale, head_gain=head_gain, return_norms=return_norms,
            )  # fmt: skip
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    call = _Call(query, key, value, basis, _kernel_mask(attn_mask, query, key, is_causal), is_causal, scale, qkv)
    eigenvalues = eigenvalues.to(validate.statistics_dtype(query.dtype)).contiguous()
    with transforms.without_autocast(query):
        if head_gain is None:
            y, norms = call.attend(eigenvalues, residual, return_norms)
        else:
            y, norms = call.attend_with_gain(eigenvalues, head_gain, residual, return_norms)
    return (y, norms) if return_norms else y


class _Call(NamedTuple):
    """What the kernel is called with, whatever the eigenvalues."""

    query: Tensor
    key: Tensor
    value: Tensor
    basis: Tensor
    attn_mask: Tensor | None
    is_causal: bool
    scale: float
    qkv: Tensor | None  # what query, key and value are views of, if the gradient is to be one of it

    def attend(self, eigenvalues: Tensor, residual: Tensor | None, return_norms: bool) -> tuple[Tensor, FrequencyNorms]:
        """y and its norms, which are empty where they are not wanted."""
        y, low, high, *_ = self._run(eigenvalues, residual, need_norms=return_norms)
        return y, FrequencyNorms(low, high)

    def attend_with_gain(
        self, eigenvalues: Tensor, head_gain: Tensor, residual: Tensor | None, return_norms: bool
    ) -> tuple[Tensor, FrequencyNorms]:
        """AttnScale: (1 + ω_h) A_h − ω_h Π in place of A_h, by linearity: a part with A, and a part with Π."""
        gain = head_gain.to(eigenvalues.dtype).repeat_interleave(self.query.shape[-1])
        wide = self._unrounded(eigenvalues * (1 + gain)) - self._mean_of_values(eigenvalues * gain)
        if residual is not None:
            wide = wide + residual
        nothing = wide.new_empty(0)
        norms = torch.ops.overtone.frequency_norms(wide, None) if return_norms else (nothing, nothing)
        return wide.to(self.query.dtype), FrequencyNorms(*norms)

    def _unrounded(self, eigenvalues: Tensor) -> Tensor:
        """y without a residual, before it is rounded."""
        y, _, _, wide, *_ = self._run(eigenvalues, None, need_wide=True)
        return y if y.dtype == eigenvalues.dtype else wide

    def _run(
        self, eigenvalues: Tensor, residual: Tensor | None, *, need_norms: bool = False, need_wide: bool = False
    ) -> tuple[Tensor, ...]:
        given = (self.query, self.key, self.value) if self.qkv is None else (self.qkv,)
        op = torch.ops.overtone.spectral_attention if self.qkv is None else torch.ops.overtone.spectral_attention_packed
        inputs = (*given, eigenvalues, self.basis, residual, self.attn_mask)
        need_backward = transforms.needs_gradient(*inputs)
        # The norms' gradient is taken at y before rounding.
        need_wide = need_wide or (need_norms and need_backward and not _runs_on_triton(self.query))
        return op(*inputs, self.is_causal, self.scale, need_norms, need_wide, need_backward)

    def _mean_of_values(self, eigenvalues: Tensor) -> Tensor:
        """concat_h(Π V_h) diag(eigenvalues) U, where Π averages over the keys that take part in the row."""
        if self.attn_mask is None and not self.is_causal:
            total = self.value.to(eigenvalues.dtype).sum(2).flatten(1)  # [B, H·D], the same for every row
            mean = total / max(self.value.shape[2], 1)  # without keys zero, as where all are masked
            return ((mean * eigenvalues) @ self.basis.to(eigenvalues.dtype))[:, None, :]
        mask = self.attn_mask
        if mask is not None and mask.dtype != torch.bool:
            mask = mask != -math.inf
        # Equal logits: the mean.
        uniform = self._replace(query=torch.zeros_like(self.query), attn_mask=mask, qkv=None)
        return uniform._unrounded(eigenvalues)


def _runs_on_triton(query: Tensor) -> bool:
    """Memory traffic is what GPUs are short of: there heads, grad_y and the norms' gradient are in query's dtype."""
    return device_backend(query) == "triton"


def _kernel_mask(attn_mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool) -> Tensor | None:
    """The mask at full shape (strides 0 where it is broadcast): bool, or a bias of the statistics' dtype."""
    if attn_mask is None:
        return None
    if attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.to(validate.statistics_dtype(query.dtype))
        if _runs_on_triton(query):
            attn_mask = _lowered_bias(attn_mask, is_causal, query.shape[2])
    return attn_mask.expand(*query.shape[:3], key.shape[2])


def _lowered_bias(bias: Tensor, is_causal: bool, queries: int) -> Tensor:
    """The bias less the largest element of every row that the row sees, which softmax does not see.

    A large bias times log2(e), as Triton's kernels take it, would be rounded as coarsely as it is large. The CPU's do
    this on the way; on GPUs natural logits made some kernels spill.
    """
    bias = torch.atleast_1d(bias)
    if 0 in (bias.shape[-1], queries):
        return bias
    seen = bias.detach()
    if is_causal:
        future = torch.ones(queries, seen.shape[-1], dtype=torch.bool, device=seen.device).triu(1)
        seen = seen.masked_fill(future, -math.inf)
    largest = seen.amax(-1, keepdim=True)
    return bias - largest.masked_fill(largest == -math.inf, 0)


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


def _fake(
    query, key, value, eigenvalues, basis, residual, attn_mask, is_causal, scale, need_norms, need_wide, need_backward
):
    batch, heads, length, width = query.shape
    dtype = validate.statistics_dtype(query.dtype)

    def empty(wanted: bool, *shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return query.new_empty(shape if wanted else (0,), dtype=dtype)

    y = query.new_empty(batch, length, basis.shape[1])
    return (
        y,
        empty(need_norms, batch),
        empty(need_norms, batch),
        empty(need_wide and query.dtype != dtype, *y.shape),
        empty(need_backward, batch, length, heads * width, dtype=query.dtype if _runs_on_triton(query) else dtype),
        empty(need_backward, batch, heads, length, 2),
    )


def _fake_heads(x: Tensor, is_wanted: int) -> Tensor:
    """A gradient [B, H, N, D]; the CPU's is a view of [B, N, H, D], in which projections take it without a copy."""
    if not is_wanted:
        return x.new_empty(0)
    if _runs_on_triton(x):
        return x.new_empty(x.shape)
    batch, heads, tokens, width = x.shape
    return x.new_empty(batch, tokens, heads, width).transpose(1, 2)


_NEEDS = ("query", "key", "value", "eigenvalues", "basis", "attn_mask")


def _fake_backward(
    grad_y, grad_low, grad_high, y, low, high, query, key, value, eigenvalues, basis, attn_mask, is_causal, scale,
    heads, softmax_rows, needs,
):  # fmt: skip
    dtype = eigenvalues.dtype
    results = (
        (eigenvalues.shape, dtype),
        (basis.shape, dtype),
        ((*query.shape[:3], key.shape[2]), dtype),
    )
    grads = tuple(
        query.new_empty(shape if needs >> bit & 1 else (0,), dtype=dtype)
        for bit, (shape, dtype) in enumerate(results, start=3)
    )
    heads_grads = (_fake_heads(x, needs >> bit & 1) for bit, x in enumerate((query, key, value)))
    return *heads_grads, *grads, y.new_empty((0,) if grad_low is None else y.shape)


def _packed_forward(qkv, *rest):
    return torch.ops.overtone.spectral_attention(*heads_of(qkv), *rest)


def _fake_packed_backward(grad_y, grad_low, grad_high, y, low, high, qkv, *rest):
    heads = heads_of(qkv)
    _, _, _, *others = _fake_backward(grad_y, grad_low, grad_high, y, low, high, *heads, *rest)
    needs = rest[-1]
    return qkv.new_empty(qkv.shape if needs & 7 else (0,)), *others


# need_backward: whoever wants a gradient must ask for what backward needs. What is not wanted comes back empty, and so
# does wide_y (y before rounding) where y has the statistics' dtype.
registry.define(
    "spectral_attention(Tensor query, Tensor key, Tensor value, Tensor eigenvalues, Tensor basis, Tensor? residual,"
    " Tensor? attn_mask, bool is_causal, float scale, bool need_norms, bool need_wide, bool need_backward)"
    " -> (Tensor y, Tensor low, Tensor high, Tensor wide_y, Tensor heads, Tensor softmax_rows)",
    fake=_fake,
    triton="attention.launch.forward",
)
# `needs` has a bit for each of _NEEDS; what is not needed comes back empty. grad_y has the statistics' dtype, and y is
# that before rounding; on Triton grad_y may have any dtype and y is rounded. With the norms' gradients (both or none)
# total_grad is all of ∂L/∂y.
registry.define(
    "spectral_attention_backward(Tensor? grad_y, Tensor? grad_low, Tensor? grad_high, Tensor y, Tensor low,"
    " Tensor high, Tensor query, Tensor key, Tensor value, Tensor eigenvalues, Tensor basis, Tensor? attn_mask,"
    " bool is_causal, float scale, Tensor heads, Tensor softmax_rows, int needs)"
    " -> (Tensor query, Tensor key, Tensor value, Tensor eigenvalues, Tensor basis, Tensor logits, Tensor total_grad)",
    fake=_fake_backward,
    triton="attention.launch.backward",
)

# The same with one tensor qkv [B, N, 3, H, D] in place of query, key and value, and one gradient of it. `needs` is as
# above, its first three bits equal.
registry.define(
    "spectral_attention_packed(Tensor qkv, Tensor eigenvalues, Tensor basis, Tensor? residual, Tensor? attn_mask,"
    " bool is_causal, float scale, bool need_norms, bool need_wide, bool need_backward)"
    " -> (Tensor y, Tensor low, Tensor high, Tensor wide_y, Tensor heads, Tensor softmax_rows)",
    fake=lambda qkv, *rest: _fake(*heads_of(qkv), *rest),
)
registry.LIBRARY.impl("spectral_attention_packed", _packed_forward, "CompositeExplicitAutograd")
registry.define(
    "spectral_attention_packed_backward(Tensor? grad_y, Tensor? grad_low, Tensor? grad_high, Tensor y, Tensor low,"
    " Tensor high, Tensor qkv, Tensor eigenvalues, Tensor basis, Tensor? attn_mask, bool is_causal, float scale,"
    " Tensor heads, Tensor softmax_rows, int needs)"
    " -> (Tensor qkv, Tensor eigenvalues, Tensor basis, Tensor logits, Tensor total_grad)",
    fake=_fake_packed_backward,
    triton="attention.launch.packed_backward",
)


def _save(ctx, inputs, output) -> None:
    *given, eigenvalues, basis, residual, attn_mask, is_causal, scale, need_norms, _, _ = inputs
    ctx.is_packed = len(given) == 1
    y, low, high, wide_y, heads, softmax_rows = output
    ctx.is_causal, ctx.scale = is_causal, scale
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.has_wide = wide_y.shape == y.shape
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(heads, softmax_rows)
    # Only the norms' gradient reads y, and only its own gradient the residual.
    unrounded = (wide_y if ctx.has_wide else y) if need_norms else None
    residual = residual if need_norms else None
    ctx.save_for_backward(*given, eigenvalues, basis, residual, attn_mask, unrounded, low, high, heads, softmax_rows)


def _backward(ctx, grad_y, grad_low, grad_high, grad_wide, _grad_heads, _grad_softmax_rows):
    *given, eigenvalues, basis, _, attn_mask, y, low, high, heads, softmax_rows = ctx.saved_tensors
    dtype = eigenvalues.dtype
    grad_wide = grad_wide if ctx.has_wide else None
    grads = [g for g in (grad_y, grad_wide) if g is not None]
    if len(grads) == 2 or not _runs_on_triton(given[0]):
        grads = [g.to(dtype) for g in grads]
    grad_y = sum(grads[1:], grads[0]).contiguous() if grads else None
    has_norms = y is not None and (grad_low is not None or grad_high is not None)
    if grad_y is None and not has_norms:
        return (None,) * len(ctx.needs_input_grad)
    if has_norms:
        grad_low, grad_high = (torch.zeros_like(low) if g is None else g.contiguous() for g in (grad_low, grad_high))
    else:
        y, grad_low, grad_high = low, None, None  # y is not read
    if transforms.open_for(grad_y, grad_low, grad_high):
        return _differentiable_backward(ctx, None if grad_y is None else grad_y.to(dtype), grad_low, grad_high)
    *given_needs, lam, u, r, m = ctx.needs_input_grad[:-5]
    wanted = (*given_needs, lam, u, m)
    bits = (*(given_needs * 3 if ctx.is_packed else given_needs), lam, u, m)
    ops = torch.ops.overtone
    *results, total = (ops.spectral_attention_packed_backward if ctx.is_packed else ops.spectral_attention_backward)(
        grad_y, grad_low, grad_high, y, low, high, *given, eigenvalues, basis, attn_mask, ctx.is_causal,
        ctx.scale, heads, softmax_rows, sum(1 << bit for bit, need in enumerate(bits) if need),
    )  # fmt: skip
    *dgiven, dlam, du, dm = (g if need else None for g, need in zip(results, wanted, strict=True))
    du = None if du is None else du.to(basis.dtype)
    dr = (total if has_norms else grad_y).to(ctx.residual_dtype) if r else None
    return *dgiven, dlam, du, dr, dm, *(None,) * 5


def _differentiable_backward(ctx, grad_y, grad_low, grad_high) -> tuple[Tensor | None, ...]:
    *given, eigenvalues, basis, residual, attn_mask, _, _, _, _, _ = ctx.saved_tensors
    given_names = ("qkv",) if ctx.is_packed else ("query", "key", "value")
    named = {**dict(zip(given_names, given, strict=True)), "eigenvalues": eigenvalues, "basis": basis}
    if residual is not None:
        named["residual"] = residual
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        named["attn_mask"] = attn_mask
    fixed = {"attn_mask": attn_mask, "is_causal": ctx.is_causal, "scale": ctx.scale}

    def outputs(*inputs):
        wide = {name: x.to(eigenvalues.dtype) for name, x in zip(named, inputs, strict=True)}
        if ctx.is_packed:
            wide |= zip(("query", "key", "value"), heads_of(wide.pop("qkv")), strict=True)
        y, norms = reference.spectral_attention(**{**fixed, **wide}, return_norms=True)
        return tuple(x for x, g in zip((y, *norms), (grad_y, grad_low, grad_high), strict=True) if g is not None)

    grads = tuple(g for g in (grad_y, grad_low, grad_high) if g is not None)
    results = dict(zip(named, registry.differentiable_gradient(outputs, tuple(named.values()), grads), strict=True))
    if ctx.residual_dtype is not None and residual is None:
        results["residual"] = grad_y.to(ctx.residual_dtype)
    names = (*given_names, "eigenvalues", "basis", "residual", "attn_mask")
    return *(results.get(name) for name in names), *(None,) * 5


def _by_reference(
    query, key, value, eigenvalues, basis, residual, attn_mask, is_causal, scale, need_norms, need_wide, need_backward
):
    wide = tuple(None if x is None else x.to(eigenvalues.dtype) for x in (query, key, value, basis, residual))
    wide_query, key, value, basis, residual = wide
    y = reference.spectral_attention(
        wide_query, key, value, eigenvalues, basis, residual=residual, attn_mask=attn_mask, is_causal=is_causal,
        scale=scale,
    )  # fmt: skip
    nothing = y.new_empty(0)
    norms = reference.frequency_norms(y) if need_norms else (nothing, nothing)
    wide_y = y if need_wide and query.dtype != y.dtype else nothing
    return y.to(query.dtype), *norms, wide_y, nothing, nothing


registry.differentiable(
    "spectral_attention",
    setup=_save,
    backward=_backward,
    reference=_by_reference,
    batched=(0, 1, 2, 5, 6),
    merges=True,
    contiguous=(3,),
)
registry.differentiable(
    "spectral_attention_packed",
    setup=_save,
    backward=_backward,
    reference=lambda qkv, *rest: _by_reference(*heads_of(qkv), *rest),
    batched=(0, 3, 4),
    merges=True,
    contiguous=(1,),
)
