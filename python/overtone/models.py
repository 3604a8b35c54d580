"""Vision Transformers with a regime per layer.

Plain ones ("free") have timm's parameter names and shapes, so that weights load from a timm state_dict. The methods of
the field are one switch, `method`, away from each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overtone import _validate as validate
from overtone.nn.attention import SpectralAttention, evaluate_layers
from overtone.nn.filters import ContraNorm, DeEscalation, FeatScale
from overtone.nn.mlp import Mlp
from overtone.nn.norms import SignedLayerNorm
from overtone.ops.frequency import frequency_norms
from overtone.spectrum import BasisCache
from overtone.types import FrequencyNorms, Spectrum

__all__ = ["METHODS", "Block", "VisionTransformer", "vit_base", "vit_small", "vit_tiny"]

#: The methods, and the default of each one's strength (None: it has none).
METHODS: dict[str, float | None] = {
    "plain": None,
    "de_escalation": 1.0,  # τ, after every block
    "feat_scale": None,  # after every block
    "contranorm": 0.1,  # s, after every block
    "attn_scale": None,  # in every attention
    "centred": None,  # in every attention
    "neutreno": 0.6,  # γ, in every attention but the first
}


class _Options(NamedTuple):
    """What every block of a model has in common."""

    dim: int
    num_heads: int
    kind: str
    bounded: bool
    post_norm: bool
    norm_sign: int | None
    method: str
    strength: float  # zero where the method has none
    qkv_bias: bool
    mlp_ratio: float
    factory: dict

    def norm(self) -> nn.LayerNorm:
        if self.norm_sign is None:
            return nn.LayerNorm(self.dim, eps=1e-6, **self.factory)
        return SignedLayerNorm(self.dim, self.norm_sign, eps=1e-6, **self.factory)

    def attention(self, regime: str) -> SpectralAttention:
        return SpectralAttention(
            self.dim,
            self.num_heads,
            regime,
            self.kind,
            bounded=self.bounded,
            qkv_bias=self.qkv_bias,
            head_gain=self.method == "attn_scale",
            centred=self.method == "centred",
            neutreno=self.strength if self.method == "neutreno" else 0.0,
            **self.factory,
        )

    def filter(self) -> nn.Module | None:
        if self.method == "de_escalation":
            return DeEscalation(self.strength)
        if self.method == "contranorm":
            return ContraNorm(self.strength)
        return FeatScale(self.dim, **self.factory) if self.method == "feat_scale" else None


class Block(nn.Module):
    """Attention and an MLP, each with a residual and a LayerNorm, before (pre-norm) or after it (post-norm).

    forward gives the tokens, and the FrequencyNorms of the residual stream right after attention's update if asked for.
    """

    def __init__(self, options: _Options, regime: str, drop_path: float) -> None:
        super().__init__()
        self.post_norm, self.drop_path = options.post_norm, drop_path
        self.norm1 = options.norm()
        self.attn = options.attention(regime)
        self.norm2 = options.norm()
        self.mlp = Mlp(options.dim, int(options.dim * options.mlp_ratio), **options.factory)
        self.filter = options.filter()

    def forward(
        self,
        x: Tensor,
        spectrum: Spectrum | None = None,
        first_values: Tensor | None = None,
        return_norms: bool = False,
    ) -> tuple[Tensor, FrequencyNorms | None]:
        x, norms = self._attend(x, spectrum, first_values, return_norms)
        if self.post_norm:
            x = self.norm1(x)
            x = self.norm2(x + self._dropped(self.mlp(x)))
        else:
            x = x + self._dropped(self.mlp(self.norm2(x)))
        return (x if self.filter is None else self.filter(x)), norms

    def attention_input(self, x: Tensor) -> Tensor:
        """What attention sees of the block's input."""
        return x if self.post_norm else self.norm1(x)

    def _attend(
        self, x: Tensor, spectrum: Spectrum | None, first_values: Tensor | None, return_norms: bool
    ) -> tuple[Tensor, FrequencyNorms | None]:
        inputs = self.attention_input(x)
        options = {"spectrum": spectrum, "first_values": first_values}
        if self.training and self.drop_path > 0:
            x = x + self._dropped(self.attn(inputs, **options))
            return x, frequency_norms(x) if return_norms else None
        if return_norms:
            return self.attn(inputs, residual=x, return_norms=True, **options)
        return self.attn(inputs, residual=x, **options), None

    def _dropped(self, update: Tensor) -> Tensor:
        """Stochastic depth: a sample's update is left out with probability drop_path, and scaled up otherwise."""
        if not self.training or self.drop_path == 0:
            return update
        kept = 1 - self.drop_path
        mask = update.new_empty(update.shape[0], *(1,) * (update.dim() - 1)).bernoulli_(kept)
        return update * mask.div_(kept) if kept > 0 else update * mask


