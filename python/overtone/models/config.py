"""What models are made of: one frozen record for each kind of model, with every check in it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from overtone import _validate as validate
from overtone._deprecated import renamed_value
from overtone.nn.attention import REGIMES
from overtone.nn.linear import GELUS
from overtone.spectrum import KINDS

__all__ = ["HEAD_METHODS", "METHODS", "GPTConfig", "TransformerConfig", "ViTConfig"]

#: The methods, and the default of each one's strength (None: it has none).
METHODS: dict[str, float | None] = {
    "plain": None,
    "de_escalation": 1.0,  # τ, at filter_place
    "feat_scale": None,  # at filter_place
    "contranorm": 0.1,  # s, at filter_place
    "attn_scale": None,  # in every attention
    "centered": None,  # in every attention
    "neutreno": 0.6,  # γ, in every attention but the first
}

#: More of them, which act on attention's heads (nn.head_methods): not part of the study.
HEAD_METHODS: dict[str, float | None] = {
    "laplacian": 0.5,  # the share of the heads, in every attention
    "value_residual": 0.5,  # γ, in every attention but the first
    "gfsa": 3.0,  # K, in every attention
    "xsa": None,  # in every attention
    "gated": None,  # in every attention
    "att_inv": None,  # in every attention
    "layernorm_scaling": None,  # of both LayerNorms of every block
}

_STRENGTHS = METHODS | HEAD_METHODS

#: Methods that need the values, or the attention, of every token at once: not for models with a key/value cache.
WITHOUT_CACHE = ("value_residual", "gfsa")

#: Where a block applies the filter of a method that is one.
FILTERS = ("de_escalation", "feat_scale", "contranorm")
FILTER_PLACES = ("block", "residual", "attention")

_RENAMED_METHODS = {"centred": "centered"}
_Config = TypeVar("_Config", bound="TransformerConfig")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """What the blocks of every model are made of. Every value is checked here.

    Args:
        dim: channels of a token.
        depth: number of blocks.
        num_heads: attention heads per block; divides dim.
        mlp_ratio: the MLP's hidden channels per channel of a token.
        qkv_bias: whether queries, keys and values have biases.
        regime: "free" (ordinary weights), "sharpen" or "smooth", or a sequence with one for each block.
        kind: of the spectra, "symmetric" or "general".
        bounded: keeps eigenvalues in [−1, 0) or (0, 1].
        condition_limit: of V in spectra of kind "general", kept by their parametrization; None: no limit.
        init_eigenvalue: |λ| of spectra at initialization, uniform in [0.5, 1.5] times this; default: the scale of a
            plain ViT's weights, which is small for few channels.
        norm: "pre" (LayerNorm before attention and MLP) or "post".
        norm_sign: 1 or −1 fixes the sign of the blocks' LayerNorm weights.
        norm_eps: added to the variance in every LayerNorm.
        gelu: of the MLPs, "exact" or "tanh" (its approximation).
        method: one of METHODS or HEAD_METHODS.
        strength: τ, s or γ of a method that has one; default: that of METHODS.
        filter_place: where the filter of "de_escalation", "feat_scale" and "contranorm" stands: "block" (on the result
            of a block), "residual" (on the stream after attention's residual, before the norm or the MLP), or
            "attention" (on attention's output, before it is added).
        mimetic_init: β of mimetic initialization, or None: layers with ordinary weights start at
            W_V W_proj = −βI + noise, the noise being what the product would be otherwise (Trockman and Kolter 2023).
        drop_path: stochastic depth, the rate of the last block; it grows linearly from 0.
        grad_checkpointing: recompute blocks in backward instead of storing their activations.
        pos_embed_std: of the position embeddings at initialization; small data learns faster with more than timm's
            0.02.
    """

    #: Whether a token attends to itself and those before it only.
    is_causal: ClassVar[bool] = False
    _counts: ClassVar[tuple[str, ...]] = ("dim", "depth", "num_heads")
    _flags: ClassVar[tuple[str, ...]] = ("qkv_bias", "bounded", "grad_checkpointing")

    dim: int = 192
    depth: int = 12
    num_heads: int = 3
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    regime: str | Sequence[str] = "free"
    kind: str = "symmetric"
    bounded: bool = False
    condition_limit: float | None = 20.0
    init_eigenvalue: float | None = None
    norm: str = "pre"
    norm_sign: int | None = None
    norm_eps: float = 1e-6
    gelu: str = "exact"
    method: str = "plain"
    strength: float | None = None
    filter_place: str = "block"
    mimetic_init: float | None = None
    drop_path: float = 0.0
    grad_checkpointing: bool = False
    pos_embed_std: float = 0.02

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field in self._counts:
            object.__setattr__(self, field, validate.count(name, field, getattr(self, field)))
        if not isinstance(self.regime, str):
            object.__setattr__(self, "regime", tuple(self.regime))
        object.__setattr__(self, "method", renamed_value(name, "method", self.method, _RENAMED_METHODS))
        self._check_sizes()
        self._check_choices()

    def _check_sizes(self) -> None:
        self._require_divisor("num_heads", "dim")
        self._require(self.mlp_ratio * self.dim >= 1, "mlp_ratio", f"at least one hidden channel for dim = {self.dim}")
        self._require(self.init_eigenvalue is None or self.init_eigenvalue > 0, "init_eigenvalue", "more than 0")
        limit = self.condition_limit
        self._require(limit is None or 1 < limit < math.inf, "condition_limit", "more than 1, or None")
        self._require(self.mimetic_init is None or 0 <= self.mimetic_init < math.inf, "mimetic_init", "0 or more")
        self._require(0 <= self.drop_path <= 1, "drop_path", "0 to 1")
        self._require(self.norm_eps > 0, "norm_eps", "more than 0")
        self._require(self.pos_embed_std >= 0, "pos_embed_std", "0 or more")

    def _check_choices(self) -> None:
        name = type(self).__name__
        if len(self.regimes) != self.depth:
            got, wanted = len(self.regimes), f"one, or one for each of {self.depth} layers"
            raise ValueError(f"{name}: regime: got {got} of them, wanted {wanted}")
        for regime in self.regimes:
            validate.one_of(name, "regime", regime, REGIMES)
        validate.one_of(name, "kind", self.kind, tuple(KINDS))
        validate.one_of(name, "norm", self.norm, ("pre", "post"))
        validate.one_of(name, "gelu", self.gelu, tuple(GELUS))
        self._require(self.norm_sign in (None, 1, -1), "norm_sign", "1, -1 or None")
        validate.one_of(name, "method", self.method, tuple(_STRENGTHS))
        has_strength = _STRENGTHS[self.method] is not None
        self._require(self.strength is None or has_strength, "strength", f"None: method {self.method!r} has none")
        validate.one_of(name, "filter_place", self.filter_place, FILTER_PLACES)
        is_moved = self.filter_place != "block"
        self._require(
            not is_moved or self.method in FILTERS, "filter_place", f"'block': method {self.method!r} has no filter"
        )
        for field in self._flags:
            validate.flag(name, field, getattr(self, field))

    def _require_divisor(self, name: str, whole: str) -> None:
        total = getattr(self, whole)
        self._require(total % getattr(self, name) == 0, name, f"a divisor of {whole} = {total}")

    def _require(self, holds: bool, name: str, wanted: str) -> None:
        if not holds:
            raise ValueError(f"{type(self).__name__}: {name}: got {getattr(self, name)!r}, wanted {wanted}")

    @property
    def regimes(self) -> tuple[str, ...]:
        """The regime of every block."""
        return (self.regime,) * self.depth if isinstance(self.regime, str) else tuple(self.regime)

    @property
    def drop_rates(self) -> tuple[float, ...]:
        """The rate of stochastic depth of every block."""
        return tuple(self.drop_path * layer / max(1, self.depth - 1) for layer in range(self.depth))

    @property
    def method_strength(self) -> float:
        """τ, s or γ of the method; 0 where it has none."""
        return float((_STRENGTHS[self.method] or 0.0) if self.strength is None else self.strength)

    def replace(self: _Config, **changes: Any) -> _Config:
        """A copy with other values for these fields."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class ViTConfig(TransformerConfig):
    """What a VisionTransformer is made of: its own fields, and those of TransformerConfig.

    Args:
        image_size: pixels per side of the (square) images.
        patch_size: pixels per side of a patch; divides image_size.
        in_channels: of the images.
        num_classes: outputs of the head; 0 leaves the head out.
        pool: "token" (a class token) or "mean" (of the tokens).
    """

    _counts: ClassVar[tuple[str, ...]] = ("image_size", "patch_size", "in_channels", *TransformerConfig._counts)

    image_size: int = 224
    patch_size: int = 16
    in_channels: int = 3
    num_classes: int = 1000
    pool: str = "token"

    def _check_sizes(self) -> None:
        self._require_divisor("patch_size", "image_size")
        super()._check_sizes()
        self._require(self.num_classes >= 0, "num_classes", "0 or more")

    def _check_choices(self) -> None:
        super()._check_choices()
        validate.one_of("ViTConfig", "pool", self.pool, ("token", "mean"))


@dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """What a GPT is made of: its own fields, and those of TransformerConfig.

    Args:
        vocab_size: different tokens; 256 are the bytes.
        context_length: tokens that the model takes at most.
        tied: the output's weight is that of the token embeddings.
    """

    is_causal: ClassVar[bool] = True
    _counts: ClassVar[tuple[str, ...]] = ("vocab_size", "context_length", *TransformerConfig._counts)
    _flags: ClassVar[tuple[str, ...]] = (*TransformerConfig._flags, "tied")

    vocab_size: int = 256
    context_length: int = 256
    depth: int = 6
    tied: bool = True

    def _check_choices(self) -> None:
        super()._check_choices()
        self._require(
            self.method not in WITHOUT_CACHE, "method", f"none of {', '.join(WITHOUT_CACHE)}: they have no cache"
        )
