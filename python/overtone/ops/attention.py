"""spectral_attention: public function → schema → kernel.

    O_h = gain_h · A_h V_h + addend_h        y = residual + sample_scale_b · (concat_h(O_h) · weight + bias)

weight = diag(λ) U is made here, in plain PyTorch, so ∂U and ∂λ are autograd's. The kernel returns y, and what backward
needs: O, and maximum and 1 / sum of every softmax row. With G = sample_scale ∂L/∂y (MATH.md §2):
    ∂weight = Oᵀ G     ∂O = G weightᵀ     ∂addend = ∂O     ∂bias = Σ_tokens G     ∂residual = ∂L/∂y
and attention's own gradients from ∂O. The gradient of the norms of y is frequency_norms_backward's.
A gradient of a gradient is taken through the reference.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overtone import _transforms as transforms
from overtone import _validate as validate
from overtone._precision import autocast, autocast_disabled
from overtone.backends import default_backend, select
from overtone.ops import registry
from overtone.reference.attention import folded_attention as reference_attention
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
    gain: Tensor | None = None,
    addend: Tensor | None = None,
    bias: Tensor | None = None,
    sample_scale: Tensor | None = None,
    return_norms: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, FrequencyNorms]:
    """Attention fused with a spectral projection.

    residual + sample_scale · (concat_h(O_h) · diag(eigenvalues) · basis + bias), where O_h = gain_h A_h V_h + addend_h.

    bf16 and fp16 inputs are multiplied and summed in float32, and y is rounded once, at the end; the Triton kernels,
    and on CPUs with AMX those of bf16, also round the softmax, the heads and diag(eigenvalues) · basis on their way
    into matrix instructions, as PyTorch's fused attention does.
    Under autocast query, key and value are cast to its dtype, and nothing else: with a float32 residual y is float32.

    Args:
        query: [B, H, N, D], any strides.
        key, value: [B, H, M, D] in query's dtype; finite, also where they are masked.
        eigenvalues: [H·D], one per row of basis.
        basis: [H·D, E]; this and every tensor below is in query's dtype or float32 (float64 for float64 queries).
        residual: [B, N, E]; None adds nothing.
        attn_mask: broadcastable to [B, H, N, M]; bool (True = attend) or float (added to the logits, −inf = masked). A
            row with every key masked has A V = 0.
        is_causal: row i sees keys 0..i only, together with attn_mask if there is one.
        scale: of the logits; None is 1/√D.
        head_gain: [H], AttnScale's ω: A_h becomes (1 + ω_h)·A_h − ω_h·Π, where Π averages over the keys that the row
            may attend to.
        gain: [H], multiplies the output A_h V_h of a head.
        addend: broadcastable to [B, H, N, D], added to the heads' outputs.
        bias: [E], added to the projection.
        sample_scale: [B], multiplies what is added to the residual (stochastic depth); it gets no gradient.
        return_norms: return FrequencyNorms of y too, each [B], float32 (float64), taken before y is rounded.
        backend: "reference", "cpu", "triton" (heads up to 128 wide), or None to choose.

    Returns:
        y [B, N, E] in the wider of query's and residual's dtypes, or (y, FrequencyNorms); differentiable in every
        floating-point argument but sample_scale.
    """
    qkv = QKV(*(autocast(x) for x in (query, key, value)))
    return _attend_with_spectrum(
        qkv, eigenvalues, basis, residual=residual, attn_mask=attn_mask, is_causal=is_causal, scale=scale,
        head_gain=head_gain, gain=gain, addend=addend, bias=bias, sample_scale=sample_scale,
        return_norms=return_norms, backend=backend,
    )  # fmt: skip


def spectral_attention_qkvpacked(
    qkv: Tensor, eigenvalues: Tensor, basis: Tensor, **options: Any
) -> Tensor | tuple[Tensor, FrequencyNorms]:
    """spectral_attention of a packed qkv [B, N, 3, H, D]; its gradient is made in one piece, with no copy.

    Three views of a packed tensor get a gradient each, which autograd then has to copy together.
    """
    return _attend_with_spectrum(_packed(qkv), eigenvalues, basis, **options)


def folded_attention(qkv: QKV, weight: Tensor, **options: Any) -> Tensor | tuple[Tensor, FrequencyNorms]:
    """spectral_attention with weight [H·D, E] in place of diag(eigenvalues) · basis; `options` are its keywords."""
    if qkv.packed is not None:
        qkv = _packed(qkv.packed)
    else:
        qkv = QKV(*(autocast(x) for x in qkv[:3]))
    return _attend(_validate_heads(qkv), weight, "weight", **options)


class QKV(NamedTuple):
    """Queries, keys and values of every head, [B, H, N, D] each."""

    query: Tensor
    key: Tensor
    value: Tensor
    packed: Tensor | None = None  #: [B, N, 3, H, D], if the three are views of it: their gradient comes in one piece

    @classmethod
    def unpack(cls, packed: Tensor) -> QKV:
        return cls(*unpack_qkv(packed), packed)

    def operands(self) -> tuple[Tensor, ...]:
        """What the op is given: the packed tensor, or the three."""
        return self[:3] if self.packed is None else (self.packed,)


def unpack_qkv(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [B, H, N, D] of a packed qkv [B, N, 3, H, D]: views."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


class Projection(NamedTuple):
    """From the heads to y."""

    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    sample_scale: Tensor | None


class Masking(NamedTuple):
    """What decides on the softmax, beside queries and keys."""

    attn_mask: Tensor | None  #: [B, H, N, M] (strides 0 where broadcast): bool, or a bias in the accumulate dtype
    is_causal: bool
    scale: float


class Mixing(NamedTuple):
    """What becomes of a head's output A V: gain · A V + addend."""

    gain: Tensor | None
    addend: Tensor | None  #: [B, H, N, D] (strides 0 where broadcast)