class PatchEmbed(nn.Module):
    """Images [B, C, S, S] to tokens [B, (S / patch)², dim]."""

    def __init__(self, image_size: int, patch_size: int, channels: int, dim: int, factory: dict) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"vit: patch_size: got {patch_size}, wanted a divisor of image_size = {image_size}")
        self.image_size, self.channels = image_size, channels
        self.num_patches = (image_size // patch_size) ** 2
        self.proj = nn.Conv2d(channels, dim, patch_size, stride=patch_size, **factory)

    def forward(self, images: Tensor) -> Tensor:
        if images.dim() != 4 or images.shape[1:] != (self.channels, self.image_size, self.image_size):
            wanted = f"[B, {self.channels}, {self.image_size}, {self.image_size}]"
            raise ValueError(f"vit: images: got {validate.describe(images)}, wanted {wanted}")
        return self.proj(images).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    """A ViT whose layers have a regime each. See `vit_tiny` for the arguments."""

    def __init__(
        self,
        image_size: int = 224,
        patch_size: int = 16,
        num_classes: int = 1000,
        regime: str | Sequence[str] = "free",
        *,
        dim: int,
        num_heads: int,
        depth: int = 12,
        kind: str = "symmetric",
        bounded: bool = False,
        norm: str = "pre",
        norm_sign: int | None = None,
        pool: str = "token",
        method: str = "plain",
        strength: float | None = None,
        drop_path: float = 0.0,
        checkpointing: bool = False,
        qkv_bias: bool = True,
        mlp_ratio: float = 4.0,
        in_channels: int = 3,
        position_std: float = 0.02,
        eigenvalue_size: float | None = None,
        device=None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        validate.one_of("vit", "norm", norm, ("pre", "post"))
        validate.one_of("vit", "pool", pool, ("token", "mean"))
        validate.one_of("vit", "method", method, tuple(METHODS))
        if strength is not None and METHODS[method] is None:
            raise ValueError(f"vit: strength: got {strength!r}, wanted None: method {method!r} has none")
        regimes = _regimes(regime, depth)
        factory = {"device": device, "dtype": dtype}
        strength = (METHODS[method] or 0.0) if strength is None else float(strength)
        options = _Options(
            dim, num_heads, kind, bounded, norm == "post", norm_sign, method, strength, qkv_bias, mlp_ratio, factory
        )
        self.pool, self.method, self.checkpointing = pool, method, checkpointing
        self.position_std, self.eigenvalue_size = float(position_std), eigenvalue_size
        self.patch_embed = PatchEmbed(image_size, patch_size, in_channels, dim, factory)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim, **factory)) if pool == "token" else None
        tokens = self.patch_embed.num_patches + (pool == "token")
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, dim, **factory))
        rates = [drop_path * layer / max(1, depth - 1) for layer in range(depth)]
        self.blocks = nn.ModuleList(Block(options, *each) for each in zip(regimes, rates, strict=True))
        # timm's names: a norm before the class token is taken, another one after the mean.
        final = nn.LayerNorm(dim, eps=1e-6, **factory)
        self.norm = final if pool == "token" else nn.Identity()
        self.fc_norm = final if pool == "mean" else nn.Identity()
        self.head = nn.Linear(dim, num_classes, **factory) if num_classes > 0 else nn.Identity()
        self._cache = BasisCache()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """timm's scheme: every linear weight from a normal distribution of 0.02, cut at two; spectra their own."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.eigenvalue_size is not None:
            for block in self.layers:
                if block.attn.regime != "free":
                    block.attn.spectrum.reset_parameters(self.eigenvalue_size)
        nn.init.trunc_normal_(self.pos_embed, std=self.position_std)
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
        logits = self.head(self.fc_norm(self.norm(x)[:, 0] if self.pool == "token" else x.mean(1)))
        if norms is None:
            return logits
        low, high = zip(*norms, strict=True)
        return logits, FrequencyNorms(torch.stack(low), torch.stack(high))

    def forward_features(self, images: Tensor) -> Tensor:
        """The tokens after the last block, [B, N, dim], class token first where there is one."""
        return self._features(images, False)[0]

    def evaluate_spectra(self) -> list[Spectrum | None]:
        """Every layer's spectrum from one batched factorisation; None for layers that must do it themselves."""
        return evaluate_layers([block.attn for block in self.layers], self._cache)

    def _features(self, images: Tensor, return_norms: bool) -> tuple[Tensor, list[FrequencyNorms] | None]:
        x = self.patch_embed(images)
        if self.cls_token is not None:
            x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), 1)
        x = x + self.pos_embed
        norms: list[FrequencyNorms] = []
        spectra = self.evaluate_spectra()
        first_values = self._first_values(x, spectra)
        for block, spectrum in zip(self.layers, spectra, strict=True):
            if self.checkpointing and self.training:
                x, found = checkpoint(block, x, spectrum, first_values, return_norms, use_reentrant=False)
            else:
                x, found = block(x, spectrum, first_values, return_norms)
            norms += [] if found is None else [found]
        return x, norms if return_norms else None

    def _first_values(self, x: Tensor, spectra: list[Spectrum | None]) -> Tensor | None:
        """NeuTRENO's V⁰; in the first layer itself V⁰ − V is zero."""
        if self.method != "neutreno" or not spectra:
            return None
        first = self.layers[0]
        return first.attn.project(first.attention_input(x), spectra[0])[2]


