"""Attention of Hugging Face transformers' ViT, DeiT, BERT and GPT-2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from overtone.integrations.adapter import Adapter, register
from overtone.integrations.weights import Linears
from overtone.nn.attention import SpectralAttention

__all__ = ["BertSelfAttention", "GPT2Attention", "HuggingFaceAttention", "ViTAttention"]


class HuggingFaceAttention(Adapter):
    """What the attention modules of transformers have in common."""

    def __init__(self, core: SpectralAttention, module: Any) -> None:
        super().__init__(core, module)
        self.is_causal = bool(module.is_causal)
        self.layer_idx = getattr(module, "layer_idx", None)

    @staticmethod
    def num_heads(module: Any) -> int:
        return module.num_attention_heads

    @staticmethod
    def scale(module: Any) -> float:
        return module.scaling

    def attend_to(self, x: Tensor, attention_mask: Tensor | None, past: Any, kwargs: dict[str, Any]) -> Tensor:
        """transformers' rule: causal if the module is, unless there is a mask (which says it all) or a single query."""
        if attention_mask is not None and attention_mask.dim() != 4:
            got = list(attention_mask.shape)
            raise ValueError(
                f"attention_mask: got shape {got}, wanted [B, 1, N, M]: load with attn_implementation='sdpa'"
            )
        if past is not None:
            past = getattr(past, "self_attention_cache", past)
        causal = kwargs.get("is_causal")
        causal = self.is_causal if causal is None else bool(causal)
        if attention_mask is not None:
            causal = False
            if attention_mask.dtype != torch.bool:
                attention_mask = attention_mask.to(x.dtype)
        cache = None if past is None else lambda key, value: past.update(key, value, self.layer_idx)
        return self.attend(x, cache, attn_mask=attention_mask, is_causal=causal and x.shape[1] > 1)


@register("transformers.models.vit.modeling_vit.ViTAttention", "transformers.models.deit.modeling_deit.DeiTAttention")
class ViTAttention(HuggingFaceAttention):
    """transformers' ViTAttention and DeiTAttention."""

    @staticmethod
    def attention_dropout(module: Any) -> float:
        return module.attention_dropout

    @staticmethod
    def linears(module: Any, parent: Any) -> Linears:
        return module.q_proj, module.k_proj, module.v_proj, module.o_proj

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        return self.attend_to(hidden_states, attention_mask, None, kwargs), None


@register("transformers.models.bert.modeling_bert.BertSelfAttention")
class BertSelfAttention(HuggingFaceAttention):
    """transformers' BertSelfAttention, whose output projection is outside, in the parent's `output`."""

    parts = ("dropout",)

    @staticmethod
    def attention_dropout(module: Any) -> float:
        return module.dropout.p

    @staticmethod
    def linears(module: Any, parent: Any) -> Linears:
        return module.query, module.key, module.value, parent.output.dense

    def attach(self, parent: Any) -> None:
        # In a list, so that it is no submodule: it is not part of the converted model.
        self._dense = [parent.output.dense]
        parent.output.dense = nn.Identity()

    def detach(self, parent: Any) -> None:
        (parent.output.dense,) = self._dense

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        encoder_hidden_states: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        return self.attend_to(hidden_states, attention_mask, past_key_values, kwargs), None


@register("transformers.models.gpt2.modeling_gpt2.GPT2Attention")
class GPT2Attention(HuggingFaceAttention):
    """transformers' GPT2Attention, whose Conv1D layers have weights [in, out]."""

    parts = ("attn_dropout", "resid_dropout")

    def __init__(self, core: SpectralAttention, module: Any) -> None:
        super().__init__(core, module)
        self.resid_dropout = module.resid_dropout

    @staticmethod
    def num_heads(module: Any) -> int:
        return module.num_heads

    @staticmethod
    def attention_dropout(module: Any) -> float:
        return module.attn_dropout.p

    @staticmethod
    def linears(module: Any, parent: Any) -> Linears:
        return module.c_attn, module.c_proj

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        return self.resid_dropout(self.attend_to(hidden_states, attention_mask, past_key_values, kwargs)), None