_NAME = "spectral_attention"


def _packed(qkv: Any) -> QKV:
    qkv = autocast(qkv)
    if not isinstance(qkv, Tensor) or qkv.dim() != 5 or qkv.shape[2] != 3:
        got = list(qkv.shape) if isinstance(qkv, Tensor) else type(qkv).__name__
        raise ValueError(f"{_NAME}: qkv must be [B, N, 3, H, D], got {got}")
    return QKV.unpack(qkv)


def _validate_heads(qkv: QKV) -> QKV:
    query = validate.heads(_NAME, "query", qkv.query)
    batch, num_heads, _, head_dim = query.shape
    key = validate.matching(_NAME, "key", qkv.key, (batch, num_heads, "M", head_dim), query)
    value = validate.matching(_NAME, "value", qkv.value, tuple(key.shape), query)
    return QKV(query, key, value, qkv.packed)


def _attend_with_spectrum(qkv: QKV, eigenvalues: Tensor, basis: Tensor, **options: Any) -> Any:
    """Folds λ into U: weight = diag(λ) U, in the accumulate dtype."""
    qkv = _validate_heads(qkv)
    inner_dim = qkv.query.shape[1] * qkv.query.shape[3]
    eigenvalues = validate.matching(_NAME, "eigenvalues", eigenvalues, (inner_dim,), qkv.query, wide=True)
    basis = validate.matching(_NAME, "basis", basis, (inner_dim, "E"), qkv.query, wide=True)
    dtype = validate.accumulate_dtype(qkv.query.dtype)
    weight = eigenvalues.to(dtype)[:, None] * basis.to(dtype)
    return _attend(qkv, weight, "basis", **options)


