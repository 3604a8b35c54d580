"""What `ot.spectrum.fold` replaces this package's modules with: ordinary weights and PyTorch's own operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overtone import reference
from overtone.nn.attention import QKV, SpectralAttention
from overtone.nn.filters import DeEscalation, FeatScale
from overtone.nn.head_methods import HeadMethod, own_values
from overtone.nn.linear import GELUS, Mlp, is_ordinary, is_plain
from overtone.nn.norms import SignedLayerNorm
from overtone.spectrum import KINDS, FixedSpectrum, SpectrumModule, folded
from overtone.types import Spectrum

__all__ = ["PlainAttention", "PlainDeEscalation", "PlainFeatScale", "PlainMlp"]


class PlainAttention(SpectralAttention):
    """SpectralAttention with W_V and W_proj = diag(λ) U as ordinary weights: `qkv` and `proj`, as in timm.

    Args:
        layer: whose weights it takes, which must be those of ordinary linear layers.
        name: of the layer in its model, for errors.
    """

    def __init__(self, layer: SpectralAttention, name: str) -> None:
        nn.Module.__init__(self)
        self.regime, self.kind = "free", layer.kind
        self.dim, self.num_heads, self.scale, self.attn_drop = layer.dim, layer.num_heads, layer.scale, layer.attn_drop
        self.centered, self.neutreno, self.head_gain = layer.centered, layer.neutreno, layer.head_gain
        self.head_method = layer.head_method
        if layer.regime == "free":
            self.qkv, self.proj, ones = layer.qkv, layer.proj, layer._ones
        else:
            self.qkv, self.proj = _packed_projection(layer, name), _output_projection(layer)
            ones = torch.ones_like(self.proj.weight[0])
        self.register_buffer("_ones", ones, persistent=False)

    def project(self, x: Tensor, spectrum: Spectrum | None = None) -> QKV:
        return QKV.unpack(self.qkv(x).unflatten(-1, (3, self.num_heads, -1)))

    def attend(
        self,
        qkv: QKV,
        spectrum: Spectrum | None = None,
        *,
        residual: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        values_0: Tensor | None = None,
        sample_scale: Tensor | None = None,
        tokens: Tensor | None = None,
        return_norms: bool = False,
    ) -> Any:
        query, key, value = qkv[:3]
        if self.head_method is not None:
            heads = self._by_method(self.head_method, qkv, values_0, tokens, attn_mask, is_causal)
        else:
            heads = self._mixed_heads(query, key, value, attn_mask, is_causal)
        if self.neutreno != 0 and values_0 is not None:
            heads = heads + self.neutreno * (values_0 - value[:, :, value.shape[2] - values_0.shape[2] :])
        y = self.proj(heads.transpose(1, 2).flatten(2))
        y = y if sample_scale is None else y * sample_scale.to(y.dtype)[:, None, None]
        y = y if residual is None else residual + y
        return (y, reference.frequency_norms(y)) if return_norms else y

    def _by_method(
        self, method: HeadMethod, qkv: QKV, values_0, tokens, attn_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        def attend(given: QKV) -> Tensor:
            return self._attention(*given[:3], attn_mask, is_causal)

        own = own_values(qkv)
        qkv, gain, addend = method.before(qkv, values_0, attend)
        heads = attend(qkv)
        heads = heads if gain is None else gain[:, None, None].to(heads.dtype) * heads
        heads = heads if addend is None else heads + addend.to(heads.dtype)
        return method.after(heads, own, tokens)

    def _mixed_heads(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """A_h V_h, or (1 + ω)(A V) − ω ΠV with AttnScale's gain, A V − ΠV if centered, or one after the other."""
        heads = self._attention(query, key, value, attn_mask, is_causal)
        if self.head_gain is None and not self.centered:
            return heads
        mean = self._mean(query, key, value, attn_mask, is_causal)
        gain = 0 if self.head_gain is None else self.head_gain[:, None, None].to(value.dtype)
        subtracted = (1 + gain) * mean if self.centered else gain * mean
        return (1 + gain) * heads - subtracted

    def _attention(self, query, key, value, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        dropout = self.attn_drop if self.training else 0.0
        if attn_mask is not None and is_causal:  # SDPA takes a mask or is_causal
            attn_mask, is_causal = _causal(attn_mask, query.shape[2], key.shape[2]), False
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout, is_causal=is_causal, scale=self.scale
        )

    def _mean(self, query, key, value: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """ΠV: the mean of the values that are attended to, as attention with equal logits."""
        if attn_mask is None and not is_causal:
            return value.mean(2, keepdim=True)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask != -torch.inf
        return self._attention(torch.zeros_like(query), key, value, attn_mask, is_causal)


def _causal(attn_mask: Tensor, queries: int, keys: int) -> Tensor:
    seen = attn_mask.new_ones(queries, keys, dtype=torch.bool).tril()
    return attn_mask & seen if attn_mask.dtype == torch.bool else attn_mask.masked_fill(~seen, -torch.inf)


def _packed_projection(layer: SpectralAttention, name: str) -> nn.Linear:
    if not (is_plain(layer.qk, nn.Linear) and is_ordinary(layer.qk.weight)):
        wanted = "an nn.Linear without hooks: merge or remove what was put around it first"
        raise TypeError(f"fold: model: got {_class_name(layer.qk)} as {f'{name}.qk'.lstrip('.')}, wanted {wanted}")
    weight = torch.cat((layer.qk.weight, layer.evaluate().basis_in.mT.to(layer.qk.weight.dtype)))
    return _linear(weight, None if layer.qk.bias is None else F.pad(layer.qk.bias, (0, layer.dim)))


def _output_projection(layer: SpectralAttention) -> nn.Linear:
    weight = layer.value_projection()[1].mT.to(layer.qk.weight.dtype)
    return _linear(weight, weight.new_zeros(layer.dim) if layer.bias is None else layer.bias)


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A layer with copies of these weights."""
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone())
    return linear


class PlainMlp(Mlp):
    """fc2(GELU(fc1(x))), layer by layer."""

    def __init__(self, mlp: Mlp) -> None:
        nn.Module.__init__(self)
        self.fc1, self.fc2, self.gelu = mlp.fc1, mlp.fc2, mlp.gelu

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self.fc2(F.gelu(self.fc1(x), approximate=GELUS[self.gelu]))
        return y if residual is None else residual + y


class PlainDeEscalation(DeEscalation):
    """DeEscalation by PyTorch's means and differences."""

    def forward(self, x: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return reference.de_escalate(x, self.tau, mask=mask, is_causal=is_causal)


class PlainFeatScale(FeatScale):
    """FeatScale by PyTorch's means and differences."""

    def __init__(self, scale: FeatScale) -> None:
        nn.Module.__init__(self)
        self.low, self.high = scale.low, scale.high

    def forward(self, x: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return reference.frequency_filter(x, 1 + self.low, 1 + self.high, mask=mask, is_causal=is_causal)


def _plain_norm(norm: SignedLayerNorm) -> nn.LayerNorm:
    plain = nn.LayerNorm(norm.normalized_shape, eps=norm.eps, device="meta")
    plain.weight, plain.bias = nn.Parameter(norm.sign * norm.weight.abs()), norm.bias
    return plain


def _replace(kind: type, plain: Callable[[Any, str], nn.Module], *exact: type) -> None:
    """Have `fold` replace modules of this class. Subclasses and modules with hooks are refused: those would be lost."""
    exact = exact or (kind,)

    @folded.register(kind)
    def replacement(module: nn.Module, name: str) -> nn.Module:
        if not is_plain(module, *exact):
            got = f"{_class_name(module)} as {name or 'the model'}"
            wanted = " or ".join(each.__name__ for each in exact)
            raise TypeError(f"fold: model: got {got}, wanted {wanted} itself, without hooks: they would be lost")
        return plain(module, name)


_replace(SpectralAttention, PlainAttention)
_replace(Mlp, lambda mlp, _: PlainMlp(mlp))
_replace(DeEscalation, lambda module, _: PlainDeEscalation(module.tau))
_replace(FeatScale, lambda module, _: PlainFeatScale(module))
_replace(SignedLayerNorm, lambda norm, _: _plain_norm(norm))
_replace(SpectrumModule, lambda spectrum, _: FixedSpectrum(spectrum()), *KINDS.values())
for _kind in (PlainAttention, PlainMlp, PlainDeEscalation, PlainFeatScale):
    folded.register(_kind)(lambda module, name: module)
