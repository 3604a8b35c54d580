"""Multi-head self-attention whose value–projection weight is a spectrum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overtone import _validate as validate
from overtone import reference
from overtone._deprecated import accepts_renamed
from overtone.nn.head_methods import HeadMethod, own_values
from overtone.nn.linear import apply_linear, has_global_hooks, is_fusible, is_ordinary, is_plain
from overtone.ops.attention import QKV, folded_attention, mean_of_values
from overtone.ops.frequency import frequency_norms
from overtone.ops.linear import linear
from overtone.spectrum import KINDS, BasisCache, SpectrumModule, evaluate, make_spectrum
from overtone.types import FrequencyNorms, Spectrum

__all__ = ["QKV", "REGIMES", "SpectralAttention", "evaluate_spectra"]

REGIMES = ("free", "sharpen", "smooth")


class SpectralAttention(nn.Module):
    """Self-attention x ↦ concat_h(A_h x B_h) · diag(λ) · U with B, λ, U from a spectrum, in one fused op.

    With the methods of the field the output O_h of a head, A_h V_h, becomes

        O_h = (1 + ω_h) A_h V_h − ω_h ΠV_h  [head_gain]  − ΠV_h  [centered]  + γ (V⁰_h − V_h)  [neutreno]

    where Π averages over the tokens a row may attend to.

    Args:
        dim: channels of a token.
        num_heads: divides dim; each head has dim / num_heads eigenvalues.
        regime: "sharpen" or "smooth" for a spectrum of that sign; "free" for ordinary weights W_V and W_proj (`qkv` and
            `proj`, named and shaped as in timm).
        kind: of the spectrum, "symmetric" or "general".
        bounded: keeps λ in [−1, 0) or (0, 1]; see ot.spectrum.
        condition_limit: of V, for kind "general"; see ot.spectrum.GeneralSpectrum.
        qkv_bias: biases for queries and keys (and values, where the regime is "free").
        proj_bias: a bias for the output; default: only where the regime is "free".
        head_gain: AttnScale's ω, one per head, learned, initially zero.
        centered: subtracts the mean of the values (Ali et al. 2023).
        neutreno: NeuTRENO's γ; V⁰ are the values of the first layer.
        head_method: any other method of the heads (nn.head_methods), in place of the three above.
        attn_drop: dropout of the attention weights; training then runs in plain PyTorch.
        scale: of the logits; None is 1/√(dim / num_heads).

    forward(x [B, N, dim]) returns [B, N, dim]; with return_norms also its FrequencyNorms.

    `qkv`, `qk`, `proj` and `spectrum` are parts of one fused op, which reads their tensors. Where a user has put
    something else there (an adapter, a quantized layer, a hook), they are called instead.

    The keywords are many because they are independent options, as in torch's own modules.
    """

    _ones: Tensor
    spectrum: SpectrumModule

    @accepts_renamed("SpectralAttention", centred="centered")
    def __init__(
        self,
        dim: int,
        num_heads: int,
        regime: str = "sharpen",
        kind: str = "symmetric",
        *,
        bounded: bool = False,
        condition_limit: float | None = None,
        qkv_bias: bool = True,
        proj_bias: bool | None = None,
        head_gain: bool = False,
        centered: bool = False,
        neutreno: float = 0.0,
        head_method: HeadMethod | None = None,
        attn_drop: float = 0.0,
        scale: float | None = None,
        device=None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dim = validate.count("SpectralAttention", "dim", dim)
        num_heads = validate.count("SpectralAttention", "num_heads", num_heads)
        if dim % num_heads:
            raise ValueError(f"SpectralAttention: num_heads: got {num_heads}, wanted a divisor of dim = {dim}")
        self.regime = validate.one_of("SpectralAttention", "regime", regime, REGIMES)
        self.dim, self.num_heads, self.kind = dim, num_heads, kind
        self.centered, self.neutreno = centered, float(neutreno)
        self.attn_drop, self.scale = float(attn_drop), scale
        factory = {"device": device, "dtype": dtype}
        proj_bias = regime == "free" if proj_bias is None else proj_bias
        if regime == "free":
            self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **factory)
            self.proj = nn.Linear(dim, dim, bias=proj_bias, **factory)
            self.register_buffer("_ones", torch.ones(dim, **factory), persistent=False)
        else:
            self.qk = nn.Linear(dim, 2 * dim, bias=qkv_bias, **factory)
            limit = {"condition_limit": condition_limit} if kind == "general" else {}
            self.spectrum = make_spectrum(kind, dim, regime, bounded=bounded, **limit, **factory)
            self.bias = nn.Parameter(torch.zeros(dim, **factory)) if proj_bias else None
        self.head_gain = nn.Parameter(torch.zeros(num_heads, **factory)) if head_gain else None
        if head_method is not None and (head_gain or centered or neutreno != 0):
            got = type(head_method).__name__
            raise ValueError(
                f"SpectralAttention: head_method: got {got}, wanted None beside head_gain, centered or neutreno"
            )
        self.head_method = head_method

    def forward(
        self,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        spectrum: Spectrum | None = None,
        values_0: Tensor | None = None,
        sample_scale: Tensor | None = None,
        extend: Callable[[QKV], QKV] | None = None,
        return_norms: bool = False,
    ) -> Tensor | tuple[Tensor, FrequencyNorms]:
        """Attention of tokens x [B, N, dim], plus `residual` where given.

        Args:
            x: tokens.
            residual: [B, N, dim], added inside the op.
            attn_mask, is_causal: as in ot.spectral_attention.
            spectrum: this layer's, where a model has evaluated all of them together; default: evaluated here.
            values_0: V⁰ for NeuTRENO, the values that `project` of the first layer returns.
            sample_scale: [B], multiplies what is added to the residual (stochastic depth).
            extend: puts the keys and values of earlier tokens (a cache) before those of x.
            return_norms: also return the FrequencyNorms of the result, each [B].
        """
        spectrum = self.own_spectrum(spectrum)
        qkv = self.project(x, spectrum)
        qkv = qkv if extend is None else extend(qkv)
        return self.attend(
            qkv, spectrum, residual=residual, attn_mask=attn_mask, is_causal=is_causal, values_0=values_0,
            sample_scale=sample_scale, tokens=x, return_norms=return_norms,
        )  # fmt: skip

    def own_spectrum(self, given: Spectrum | None = None) -> Spectrum | None:
        """`given`, or else this layer's spectrum; None where the regime is "free", which has none."""
        return given if given is not None or self.regime == "free" else self.spectrum()

    def project(self, x: Tensor, spectrum: Spectrum | None = None) -> QKV:
        """The first half of forward: queries, keys and values."""
        if self.regime == "free":
            packed = apply_linear(self.qkv, x)
        else:
            packed = self._project_on_basis(x, (self.spectrum() if spectrum is None else spectrum).basis_in)
        return QKV.unpack(packed.unflatten(-1, (3, self.num_heads, -1)))

    def _project_on_basis(self, x: Tensor, basis: Tensor) -> Tensor:
        if is_fusible(self.qk):  # one product for all three
            weight = torch.cat((self.qk.weight, basis.mT.to(self.qk.weight.dtype)))
            return linear(x, weight, None if self.qk.bias is None else F.pad(self.qk.bias, (0, self.dim)))
        queries_and_keys = self.qk(x)
        values = linear(x, basis.mT.to(x.dtype))
        return torch.cat((queries_and_keys, values.to(queries_and_keys.dtype)), -1)

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
        """The second half of forward; there may be more keys and values than queries (a cache). `tokens` is forward's
        x, for methods that look at it."""
        query = qkv.query
        options: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": self.scale}
        method, own = self.head_method, own_values(qkv)
        if method is None:
            options["gain"], options["addend"] = self._mixing(qkv, values_0, attn_mask, is_causal)
        else:
            attend = partial(self._heads, gain=None, addend=None, **options)
            qkv, options["gain"], options["addend"] = method.before(qkv, values_0, attend)
        if (method is not None and method.has_after) or (self.regime == "free" and not is_fusible(self.proj)):
            heads = self._heads(qkv, **options)
            heads = heads if method is None else method.after(heads, own, tokens)
            y = self._project_heads(heads.transpose(1, 2).flatten(2), spectrum)
            return _add_to_residual(y, residual, sample_scale, return_norms)
        weight = self._output_weight(spectrum, query.dtype)
        options["bias"] = self._output_bias()
        if residual is not None and residual.dtype not in (query.dtype, validate.accumulate_dtype(query.dtype)):
            return _add_to_residual(self._run(qkv, weight, **options), residual, sample_scale, return_norms)
        options |= {"residual": residual, "sample_scale": sample_scale, "return_norms": return_norms}
        return self._run(qkv, weight, **options)

    def _heads(self, qkv: QKV, **options: Any) -> Tensor:
        """The heads before their projection, [B, H, N, D]: one more product of their size, by the identity, but no
        second implementation of attention."""
        identity = torch.eye(self.dim, dtype=qkv.query.dtype, device=qkv.query.device)
        return self._run(qkv, identity, **options).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _project_heads(self, heads: Tensor, spectrum: Spectrum | None) -> Tensor:
        if self.regime == "free":
            return apply_linear(self.proj, heads)
        weight = self._output_weight(spectrum, heads.dtype)
        bias = self._output_bias()
        return linear(heads, weight.mT.to(heads.dtype), None if bias is None else bias.to(heads.dtype))

    def _run(self, qkv: QKV, weight: Tensor, **options: Any) -> Any:
        """The fused op, or its like with dropout."""
        if self.training and self.attn_drop > 0:
            return self._attend_with_dropout(qkv, weight, **options)
        return folded_attention(qkv, weight, **options)

    def _attend_with_dropout(
        self, qkv: QKV, weight: Tensor, *, gain, addend, bias=None, residual=None, sample_scale=None,
        return_norms=False, **logits,
    ) -> Any:  # fmt: skip
        """What the fused op computes, with dropout of the attention weights, in plain PyTorch."""
        query, key, value = qkv[:3]
        attention = F.dropout(reference.attention_weights(query, key, **logits), self.attn_drop)
        heads = attention.to(value.dtype) @ value
        heads = heads if gain is None else gain[:, None, None] * heads
        heads = heads if addend is None else heads + addend
        y = heads.to(value.dtype).transpose(1, 2).flatten(2) @ weight.to(value.dtype)
        y = y if bias is None else y + bias.to(y.dtype)
        return _add_to_residual(y, residual, sample_scale, return_norms)

    def _output_weight(self, spectrum: Spectrum | None, dtype: torch.dtype) -> Tensor:
        """diag(λ) U, or W_proj, in `dtype` or wider."""
        if self.regime == "free":
            return self._as_wide(self.proj.weight.mT, dtype)
        spectrum = self.spectrum() if spectrum is None else spectrum
        wide = validate.accumulate_dtype(dtype)
        return spectrum.eigenvalues.to(wide)[:, None] * spectrum.basis_out.to(wide)

    @staticmethod
    def _as_wide(weight: Tensor, dtype: torch.dtype) -> Tensor:
        wide = validate.accumulate_dtype(dtype)
        return weight if weight.dtype in (dtype, wide) else weight.to(wide)

    def _output_bias(self) -> Tensor | None:
        return self.proj.bias if self.regime == "free" else self.bias

    def _mixing(
        self, qkv: QKV, values_0: Tensor | None, attn_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """gain and addend of the heads, gain · A V + addend: every method's."""
        query, value = qkv.query, qkv.value
        gain, addend, share = None, None, None
        if self.head_gain is not None:
            share = self.head_gain.to(validate.accumulate_dtype(value.dtype))
            gain = 1 + share
        if self.centered:
            share = gain
        if self.head_gain is not None or self.centered:
            mean = mean_of_values(value, attn_mask, is_causal, query.shape[2])
            addend = -mean if share is None else -share[:, None, None] * mean
        if self.neutreno != 0 and values_0 is not None:
            # The earlier tokens of a cache have theirs.
            difference = self.neutreno * (values_0 - value[:, :, value.shape[2] - values_0.shape[2] :])
            addend = difference if addend is None else addend + difference
        return gain, addend

    def evaluate(self) -> Spectrum:
        """This layer's B, λ and U; where the regime is "free": W_V, ones and W_proj."""
        if self.regime != "free":
            return self.spectrum()
        return Spectrum(self._matrix(self.qkv)[:, 2 * self.dim :], self._ones, self._matrix(self.proj))

    def _matrix(self, layer: nn.Linear) -> Tensor:
        """W [in, out] as it multiplies tokens: read, or found by applying the layer to unit vectors."""
        if is_fusible(layer):
            return layer.weight.mT
        unit = torch.eye(self.dim, dtype=self._ones.dtype, device=self._ones.device)[None]
        return (layer(unit) - layer(torch.zeros_like(unit)))[0]

    def attention_weights(self, x: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """A [B, H, N, N], by the reference: for analysis."""
        query, key = self.project(x)[:2]
        return reference.attention_weights(
            query, key, attn_mask=attn_mask, is_causal=is_causal, scale=self.scale, head_gain=self.head_gain
        )

    def value_projection(self) -> tuple[Tensor, Tensor]:
        """W_V [dim, dim] and W_proj [dim, dim] as they multiply tokens, x W_V W_proj; W_proj includes λ."""
        basis_in, eigenvalues, basis_out = self.evaluate()
        return basis_in, eigenvalues[:, None] * basis_out

    def extra_repr(self) -> str:
        options = [f"dim={self.dim}, num_heads={self.num_heads}, regime={self.regime!r}"]
        options += ["centered"] if self.centered else []
        options += [f"neutreno={self.neutreno}"] if self.neutreno else []
        return ", ".join(options)


def evaluate_spectra(layers: Sequence[SpectralAttention], cache: BasisCache) -> list[Spectrum | None]:
    """Every layer's spectrum from one batched factorization per width; None for layers that must do it themselves."""
    ready = [place for place, layer in enumerate(layers) if layer.regime != "free" and _is_readable(layer.spectrum)]
    results: list[Spectrum | None] = [None] * len(layers)
    for place, spectrum in zip(ready, evaluate([layers[place].spectrum for place in ready], cache), strict=True):
        results[place] = spectrum
    return results


def _is_readable(spectrum: nn.Module) -> bool:
    """Whether it is one of ours, without hooks, and holds its whole basis: FSDP2 may keep it sharded until the layer's
    own forward."""
    if not is_plain(spectrum, *KINDS.values()) or has_global_hooks():
        return False
    return is_ordinary(spectrum.basis)


def _add_to_residual(
    y: Tensor, residual: Tensor | None, sample_scale: Tensor | None, return_norms: bool
) -> Tensor | tuple[Tensor, FrequencyNorms]:
    """What the fused op does after the projection, in plain PyTorch."""
    y = y if sample_scale is None else y * sample_scale.to(y.dtype)[:, None, None]
    y = y if residual is None else residual + y
    return (y, frequency_norms(y)) if return_norms else y