def _attend(
    qkv: QKV, weight: Tensor, weight_name: str, *, residual=None, attn_mask=None, is_causal=False, scale=None,
    head_gain=None, gain=None, addend=None, bias=None, sample_scale=None, return_norms=False, backend=None,
) -> Any:  # fmt: skip
    """What every public function does, on validated query, key and value. The keywords are spectral_attention's."""
    query, key, value = qkv[:3]
    batch, num_heads, q_len, head_dim = query.shape

    def optional(name: str, x: Any, *shape: int) -> Tensor | None:
        return None if x is None else validate.matching(_NAME, name, x, shape, query, wide=True)

    weight = validate.matching(_NAME, weight_name, weight, (num_heads * head_dim, "E"), query, wide=True)
    residual = optional("residual", residual, batch, q_len, weight.shape[1])
    bias = optional("bias", bias, weight.shape[1])
    sample_scale = optional("sample_scale", sample_scale, batch)
    if sample_scale is not None and sample_scale.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{_NAME}: sample_scale: got a tensor that requires a gradient, wanted one that does not")
    head_gain, gain = optional("head_gain", head_gain, num_heads), optional("gain", gain, num_heads)
    addend = validate.broadcastable(_NAME, "addend", addend, tuple(query.shape), query)
    attn_mask = validate.attention_mask(_NAME, attn_mask, query, key)
    is_causal = validate.flag(_NAME, "is_causal", is_causal)
    scale = validate.optional_number(_NAME, "scale", scale)
    return_norms = validate.flag(_NAME, "return_norms", return_norms)
    if select(_NAME, backend, query) == "reference":
        with autocast_disabled(query):
            return reference_attention(
                query, key, value, weight, bias=bias, residual=residual, sample_scale=sample_scale,
                attn_mask=attn_mask, is_causal=is_causal, scale=scale, head_gain=head_gain, gain=gain, addend=addend,
                return_norms=return_norms,
            )  # fmt: skip
    dtype = validate.accumulate_dtype(query.dtype)
    bias, sample_scale, gain = (None if x is None else x.to(dtype).contiguous() for x in (bias, sample_scale, gain))
    scale = head_dim**-0.5 if scale is None else scale
    masking = Masking(_expand_mask(attn_mask, query, key, is_causal), is_causal, scale)
    mixing = Mixing(gain, addend)
    if head_gain is not None:
        mixing = _attn_scale(mixing, head_gain.to(dtype), mean_of_values(value, attn_mask, is_causal, q_len))
    mixing = Mixing(mixing.gain, None if mixing.addend is None else mixing.addend.expand(query.shape))
    return _run(qkv, Projection(weight, bias, residual, sample_scale), masking, mixing, return_norms)


def _attn_scale(mixing: Mixing, omega: Tensor, mean: Tensor) -> Mixing:
    """(1 + ω_h) A_h − ω_h Π in place of A_h: gain · ((1 + ω) A V − ω Π V) + addend."""
    gain = 1 + omega
    if mixing.gain is not None:
        gain, omega = mixing.gain * gain, mixing.gain * omega
    addend = -omega[:, None, None] * mean
    return Mixing(gain, addend if mixing.addend is None else mixing.addend + addend)


def mean_of_values(value: Tensor, attn_mask: Tensor | None, is_causal: bool, q_len: int) -> Tensor:
    """Π V, broadcastable to [B, H, N, D], in the accumulate dtype: the mean over the keys that a row may attend to;
    zero where there are none."""
    value = value.to(validate.accumulate_dtype(value.dtype))
    kv_len = value.shape[2]
    if kv_len == 0 or (attn_mask is None and not is_causal):
        return value.sum(2, keepdim=True) / max(kv_len, 1)
    if attn_mask is None:
        count = torch.arange(1, kv_len + 1, device=value.device, dtype=value.dtype)
        running = value.cumsum(2) / count[:, None]
        # Rows beyond the last key see all of them.
        return running[:, :, :q_len] if q_len <= kv_len else running[:, :, _clamped_rows(q_len, kv_len, value.device)]
    attended = torch.atleast_2d(attn_mask if attn_mask.dtype == torch.bool else attn_mask != -math.inf)
    if is_causal:
        attended = attended & torch.ones(q_len, kv_len, dtype=torch.bool, device=value.device).tril()
    share = attended.expand(*attended.shape[:-1], kv_len).to(value.dtype)
    with autocast_disabled(value):
        return (share @ value) / share.sum(-1, keepdim=True).clamp(min=1)


def _clamped_rows(q_len: int, kv_len: int, device: torch.device) -> Tensor:
    return torch.arange(q_len, device=device).clamp(max=kv_len - 1)


