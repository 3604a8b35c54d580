"""Attention of timm's ViT and DeiT: adapters of models that exist, and a class for new ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from overtone import _validate as validate
from overtone.integrations.adapter import Adapter, register
from overtone.integrations.weights import Linears
from overtone.nn.attention import SpectralAttention

__all__ = ["TimmAttention", "timm_attention"]


@register("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention")
class TimmAttention(Adapter):
    """timm.layers.Attention."""

    parts = ("attn_drop", "proj_drop")

    def __init__(self, core: SpectralAttention, module: Any) -> None:
        super().__init__(core, module)
        self.proj_drop = module.proj_drop

    @staticmethod
    def attention_dropout(module: Any) -> float:
        return module.attn_drop.p

    @staticmethod
    def linears(module: Any, parent: Any) -> Linears:
        return module.qkv, module.proj

    @staticmethod
    def own_unsupported_reason(module: Any) -> str | None:
        norms = (getattr(module, name, None) for name in ("q_norm", "k_norm", "norm"))
        if not all(norm is None or isinstance(norm, nn.Identity) for norm in norms):
            return "normalizes its queries, keys or heads, which SpectralAttention does not support"
        if getattr(module, "gate", None) is not None:
            return "has a gate, which SpectralAttention does not support"
        return None

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.proj_drop(self.attend(x, attn_mask=attn_mask, is_causal=is_causal))


def timm_attention(regime: str = "free", kind: str = "symmetric", **options: Any) -> type[nn.Module]:
    """A class for `timm.create_model(…, attn_layer=…)`: the model's attention layers are then ot.nn.SpectralAttention.

    With regime "free" parameters have timm's names and shapes, so that timm's checkpoints load and ours load there.
    Every layer evaluates its own spectrum; `ot.reparameterize` evaluates those of a whole model together.

    Args:
        regime: "free", "sharpen" or "smooth".
        kind: of the spectra, "symmetric" or "general".
        **options: any other of SpectralAttention but what timm decides: dim, num_heads, biases, dropout, device, dtype.
    """
    SpectralAttention(2, 1, regime, kind, device="meta", **options)  # what is wrong is said here, not inside timm

    class Attention(SpectralAttention):
        """timm wants a class. Calling this one makes a SpectralAttention of timm's arguments."""

        def __new__(  # type: ignore[misc]
            cls,
            dim: int,
            num_heads: int = 8,
            *,
            qkv_bias: bool = False,
            proj_bias: bool = True,
            attn_drop: float = 0.0,
            device: Any = None,
            dtype: torch.dtype | None = None,
            norm_layer: Any = None,
            **others: Any,
        ) -> SpectralAttention:
            """The keywords are timm's."""
            for name, value in others.items():
                if value:
                    raise ValueError(f"timm_attention: {name}: got {validate.describe(value)}, which it does not have")
            return SpectralAttention(
                dim, num_heads, regime, kind, qkv_bias=qkv_bias, proj_bias=proj_bias, attn_drop=attn_drop,
                device=device, dtype=dtype, **options,
            )  # fmt: skip

    return Attention
