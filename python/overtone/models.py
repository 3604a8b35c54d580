"""Vision Transformers with a regime per layer.

Plain ones ("free") have timm's parameter names and shapes, so that weights load from a timm state_dict. The methods of
the field are one switch, `method`, away from each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overtone import _validate as validate
from overtone._deprecated import accepts_renamed, renamed_value
from overtone.nn.attention import REGIMES, SpectralAttention, evaluate_spectra
from overtone.nn.filters import ContraNorm, DeEscalation, FeatScale
from overtone.nn.linear import Mlp
from overtone.nn.norms import SignedLayerNorm
from overtone.ops.frequency import frequency_norms
from overtone.spectrum import KINDS, BasisCache
from overtone.types import FrequencyNorms, Spectrum

__all__ = ["METHODS", "Block", "ViTConfig", "VisionTransformer", "vit_base", "vit_small", "vit_tiny"]

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

#: Where a block applies the filter of a method that is one.
FILTERS = ("de_escalation", "feat_scale", "contranorm")
FILTER_PLACES = ("block", "residual", "attention")

_RENAMED_METHODS = {"centred": "centered"}
_RENAMED_OPTIONS = {
    "checkpointing": "grad_checkpointing",
    "position_std": "pos_embed_std",
    "eigenvalue_size": "init_eigenvalue",
}


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """What a VisionTransformer is made of. Every value is checked here.

    Args:
        image_size: pixels per side of the (square) images.
        patch_size: pixels per side of a patch; divides image_size.
        in_channels: of the images.
        num_classes: outputs of the head; 0 leaves the head out.
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
        pool: "token" (a class token) or "mean" (of the tokens).
        method: one of METHODS.
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

    image_size: int = 224
    patch_size: int = 16
    in_channels: int = 3
    num_classes: int = 1000
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
    pool: str = "token"
    method: str = "plain"
    strength: float | None = None
    filter_place: str = "block"
    mimetic_init: float | None = None
    drop_path: float = 0.0
    grad_checkpointing: bool = False
    pos_embed_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size", "in_channels", "dim", "depth", "num_heads"):
            object.__setattr__(self, name, validate.count("ViTConfig", name, getattr(self, name)))
        if not isinstance(self.regime, str):
            object.__setattr__(self, "regime", tuple(self.regime))
        object.__setattr__(self, "method", renamed_value("ViTConfig", "method", self.method, _RENAMED_METHODS))
        self._check_sizes()
        self._check_choices()

    def _check_sizes(self) -> None:
        for name, whole in (("patch_size", "image_size"), ("num_heads", "dim")):
            if getattr(self, whole) % getattr(self, name):
                self._require(False, name, f"a divisor of {whole} = {getattr(self, whole)}")
        self._require(self.num_classes >= 0, "num_classes", "0 or more")
        self._require(self.mlp_ratio * self.dim >= 1, "mlp_ratio", f"at least one hidden channel for dim = {self.dim}")
        self._require(self.init_eigenvalue is None or self.init_eigenvalue > 0, "init_eigenvalue", "more than 0")
        limit = self.condition_limit
        self._require(limit is None or 1 < limit < math.inf, "condition_limit", "more than 1, or None")
        self._require(self.mimetic_init is None or 0 <= self.mimetic_init < math.inf, "mimetic_init", "0 or more")
        self._require(0 <= self.drop_path <= 1, "drop_path", "0 to 1")
        self._require(self.pos_embed_std >= 0, "pos_embed_std", "0 or more")

    def _check_choices(self) -> None:
        if len(self.regimes) != self.depth:
            got, wanted = len(self.regimes), f"one, or one for each of {self.depth} layers"
            raise ValueError(f"ViTConfig: regime: got {got} of them, wanted {wanted}")
        for regime in self.regimes:
            validate.one_of("ViTConfig", "regime", regime, REGIMES)
        validate.one_of("ViTConfig", "kind", self.kind, tuple(KINDS))
        validate.one_of("ViTConfig", "norm", self.norm, ("pre", "post"))
        self._require(self.norm_sign in (None, 1, -1), "norm_sign", "1, -1 or None")
        validate.one_of("ViTConfig", "pool", self.pool, ("token", "mean"))
        validate.one_of("ViTConfig", "method", self.method, tuple(METHODS))
        has_strength = METHODS[self.method] is not None
        self._require(self.strength is None or has_strength, "strength", f"None: method {self.method!r} has none")
        validate.one_of("ViTConfig", "filter_place", self.filter_place, FILTER_PLACES)
        is_moved = self.filter_place != "block"
        self._require(
            not is_moved or self.method in FILTERS, "filter_place", f"'block': method {self.method!r} has no filter"
        )
        for name in ("qkv_bias", "bounded", "grad_checkpointing"):
            validate.flag("ViTConfig", name, getattr(self, name))

    def _require(self, holds: bool, name: str, wanted: str) -> None:
        if not holds:
            raise ValueError(f"ViTConfig: {name}: got {getattr(self, name)!r}, wanted {wanted}")

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
        return float((METHODS[self.method] or 0.0) if self.strength is None else self.strength)

    def replace(self, **changes: Any) -> ViTConfig:
        """A copy with other values for these fields."""
        return dataclasses.replace(self, **changes)