def _run(qkv: QKV, projection: Projection, masking: Masking, mixing: Mixing, return_norms: bool) -> Any:
    """One call of the op, and y rounded where the op was told not to."""
    query, weight, residual = qkv.query, projection.weight, projection.residual
    inputs = (*qkv.operands(), *projection, masking.attn_mask, *mixing)
    save_for_backward = transforms.needs_gradient(*inputs)
    dtype = query.dtype if residual is None else torch.promote_types(query.dtype, residual.dtype)
    # The norms' gradient is taken at y before rounding.
    is_read_back = return_norms and save_for_backward and not _keeps_input_dtype(query)
    return_unrounded = dtype != query.dtype or is_read_back
    ops = torch.ops.overtone
    op = ops.spectral_attention if qkv.packed is None else ops.spectral_attention_qkvpacked
    with transforms.without_autocast(weight):
        y, low, high, *_ = op(*inputs, *masking[1:], return_norms, return_unrounded, save_for_backward)
    y = y.to(dtype)
    return (y, FrequencyNorms(low, high)) if return_norms else y


def _keeps_input_dtype(query: Tensor) -> bool:
    """Memory traffic is what GPUs are short of: there heads, grad_y and the norms' gradient are in query's dtype."""
    return default_backend(query) == "triton"


def _expand_mask(attn_mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool) -> Tensor | None:
    """The mask at full shape (strides 0 where it is broadcast): bool, or a bias of the accumulate dtype."""
    if attn_mask is None:
        return None
    if attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.to(validate.accumulate_dtype(query.dtype))
        if _keeps_input_dtype(query):
            attn_mask = _lowered_bias(attn_mask, is_causal, query.shape[2])
    return attn_mask.expand(*query.shape[:3], key.shape[2])


def _lowered_bias(bias: Tensor, is_causal: bool, q_len: int) -> Tensor:
    """The bias less the largest element of every row that the row sees, which softmax does not see.

    A large bias times log2(e), as Triton's kernels take it, would be rounded as coarsely as it is large. The CPU's do
    this on the way; on GPUs natural logits made some kernels spill.
    """
    bias = torch.atleast_1d(bias)
    if 0 in (bias.shape[-1], q_len):
        return bias
    seen = bias.detach()
    if is_causal:
        future = torch.ones(q_len, seen.shape[-1], dtype=torch.bool, device=seen.device).triu(1)
        seen = seen.masked_fill(future, -math.inf)
    largest = seen.amax(-1, keepdim=True)
    return bias - largest.masked_fill(largest == -math.inf, 0)


_GRADIENTS = ("query", "key", "value", "weight", "attn_mask", "gain", "addend")

# What is not wanted comes back empty. bias, sample_scale and gain are contiguous and of the accumulate dtype; residual,
# addend and weight are of query's or the accumulate dtype, any strides. return_unrounded: y is of the accumulate dtype.
# save_for_backward: whoever wants a gradient must ask for what backward reads.
_FORWARD = (
    "spectral_attention(Tensor query, Tensor key, Tensor value, Tensor weight, Tensor? bias, Tensor? residual,"
    " Tensor? sample_scale, Tensor? attn_mask, Tensor? gain, Tensor? addend, bool is_causal, float scale,"
    " bool return_norms, bool return_unrounded, bool save_for_backward)"
    " -> (Tensor y, Tensor low, Tensor high, Tensor attn_out, Tensor softmax_stats)"
)
# grad_y, sample_scale included, is contiguous and of the accumulate dtype; on Triton it may have any dtype. output_mask
# has a bit for each of _GRADIENTS. The mask's gradient and the addend's are not summed over what was broadcast.
_BACKWARD = (
    "spectral_attention_backward(Tensor grad_y, Tensor query, Tensor key, Tensor value, Tensor weight,"
    " Tensor? attn_mask, Tensor? gain, Tensor? addend, bool is_causal, float scale, Tensor attn_out,"
    " Tensor softmax_stats, int output_mask)"
    " -> (Tensor query, Tensor key, Tensor value, Tensor weight, Tensor attn_mask, Tensor gain, Tensor addend)"
)


