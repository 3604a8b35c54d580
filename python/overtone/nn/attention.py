"""Multi-head self-attention whose value–projection weight is a spectrum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overtone import _validate as validate
from overtone import reference
from overtone._deprecated import accepts_renamed
from overtone.nn.linear import apply_linear, has_global_hooks, is_fusible, is_plain
from overtone.ops.attention import QKV, spectral_attention, spectral_attention_qkvpacked
from overtone.ops.frequency import frequency_filter, frequency_norms
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

    def forward(
        self,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        spectrum: Spectrum | None = None,
        values_0: Tensor | None = None,
        return_norms: bool = False,
    ) -> Tensor | tuple[Tensor, FrequencyNorms]:
        """Attention of tokens x [B, N, dim], plus `residual` where given.

        Args:
            x: tokens.
            residual: [B, N, dim], added inside the op.
            attn_mask, is_causal: as in ot.spectral_attention.
            spectrum: this layer's, where a model has evaluated all of them together; default: evaluated here.
            values_0: V⁰ for NeuTRENO, the values that `project` of the first layer returns.
            return_norms: also return the FrequencyNorms of the result, each [B].
        """
        spectrum = self.own_spectrum(spectrum)
        return self.attend(
            self.project(x, spectrum), spectrum, residual=residual, attn_mask=attn_mask, is_causal=is_causal,
            values_0=values_0, return_norms=return_norms,
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
        return_norms: bool = False,
    ) -> Any:
        """The second half of forward; there may be more keys and values than queries (a cache)."""
        masks: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal}
        calls_proj = self.regime == "free" and not is_fusible(self.proj)
        factors = self._output_factors(spectrum, calls_proj, qkv.query.dtype)
        extra = self._neutreno_term(qkv.value, values_0, *factors)
        if self.centered:
            qkv, extra = self._center_values(qkv, extra, *factors, **masks)
        inside, outside = (None, residual) if calls_proj else _split_residual(residual, qkv.query)
        for term in (None if calls_proj else self._output_bias(), extra):
            if term is not None:
                inside = _add(inside, term.to(qkv.query.dtype), (*qkv.query.shape[::2], self.dim))
        is_whole = outside is None and not calls_proj
        outcome = self._run(qkv, *factors, residual=inside, return_norms=return_norms and is_whole, **masks)
        if is_whole:
            return outcome
        y = self.proj(outcome) if calls_proj else outcome
        y = y if outside is None else outside + y
        return (y, frequency_norms(y)) if return_norms else y

    def _run(self, qkv: QKV, eigenvalues: Tensor, basis: Tensor, **options: Any) -> Any:
        """The fused op, or its like with dropout. residual, return_norms, attn_mask and is_causal are handed on."""
        options |= {"scale": self.scale, "head_gain": self.head_gain}
        if self.training and self.attn_drop > 0:
            return self._attend_with_dropout(*qkv[:3], eigenvalues, basis, **options)
        if qkv.packed is not None:
            return spectral_attention_qkvpacked(qkv.packed, eigenvalues, basis, **options)
        return spectral_attention(*qkv[:3], eigenvalues, basis, **options)

    def _attend_with_dropout(self, query, key, value, eigenvalues, basis, *, residual, return_norms, **options):
        """What the fused op computes, with dropout of the attention weights, in plain PyTorch."""
        weights = F.dropout(reference.attention_weights(query, key, **options), self.attn_drop)
        heads = (weights.to(value.dtype) @ value).transpose(1, 2).flatten(2)
        y = (heads * eigenvalues.to(heads.dtype)) @ basis.to(heads.dtype)
        y = y if residual is None else residual + y
        return (y, frequency_norms(y)) if return_norms else y

    def _output_factors(self, spectrum: Spectrum | None, calls_proj: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """λ and U of the op. If `proj` is to be called on its result, U is the identity: one more product of the
        output's size, but no second implementation of attention."""
        if self.regime != "free":
            spectrum = self.spectrum() if spectrum is None else spectrum
            return spectrum.eigenvalues, spectrum.basis_out.to(dtype)
        ones = self._ones.to(validate.statistics_dtype(dtype))
        if calls_proj:
            return ones, torch.eye(self.dim, dtype=dtype, device=ones.device)
        return ones, self.proj.weight.mT.to(dtype)

    def _output_bias(self) -> Tensor | None:
        return self.proj.bias if self.regime == "free" else self.bias

    def _neutreno_term(self, value: Tensor, first: Tensor | None, eigenvalues: Tensor, basis: Tensor) -> Tensor | None:
        """NeuTRENO's γ(V⁰ − V), through λ and U."""
        if self.neutreno == 0 or first is None:
            return None
        difference = (first - value).transpose(1, 2).flatten(2)
        scaled = (self.neutreno * eigenvalues).to(difference.dtype)
        return (difference * scaled) @ basis.to(difference.dtype)

    def _center_values(
        self,
        qkv: QKV,
        extra: Tensor | None,
        eigenvalues: Tensor,
        basis: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> tuple[QKV, Tensor | None]:
        """A V − ΠV. Rows of A sum to one, so without masks this is A HFC[V]. With masks −ΠV is added to `extra`."""
        if attn_mask is None and not is_causal:
            return qkv._replace(value=frequency_filter(qkv.value, 0.0, 1.0), packed=None), extra
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask != -torch.inf
        equal_logits = torch.zeros_like(qkv.query)
        mean: Any = spectral_attention(
            equal_logits, qkv.key, qkv.value, -eigenvalues, basis.to(qkv.value.dtype), residual=extra,
            attn_mask=attn_mask, is_causal=is_causal,
        )  # fmt: skip
        return qkv._replace(packed=None), mean

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
    return type(spectrum.basis) in (nn.Parameter, Tensor)


def _split_residual(residual: Tensor | None, query: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What is added inside the op and what outside it, where the residual stream is wider than the op's dtype: it is
    never rounded."""
    if residual is None or residual.dtype == query.dtype:
        return residual, None
    return None, residual


def _add(tensor: Tensor | None, term: Tensor, shape: tuple[int, ...]) -> Tensor:
    return term.expand(shape) if tensor is None else tensor + term