def _regimes(regime: str | Sequence[str], depth: int) -> list[str]:
    regimes = [regime] * depth if isinstance(regime, str) else list(regime)
    if len(regimes) != depth:
        raise ValueError(f"vit: regime: got {len(regimes)} of them, wanted one, or one for each of {depth} layers")
    return regimes


def vit_tiny(
    image_size: int = 224,
    patch_size: int = 16,
    num_classes: int = 1000,
    regime: str | Sequence[str] = "free",
    **options,
) -> VisionTransformer:
    """ViT-Ti: 192 channels, 3 heads, 12 layers.

    Args:
        image_size, patch_size, num_classes: as they say; num_classes=0 leaves the head out.
        regime: "free", "sharpen" or "smooth", or a list with one for each layer.
        **options:
            kind: of the spectra, "symmetric" (default) or "general". bounded: keeps λ in [−1, 0) or (0, 1].
            norm: "pre" (default) or "post". norm_sign: 1 or −1 fixes the sign of the blocks' LayerNorm weights.
            pool: "token" (a class token, default) or "mean".
            method: "plain", "de_escalation", "feat_scale", "contranorm", "attn_scale", "centred" or "neutreno";
            strength: τ, s or γ of a method that has one.
            drop_path: stochastic depth, the rate of the last layer. checkpointing: recompute blocks in backward.
            position_std: of the position embeddings at first; small data learns faster with more than timm's 0.02.
            eigenvalue_size: |λ| of spectra at first, by half of it more or less; default: that of a plain ViT, which
            is small for few channels.
            depth, qkv_bias, mlp_ratio, in_channels, device, dtype.
    """
    return VisionTransformer(image_size, patch_size, num_classes, regime, dim=192, num_heads=3, **options)


def vit_small(
    image_size: int = 224,
    patch_size: int = 16,
    num_classes: int = 1000,
    regime: str | Sequence[str] = "free",
    **options,
) -> VisionTransformer:
    """ViT-S: 384 channels, 6 heads, 12 layers. Arguments as in `vit_tiny`."""
    return VisionTransformer(image_size, patch_size, num_classes, regime, dim=384, num_heads=6, **options)


def vit_base(
    image_size: int = 224,
    patch_size: int = 16,
    num_classes: int = 1000,
    regime: str | Sequence[str] = "free",
    **options,
) -> VisionTransformer:
    """ViT-B: 768 channels, 12 heads, 12 layers. Arguments as in `vit_tiny`."""
    return VisionTransformer(image_size, patch_size, num_classes, regime, dim=768, num_heads=12, **options)