def _qkvpacked(schema: str) -> str:
    """The same with one tensor qkv [B, N, 3, H, D], and one gradient of it, in place of query, key and value; the first
    three bits of output_mask are equal."""
    name, arguments = schema.split("(", 1)
    name = f"{name.removesuffix('_backward')}_qkvpacked{'_backward' if name.endswith('_backward') else ''}"
    return f"{name}({arguments}".replace("Tensor query, Tensor key, Tensor value", "Tensor qkv")


def _fake(query, key, value, weight, bias, residual, sample_scale, attn_mask, gain, addend, is_causal, scale,
          return_norms, return_unrounded, save_for_backward):  # fmt: skip
    batch, num_heads, q_len, head_dim = query.shape
    dtype = validate.accumulate_dtype(query.dtype)

    def empty(wanted: bool, *shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return query.new_empty(shape if wanted else (0,), dtype=dtype)

    saved_dtype = query.dtype if _keeps_input_dtype(query) else dtype
    return (
        empty(True, batch, q_len, weight.shape[1], dtype=dtype if return_unrounded else query.dtype),
        empty(return_norms, batch),
        empty(return_norms, batch),
        empty(save_for_backward, batch, q_len, num_heads * head_dim, dtype=saved_dtype),
        empty(save_for_backward, batch, num_heads, q_len, 2),
    )


def _fake_heads(x: Tensor, is_wanted: int) -> Tensor:
    """A gradient [B, H, N, D]; the CPU's is a view of [B, N, H, D], in which projections take it without a copy."""
    if not is_wanted:
        return x.new_empty(0)
    if _keeps_input_dtype(x):
        return x.new_empty(x.shape)
    batch, num_heads, tokens, head_dim = x.shape
    return x.new_empty(batch, tokens, num_heads, head_dim).transpose(1, 2)


def _fake_grad_addend(query: Tensor, is_wanted: int) -> Tensor:
    """∂O, as it comes from the projection: [B, N, H, D]."""
    if not is_wanted:
        return query.new_empty(0, dtype=validate.accumulate_dtype(query.dtype))
    batch, num_heads, q_len, head_dim = query.shape
    dtype = query.dtype if _keeps_input_dtype(query) else validate.accumulate_dtype(query.dtype)
    return query.new_empty(batch, q_len, num_heads, head_dim, dtype=dtype).transpose(1, 2)


def _fake_backward(
    grad_y, query, key, value, weight, attn_mask, gain, addend, is_causal, scale, attn_out, softmax_stats, output_mask
):
    dtype = validate.accumulate_dtype(query.dtype)
    is_wanted = [output_mask >> bit & 1 for bit in range(len(_GRADIENTS))]
    shapes = (weight.shape, (*query.shape[:3], key.shape[2]), query.shape[1:2])
    return (
        *(_fake_heads(x, wanted) for x, wanted in zip((query, key, value), is_wanted[:3], strict=True)),
        *(
            query.new_empty(shape if wanted else (0,), dtype=dtype)
            for shape, wanted in zip(shapes, is_wanted[3:6], strict=True)
        ),
        _fake_grad_addend(query, is_wanted[6]),
    )


def _fake_qkvpacked_backward(grad_y, qkv, *rest):
    _, _, _, *others = _fake_backward(grad_y, *unpack_qkv(qkv), *rest)
    return qkv.new_empty(qkv.shape if rest[-1] & 7 else (0,)), *others


class _Saved(NamedTuple):
    """What backward reads."""

    operands: tuple[Tensor, ...]  # (qkv,) or (query, key, value)
    projection: Projection
    masking: Masking
    mixing: Mixing
    y: Tensor | None  # before rounding where the kernels keep that; only if the norms need a gradient
    norms: FrequencyNorms
    attn_out: Tensor
    softmax_stats: Tensor


def _save(ctx, inputs, output) -> None:
    *operands, weight, bias, residual, sample_scale, attn_mask, gain, addend = inputs[:-5]
    ctx.is_causal, ctx.scale, return_norms, _, _ = inputs[-5:]
    y, low, high, attn_out, softmax_stats = output
    ctx.num_operands = len(operands)
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(attn_out, softmax_stats)
    if not return_norms:  # only the norms' gradient reads y, and only its own gradient the residual
        residual = y = None
    ctx.save_for_backward(
        *operands, weight, bias, residual, sample_scale, attn_mask, gain, addend, y, low, high, attn_out, softmax_stats
    )


def _restore(ctx) -> _Saved:
    tensors = ctx.saved_tensors
    operands, rest = tensors[: ctx.num_operands], tensors[ctx.num_operands :]
    weight, bias, residual, sample_scale, attn_mask, gain, addend, y, low, high, attn_out, softmax_stats = rest
    return _Saved(
        operands, Projection(weight, bias, residual, sample_scale), Masking(attn_mask, ctx.is_causal, ctx.scale),
        Mixing(gain, addend), y, FrequencyNorms(low, high), attn_out, softmax_stats,
    )  # fmt: skip


def _backward(ctx, grad_y, grad_low, grad_high, _grad_attn_out, _grad_softmax_stats):
    saved = _restore(ctx)
    grad_norms = None if saved.y is None or (grad_low is None and grad_high is None) else (grad_low, grad_high)
    if grad_y is None and grad_norms is None:
        return (None,) * len(ctx.needs_input_grad)
    if transforms.open_for(grad_y, grad_low, grad_high):
        return _double_backward(ctx, saved, grad_y, grad_low, grad_high)
    grad = _grad_of_y(saved, grad_y, grad_norms)
    projection, (attn_mask, *causal_and_scale) = saved.projection, saved.masking
    scaled = grad if projection.sample_scale is None else grad * projection.sample_scale.to(grad.dtype)[:, None, None]
    *need_operands, need_weight, need_bias, need_residual, _, need_mask, need_gain, need_addend = _needs(ctx)
    wanted = (*need_operands, need_weight, need_mask, need_gain, need_addend)
    grads = (None,) * len(wanted)
    if any(wanted):
        ops, is_packed = torch.ops.overtone, len(need_operands) == 1
        op = ops.spectral_attention_qkvpacked_backward if is_packed else ops.spectral_attention_backward
        bits = (*need_operands * 2, *wanted) if is_packed else wanted
        output_mask = sum(1 << bit for bit, need in enumerate(bits) if need)
        results = op(
            scaled, *saved.operands, projection.weight, attn_mask, *saved.mixing, *causal_and_scale, saved.attn_out,
            saved.softmax_stats, output_mask,
        )  # fmt: skip
        grads = tuple(g if need else None for g, need in zip(results, wanted, strict=True))
    *dgiven, dweight, dmask, dgain, daddend = grads
    dbias = scaled.sum((0, 1), dtype=projection.bias.dtype) if need_bias else None
    dresidual = grad.to(ctx.residual_dtype) if need_residual else None
    dweight = None if dweight is None else dweight.to(projection.weight.dtype)
    daddend = None if daddend is None else daddend.to(saved.mixing.addend.dtype)
    return *dgiven, dweight, dbias, dresidual, None, dmask, dgain, daddend, *(None,) * 5


def _needs(ctx) -> tuple[bool, ...]:
    """Which tensors need a gradient, in the order of the schema."""
    return ctx.needs_input_grad[:-5]


def _grad_of_y(saved: _Saved, grad_y, grad_norms: tuple[Tensor | None, Tensor | None] | None) -> Tensor:
    """∂L/∂y: what comes from y itself, and what comes from its norms."""
    if grad_y is not None:
        keeps_dtype = _keeps_input_dtype(grad_y)
        grad_y = (grad_y if keeps_dtype else grad_y.to(saved.attn_out.dtype)).contiguous()
    if grad_norms is None:
        return grad_y
    low, high = (
        torch.zeros_like(norm) if g is None else g.contiguous() for g, norm in zip(grad_norms, saved.norms, strict=True)
    )
    return torch.ops.overtone.frequency_norms_backward(low, high, saved.y, *saved.norms, None, grad_y)


def _double_backward(ctx, saved: _Saved, grad_y, grad_low, grad_high) -> tuple[Tensor | None, ...]:
    """The same gradients by the reference, as a graph that can be differentiated again."""
    operand_names = ("qkv",) if len(saved.operands) == 1 else ("query", "key", "value")
    projection, mask = saved.projection, saved.masking.attn_mask
    named = dict(zip(operand_names, saved.operands, strict=True)) | {"weight": projection.weight}
    optional = {"bias": projection.bias, "residual": projection.residual, **saved.mixing._asdict()}
    if mask is not None and mask.dtype != torch.bool:
        optional["attn_mask"] = mask
    named |= {name: x for name, x in optional.items() if x is not None}
    fixed = {**saved.masking._asdict(), "sample_scale": projection.sample_scale}
    dtype = saved.softmax_stats.dtype

    def outputs(*inputs):
        wide = {name: x.to(dtype) for name, x in zip(named, inputs, strict=True)}
        if len(saved.operands) == 1:
            wide |= zip(("query", "key", "value"), unpack_qkv(wide.pop("qkv")), strict=True)
        y, norms = reference_attention(**{**fixed, **wide}, return_norms=True)
        return tuple(x for x, g in zip((y, *norms), (grad_y, grad_low, grad_high), strict=True) if g is not None)

    grad_y = None if grad_y is None else grad_y.to(dtype)
    grads = tuple(g for g in (grad_y, grad_low, grad_high) if g is not None)
    results = dict(
        zip(named, registry.double_backward_via_reference(outputs, tuple(named.values()), grads), strict=True)
    )
    if ctx.residual_dtype is not None and projection.residual is None:
        results["residual"] = grad_y.to(ctx.residual_dtype)
    names = (*operand_names, "weight", "bias", "residual", "sample_scale", "attn_mask", "gain", "addend")
    return *(results.get(name) for name in names), *(None,) * 5


def _by_reference(query, key, value, weight, bias, residual, sample_scale, attn_mask, gain, addend, is_causal, scale,
                  return_norms, return_unrounded, save_for_backward):  # fmt: skip
    dtype = validate.accumulate_dtype(query.dtype)
    y, norms = reference_attention(
        *(x.to(dtype) for x in (query, key, value, weight)), bias=bias, residual=residual, sample_scale=sample_scale,
        attn_mask=attn_mask, is_causal=is_causal, scale=scale, gain=gain, addend=addend, return_norms=True,
    )  # fmt: skip
    nothing = y.new_empty(0)
    if not return_norms:
        norms = FrequencyNorms(nothing, nothing)
    return y if return_unrounded else y.to(query.dtype), *norms, nothing, nothing


registry.register(
    registry.Op(
        schema=_FORWARD,
        fake=_fake,
        triton="attention.launch.forward",
        save=_save,
        backward=_backward,
        reference=_by_reference,
        vmap=registry.Vmap(batched=(0, 1, 2, 5, 6, 7, 9), merges=True, contiguous=(4, 6, 8)),
    )
)
registry.register(
    registry.Op(
        schema=_qkvpacked(_FORWARD),
        fake=lambda qkv, *rest: _fake(*unpack_qkv(qkv), *rest),
        composite=lambda qkv, *rest: torch.ops.overtone.spectral_attention(*unpack_qkv(qkv), *rest),
        save=_save,
        backward=_backward,
        reference=lambda qkv, *rest: _by_reference(*unpack_qkv(qkv), *rest),
        vmap=registry.Vmap(batched=(0, 3, 4, 5, 7), merges=True, contiguous=(2, 4, 6)),
    )
)
registry.register(registry.Op(schema=_BACKWARD, fake=_fake_backward, triton="attention.launch.backward"))
registry.register(
    registry.Op(
        schema=_qkvpacked(_BACKWARD), fake=_fake_qkvpacked_backward, triton="attention.launch.backward_qkvpacked"
    )
)
