"""Vision Transformers with a regime per layer.

Plain ones ("free") have timm's parameter names and shapes, so that weights load from a timm state_dict. The methods of
the field are one switch, `method`, away from each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from overtone import _validate as validate
from overtone._deprecated import accepts_renamed
from overtone.models.blocks import Block, Transformer
from overtone.models.config import ViTConfig
from overtone.types import FrequencyNorms

__all__ = ["VisionTransformer", "vit_base", "vit_small", "vit_tiny"]

_RENAMED_OPTIONS = {
    "checkpointing": "grad_checkpointing",
    "position_std": "pos_embed_std",
    "eigenvalue_size": "init_eigenvalue",
}


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


class VisionTransformer(Transformer):
    """A ViT whose layers have a regime each.

    Args:
        config: everything that decides the model; `vit_tiny`, `vit_small` and `vit_base` make it of keywords.

    `grad_checkpointing` may be switched on a model that exists.
    """

    config: ViTConfig

    def __init__(self, config: ViTConfig, *, device=None, dtype: torch.dtype | None = None) -> None:
        super().__init__(config, ViTConfig)
        factory = {"device": device, "dtype": dtype}
        self.patch_embed = PatchEmbed(config, **factory)
        has_token = config.pool == "token"
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.dim, **factory)) if has_token else None
        self.pos_embed = nn.Parameter(torch.empty(1, self.patch_embed.num_patches + has_token, config.dim, **factory))
        self.blocks = nn.ModuleList(Block(config, layer, **factory) for layer in range(config.depth))
        # timm's names: a norm before the class token is taken, another one after the mean.
        final = nn.LayerNorm(config.dim, eps=config.norm_eps, **factory)
        self.norm = final if has_token else nn.Identity()
        self.fc_norm = nn.Identity() if has_token else final
        self.head = nn.Linear(config.dim, config.num_classes, **factory) if config.num_classes else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.trunc_normal_(self.pos_embed, std=float(self.config.pos_embed_std))
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=1e-6)

    def forward(self, images: Tensor, return_norms: bool = False) -> Tensor | tuple[Tensor, FrequencyNorms]:
        """Class scores [B, num_classes].

        return_norms: also the FrequencyNorms of the residual stream right after every layer's attention, [depth, B].
        """
        x, norms = self._features(images, return_norms)
        pooled = self.norm(x)[:, 0] if self.config.pool == "token" else x.mean(1)
        logits = self.head(self.fc_norm(pooled))
        return logits if norms is None else (logits, norms)

    def forward_features(self, images: Tensor) -> Tensor:
        """The tokens after the last block, [B, N, dim], class token first where there is one."""
        return self._features(images, False)[0]

    def _features(self, images: Tensor, return_norms: bool) -> tuple[Tensor, FrequencyNorms | None]:
        x = self.patch_embed(images)
        if self.cls_token is not None:
            x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), 1)
        return self._run_blocks(x + self.pos_embed, return_norms)


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
