"""Adapters: our attention in the place, and with the signature, of another library's module.

A class is known by its name and its package, so that neither library is imported.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overtone.nn.attention import SpectralAttention
from overtone.types import Spectrum

__all__ = ["Adapter", "Weights", "adapter_for", "running", "write_linear"]


class Weights(NamedTuple):
    """An attention layer's weights [out, in] as nn.Linear holds them, and its biases, zero where it has none."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    query_bias: Tensor
    key_bias: Tensor
    value_bias: Tensor
    output_bias: Tensor


class _Running(threading.local):
    """The spectra that a converted model's hook evaluated for the forward that runs in this thread.

    Somebody else's blocks hand nothing through to their attention, and an attribute of a module is seen by all threads.
    """

    def __init__(self) -> None:
        # By id, which torch.compile tells apart across graph breaks as it does not modules; the adapter is held with
        # its spectrum, so that nothing else has its id.
        self._given: dict[int, tuple[Adapter, Spectrum]] = {}

    def give(self, adapter: Adapter, spectrum: Spectrum) -> None:
        self._given[id(adapter)] = (adapter, spectrum)

    def take_back(self, adapter: Adapter) -> None:
        self._given.pop(id(adapter), None)

    def spectrum(self, adapter: Adapter) -> Spectrum | None:
        given = self._given.get(id(adapter))
        return None if given is None else given[1]


running = _Running()


class Adapter(nn.Module):
    """Holds the SpectralAttention `core`; subclasses know one class of one library."""

    # The conversion whose hook evaluates this layer's spectrum with those of others.
    batch: Any = None

    def __init__(self, core: SpectralAttention, module: nn.Module) -> None:
        super().__init__()
        self.core = core

    @staticmethod
    def num_heads(module: Any) -> int:
        return module.num_heads

    @staticmethod
    def scale(module: Any) -> float:
        return module.scale

    @staticmethod
    def attention_dropout(module: Any) -> float:
        raise NotImplementedError

    @staticmethod
    def obstacle(module: Any) -> str | None:
        """What the module has that ours cannot do, or None."""
        return None

    @staticmethod
    def linears(module: Any, parent: Any) -> tuple[Any, ...]:
        """The layers of queries, keys, values and output; or the packed one, and the output's."""
        raise NotImplementedError

    @classmethod
    def read(cls, module: nn.Module, parent: nn.Module) -> Weights:
        """Copies of the module's weights."""
        parts = [_read(linear) for linear in cls.linears(module, parent)]
        if len(parts) == 2:
            (packed, packed_bias), output = parts
            parts = [*zip(packed.chunk(3), packed_bias.chunk(3), strict=True), output]
        weights, biases = zip(*parts, strict=True)
        return Weights(*weights, *biases)

    @classmethod
    def write(cls, module: nn.Module, parent: nn.Module, weights: Weights) -> None:
        """Write weights into the original module."""
        linears = cls.linears(module, parent)
        matrices, biases = list(weights[:4]), list(weights[4:])
        if len(linears) == 2:
            matrices = [torch.cat(matrices[:3]), matrices[3]]
            biases = [torch.cat(biases[:3]), biases[3]]
        for linear, weight, bias in zip(linears, matrices, biases, strict=True):
            write_linear(linear, weight, bias)

    def take_over(self, parent: Any) -> None:
        """Called once the adapter is in its place."""

    def give_back(self, parent: Any) -> None:
        """Called once the original is back in its place."""

    def attend(self, x: Tensor, cache: Any = None, **masks: Any) -> Tensor:
        """The core on tokens x; `cache`, where given, takes new keys and values and returns all of them."""
        given = None if _is_checkpointed() else running.spectrum(self)
        spectrum = self.core.own_spectrum(given)
        query, key, value = self.core.project(x, spectrum)
        if cache is not None:
            key, value = cache(key, value)
        if masks.get("attn_mask") is not None:
            masks["attn_mask"] = masks["attn_mask"][..., : key.shape[2]]
        return self.core.attend(query, key, value, spectrum, **masks)