class Block(nn.Module):
    """Attention and an MLP, each with a residual and a LayerNorm, before (pre-norm) or after it (post-norm).

    forward gives the tokens, and the FrequencyNorms of the residual stream right after attention's update if asked for.

    Args:
        config: of the model.
        layer: which of its blocks this is, from 0.
    """

    def __init__(self, config: ViTConfig, layer: int, *, device=None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.post_norm, self.drop_path = config.norm == "post", config.drop_rates[layer]
        self.norm1 = _make_norm(config, factory)
        self.attn = _make_attention(config, layer, factory)
        self.norm2 = _make_norm(config, factory)
        self.mlp = Mlp(config.dim, int(config.dim * config.mlp_ratio), **factory)
        self.filter, self.filter_place = _make_filter(config, factory), config.filter_place

    def forward(
        self,
        x: Tensor,
        spectrum: Spectrum | None = None,
        values_0: Tensor | None = None,
        return_norms: bool = False,
    ) -> tuple[Tensor, FrequencyNorms | None]:
        x, norms = self._attend(x, spectrum, values_0, return_norms)
        x = self._filtered(x, "residual")
        if self.post_norm:
            x = self.norm1(x)
            x = self.norm2(x + self._drop_path(self.mlp(x)))
        else:
            x = x + self._drop_path(self.mlp(self.norm2(x)))
        return self._filtered(x, "block"), norms

    def attention_input(self, x: Tensor) -> Tensor:
        """What attention sees of the block's input."""
        return x if self.post_norm else self.norm1(x)

    def _attend(
        self, x: Tensor, spectrum: Spectrum | None, values_0: Tensor | None, return_norms: bool
    ) -> tuple[Tensor, FrequencyNorms | None]:
        inputs = self.attention_input(x)
        options = {"spectrum": spectrum, "values_0": values_0}
        is_filtered = self.filter is not None and self.filter_place == "attention"
        if is_filtered or (self.training and self.drop_path > 0):
            x = x + self._drop_path(self._filtered(self.attn(inputs, **options), "attention"))
            return x, frequency_norms(x) if return_norms else None
        if return_norms:
            return self.attn(inputs, residual=x, return_norms=True, **options)
        return self.attn(inputs, residual=x, **options), None

    def _filtered(self, x: Tensor, place: str) -> Tensor:
        """After the method's filter, if this is its place."""
        return x if self.filter is None or place != self.filter_place else self.filter(x)

    def _drop_path(self, update: Tensor) -> Tensor:
        """Stochastic depth: a sample's update is left out with probability drop_path, and scaled up otherwise."""
        if not self.training or self.drop_path == 0:
            return update
        kept = 1 - self.drop_path
        mask = update.new_empty(update.shape[0], *(1,) * (update.dim() - 1)).bernoulli_(kept)
        return update * mask.div_(kept) if kept > 0 else update * mask


def _make_norm(config: ViTConfig, factory: dict) -> nn.LayerNorm:
    if config.norm_sign is None:
        return nn.LayerNorm(config.dim, eps=1e-6, **factory)
    return SignedLayerNorm(config.dim, config.norm_sign, eps=1e-6, **factory)


def _make_attention(config: ViTConfig, layer: int, factory: dict) -> SpectralAttention:
    return SpectralAttention(
        config.dim,
        config.num_heads,
        config.regimes[layer],
        config.kind,
        bounded=config.bounded,
        condition_limit=config.condition_limit,
        qkv_bias=config.qkv_bias,
        head_gain=config.method == "attn_scale",
        centered=config.method == "centered",
        neutreno=config.method_strength if config.method == "neutreno" else 0.0,
        **factory,
    )


def _make_filter(config: ViTConfig, factory: dict) -> nn.Module | None:
    """What is applied to tokens at config.filter_place."""
    if config.method == "de_escalation":
        return DeEscalation(config.method_strength)
    if config.method == "contranorm":
        return ContraNorm(config.method_strength)
    return FeatScale(config.dim, **factory) if config.method == "feat_scale" else None


@torch.no_grad()
def _mimetic(attention: SpectralAttention, beta: float) -> None:
    """W_V W_proj = −βI + (the product of the weights as they are), each factor with half of its singular values."""
    value = attention.qkv.weight[-attention.dim :]  # a Linear keeps Wᵀ
    product = (attention.proj.weight.double() @ value.double()).mT
    if product.is_meta:
        return
    left, sizes, right = torch.linalg.svd(product - beta * torch.eye(attention.dim).to(product))
    value.copy_((left * sizes.sqrt()).mT)
    attention.proj.weight.copy_((sizes.sqrt()[:, None] * right).mT)


class PatchEmbed(nn.Module):
    """Images [B, C, S, S] to tokens [B, (S / patch)², dim]."""

    def __init__(self, config: ViTConfig, *, device=None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.image_size, self.channels = config.image_size, config.in_channels
        self.num_patches = (config.image_size // config.patch_size) ** 2
        patch = config.patch_size
        self.proj = nn.Conv2d(config.in_channels, config.dim, patch, stride=patch, device=device, dtype=dtype)

    def forward(self, images: Tensor) -> Tensor:
        if images.dim() != 4 or images.shape[1:] != (self.channels, self.image_size, self.image_size):
            wanted = f"[B, {self.channels}, {self.image_size}, {self.image_size}]"
            raise ValueError(f"VisionTransformer: images: got {validate.describe(images)}, wanted {wanted}")
        return self.proj(images).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    """A ViT whose layers have a regime each.

    Args:
        config: everything that decides the model; `vit_tiny`, `vit_small` and `vit_base` make it of keywords.

    `grad_checkpointing` may be switched on a model that exists.
    """

    def __init__(self, config: ViTConfig, *, device=None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if not isinstance(config, ViTConfig):
            raise TypeError(f"VisionTransformer: config: got {validate.describe(config)}, wanted a ViTConfig")
        factory = {"device": device, "dtype": dtype}
        self.config, self.grad_checkpointing = config, config.grad_checkpointing
        self.patch_embed = PatchEmbed(config, **factory)
        has_token = config.pool == "token"
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.dim, **factory)) if has_token else None
        self.pos_embed = nn.Parameter(torch.empty(1, self.patch_embed.num_patches + has_token, config.dim, **factory))
        self.blocks = nn.ModuleList(Block(config, layer, **factory) for layer in range(config.depth))
        # timm's names: a norm before the class token is taken, another one after the mean.
        final = nn.LayerNorm(config.dim, eps=1e-6, **factory)
        self.norm = final if has_token else nn.Identity()
        self.fc_norm = nn.Identity() if has_token else final
        self.head = nn.Linear(config.dim, config.num_classes, **factory) if config.num_classes else nn.Identity()
        self._cache = BasisCache()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """timm's scheme: linear weights from a normal distribution of std 0.02, cut at ±2; spectra have their own."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for attention in (block.attn for block in self.layers):
            if attention.regime == "free" and self.config.mimetic_init is not None:
                _mimetic(attention, self.config.mimetic_init)
            elif attention.regime != "free" and self.config.init_eigenvalue is not None:
                attention.spectrum.reset_parameters(self.config.init_eigenvalue)
        nn.init.trunc_normal_(self.pos_embed, std=float(self.config.pos_embed_std))
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=1e-6)

    @property
    def layers(self) -> list[Block]:
        return [cast(Block, block) for block in self.blocks]

    def forward(self, images: Tensor, return_norms: bool = False) -> Tensor | tuple[Tensor, FrequencyNorms]:
        """Class scores [B, num_classes].

        return_norms: also the FrequencyNorms of the residual stream right after every layer's attention, [depth, B].
        """
        x, norms = self._features(images, return_norms)
        pooled = self.norm(x)[:, 0] if self.config.pool == "token" else x.mean(1)
        logits = self.head(self.fc_norm(pooled))
        if norms is None:
            return logits
        low, high = zip(*norms, strict=True)
        return logits, FrequencyNorms(torch.stack(low), torch.stack(high))

    def forward_features(self, images: Tensor) -> Tensor:
        """The tokens after the last block, [B, N, dim], class token first where there is one."""
        return self._features(images, False)[0]

    def evaluate_spectra(self) -> list[Spectrum | None]:
        """Every layer's spectrum from one batched factorization; None for layers that must do it themselves."""
        return evaluate_spectra([block.attn for block in self.layers], self._cache)

    def _features(self, images: Tensor, return_norms: bool) -> tuple[Tensor, list[FrequencyNorms] | None]:
        x = self.patch_embed(images)
        if self.cls_token is not None:
            x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), 1)
        x = x + self.pos_embed
        norms: list[FrequencyNorms] = []
        spectra = self.evaluate_spectra()
        values_0 = self._values_0(x, spectra)
        for block, spectrum in zip(self.layers, spectra, strict=True):
            if self.grad_checkpointing and self.training:
                x, found = checkpoint(block, x, spectrum, values_0, return_norms, use_reentrant=False)
            else:
                x, found = block(x, spectrum, values_0, return_norms)
            norms += [] if found is None else [found]
        return x, norms if return_norms else None

    def _values_0(self, x: Tensor, spectra: list[Spectrum | None]) -> Tensor | None:
        """NeuTRENO's V⁰; in the first layer itself V⁰ − V is zero."""
        if self.config.method != "neutreno":
            return None
        first = self.layers[0]
        return first.attn.project(first.attention_input(x), spectra[0]).value


