"""Attention of timm's ViT and DeiT."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from overtone.integrations.adapter import Adapter, register
from overtone.integrations.weights import Linears
from overtone.nn.attention import SpectralAttention

__all__ = ["TimmAttention"]


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