def _is_checkpointed() -> bool:
    """Whether torch.utils.checkpoint runs this layer: it must do now what it will do in backward, on its own.

    A compiler's checkpoint keeps what comes from outside.
    """
    if torch.compiler.is_compiling():
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


class TimmAttention(Adapter):
    """timm.layers.Attention."""

    def __init__(self, core: SpectralAttention, module: Any) -> None:
        super().__init__(core, module)
        self.proj_drop = module.proj_drop

    @staticmethod
    def attention_dropout(module: Any) -> float:
        return module.attn_drop.p

    @staticmethod
    def obstacle(module: Any) -> str | None:
        if not all(isinstance(getattr(module, name), nn.Identity) for name in ("q_norm", "k_norm", "norm")):
            return "normalises its queries, keys or heads"
        if getattr(module, "gate", None) is not None:
            return "has a gate"
        shape = (3 * module.proj.weight.shape[0], module.proj.weight.shape[1])
        return None if module.qkv.weight.shape == shape else "has heads that do not add up to its width"

    @staticmethod
    def linears(module: Any, parent: Any) -> tuple[Any, ...]:
        return module.qkv, module.proj

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.proj_drop(self.attend(x, attn_mask=attn_mask, is_causal=is_causal))


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
        """transformers' rule: causal where the module is, unless a mask says more or there is one query only."""
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


class ViTAttention(HuggingFaceAttention):
    """transformers' ViTAttention and DeiTAttention."""

    @staticmethod
    def attention_dropout(module: Any) -> float:
        return module.attention_dropout

    @staticmethod
    def linears(module: Any, parent: Any) -> tuple[Any, ...]:
        return module.q_proj, module.k_proj, module.v_proj, module.o_proj

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        return self.attend_to(hidden_states, attention_mask, None, kwargs), None


class BertSelfAttention(HuggingFaceAttention):
    """transformers' BertSelfAttention, which has its output projection beside it, in the parent's `output`."""

    @staticmethod
    def attention_dropout(module: Any) -> float:
        return module.dropout.p

    @staticmethod
    def linears(module: Any, parent: Any) -> tuple[Any, ...]:
        return module.query, module.key, module.value, parent.output.dense

    def take_over(self, parent: Any) -> None:
        # In a list, so that it is not a submodule: it is not part of the converted model.
        self._dense = [parent.output.dense]
        parent.output.dense = nn.Identity()

    def give_back(self, parent: Any) -> None:
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


class GPT2Attention(HuggingFaceAttention):
    """transformers' GPT2Attention, whose Conv1D layers hold [in, out]."""

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
    def linears(module: Any, parent: Any) -> tuple[Any, ...]:
        return module.c_attn, module.c_proj

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        return self.resid_dropout(self.attend_to(hidden_states, attention_mask, past_key_values, kwargs)), None


ADAPTERS: dict[tuple[str, str], type[Adapter]] = {
    ("timm", "Attention"): TimmAttention,
    ("transformers", "ViTAttention"): ViTAttention,
    ("transformers", "DeiTAttention"): ViTAttention,
    ("transformers", "BertSelfAttention"): BertSelfAttention,
    ("transformers", "GPT2Attention"): GPT2Attention,
}


def adapter_for(module: nn.Module) -> type[Adapter] | None:
    """The adapter of a library's self-attention module, None for any other module."""
    package = type(module).__module__.partition(".")[0]
    if getattr(module, "is_cross_attention", False):
        return None
    return ADAPTERS.get((package, type(module).__name__))


def _is_transposed(linear: nn.Module) -> bool:
    return type(linear).__name__ == "Conv1D"


def _read(linear: Any) -> tuple[Tensor, Tensor]:
    weight = linear.weight.detach().mT if _is_transposed(linear) else linear.weight.detach()
    bias = weight.new_zeros(weight.shape[0]) if linear.bias is None else linear.bias.detach()
    return weight, bias


def write_linear(linear: Any, weight: Tensor, bias: Tensor) -> None:
    linear.weight.copy_(weight.mT if _is_transposed(linear) else weight)
    if linear.bias is not None:
        linear.bias.copy_(bias)
    elif bool((bias != 0).any()):
        raise ValueError(f"restore: {linear} has no bias to write the learned one into; take weights='original'")