@accepts_renamed("vit_tiny", **_RENAMED_OPTIONS)
def vit_tiny(
    image_size: int = 224,
    patch_size: int = 16,
    num_classes: int = 1000,
    regime: str | Sequence[str] = "free",
    *,
    device=None,
    dtype: torch.dtype | None = None,
    **options,
) -> VisionTransformer:
    """ViT-Ti: 192 channels, 3 heads, 12 layers.

    Args:
        image_size: pixels per side of the images.
        patch_size: pixels per side of a patch.
        num_classes: outputs of the head; 0 leaves the head out.
        regime: "free", "sharpen" or "smooth", or a list with one for each layer.
        device, dtype: of the parameters.
        **options: any other field of ViTConfig but dim and num_heads.
    """
    config = ViTConfig(
        image_size=image_size, patch_size=patch_size, num_classes=num_classes, regime=regime, dim=192, num_heads=3,
        **options,
    )  # fmt: skip
    return VisionTransformer(config, device=device, dtype=dtype)


@accepts_renamed("vit_small", **_RENAMED_OPTIONS)
def vit_small(
    image_size: int = 224,
    patch_size: int = 16,
    num_classes: int = 1000,
    regime: str | Sequence[str] = "free",
    *,
    device=None,
    dtype: torch.dtype | None = None,
    **options,
) -> VisionTransformer:
    """ViT-S: 384 channels, 6 heads, 12 layers. Arguments as in `vit_tiny`."""
    config = ViTConfig(
        image_size=image_size, patch_size=patch_size, num_classes=num_classes, regime=regime, dim=384, num_heads=6,
        **options,
    )  # fmt: skip
    return VisionTransformer(config, device=device, dtype=dtype)


@accepts_renamed("vit_base", **_RENAMED_OPTIONS)
def vit_base(
    image_size: int = 224,
    patch_size: int = 16,
    num_classes: int = 1000,
    regime: str | Sequence[str] = "free",
    *,
    device=None,
    dtype: torch.dtype | None = None,
    **options,
) -> VisionTransformer:
    """ViT-B: 768 channels, 12 heads, 12 layers. Arguments as in `vit_tiny`."""
    config = ViTConfig(
        image_size=image_size, patch_size=patch_size, num_classes=num_classes, regime=regime, dim=768, num_heads=12,
        **options,
    )  # fmt: skip
    return VisionTransformer(config, device=device, dtype=dtype)
