"""Adapters: our attention in the place, and with the signature, of another library's module.

A class is known by its full name, so that neither library is imported.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overtone.nn.attention import QKV, SpectralAttention
from overtone.nn.linear import is_hooked, is_ordinary, is_plain
from overtone.types import Spectrum

__all__ = [
    "Adapter",
    "Linears",
    "Trainable",
    "Weights",
    "adapter_for",
    "class_name",
    "read",
    "running",
    "set_trainable",
    "shares",
    "trainable",
    "write",
    "write_linear",
]


# Linear layers of several classes, all with a weight and a bias.
Linears = tuple[Any, ...]


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


class Trainable(NamedTuple):
    """Whether each of `Weights` wants a gradient."""

    query: bool
    key: bool
    value: bool
    output: bool
    query_bias: bool
    key_bias: bool
    value_bias: bool
    output_bias: bool


class _Running(threading.local):
    """The spectra that a converted model's hook evaluated for the forward that runs in this thread.

    Somebody else's blocks hand nothing through to their attention, and an attribute of a module is seen by all threads.
    """

    def __init__(self) -> None:
        # By the id of the conversion and then of the adapter: torch.compile tells ids apart across graph breaks, as it
        # does not modules. The adapter is held with its spectrum, so that nothing else has its id.
        self._given: dict[int, dict[int, tuple[Adapter, Spectrum]]] = {}

    def give(self, batch: object, spectra: Iterable[tuple[Adapter, Spectrum]]) -> None:
        self._given[id(batch)] = {id(adapter): (adapter, spectrum) for adapter, spectrum in spectra}

    def take_back(self, batch: object) -> None:
        self._given.pop(id(batch), None)

    def spectrum(self, adapter: Adapter) -> Spectrum | None:
        given = self._given.get(id(adapter.batch), {}).get(id(adapter))
        return None if given is None else given[1]


running = _Running()


class Adapter(nn.Module):
    """Holds the SpectralAttention `core`; subclasses know one class of one library."""

    # The conversion whose hook evaluates this layer's spectrum with those of others.
    batch: Any = None

    def __init__(self, core: SpectralAttention, module: nn.Module) -> None:
        super().__init__()
        self.core = core
        self.training = core.training

    @staticmethod
    def num_heads(module: Any) -> int:
        return module.num_heads

    @staticmethod
    def scale(module: Any) -> float:
        return module.scale

    @staticmethod
    def attention_dropout(module: Any) -> float:
        raise NotImplementedError

    # The module's own parts, besides its linear layers, that ours has too.
    parts: tuple[str, ...] = ()

    @classmethod
    def obstacle(cls, module: Any, parent: Any) -> str | None:
        """What the module has, or has been given, that ours would lose; or None."""
        linears = cls.linears(module, parent)
        names = {part: name for name, part in module.named_modules()}
        for part in (*names, *linears):
            if is_hooked(part) or "forward" in vars(part):
                return f"has hooks{_on(names.get(part))}, which conversion would drop: remove them first"
        for linear in linears:
            tensors = (getattr(linear, "weight", None), getattr(linear, "bias", None))
            for kind in (part for part in (linear, *tensors) if not _is_ordinary(part)):
                return f"has a {class_name(kind)}{_on(names.get(linear))}, which conversion would drop: {_WAY_OUT}"
        return cls.own_obstacle(module) or cls._unknown_part(module, linears) or _unlike(read(linears))

    @staticmethod
    def own_obstacle(module: Any) -> str | None:
        """What this class knows that ours cannot do."""
        return None

    @classmethod
    def _unknown_part(cls, module: nn.Module, linears: Linears) -> str | None:
        """Other versions of a library may have more in the same class."""
        for name, part in module.named_children():
            if not (name in cls.parts or isinstance(part, nn.Identity) or any(part is linear for linear in linears)):
                return f"has a part {name!r} ({class_name(part)}), which the spectral attention has not"
        for name, _ in module.named_parameters(recurse=False):
            return f"has a parameter {name!r}, which the spectral attention has not"
        return None

    @staticmethod
    def linears(module: Any, parent: Any) -> Linears:
        """The layers of queries, keys, values and output; or the packed one, and the output's."""
        raise NotImplementedError

    def take_over(self, parent: Any) -> None:
        """Called once the adapter is in its place."""

    def give_back(self, parent: Any) -> None:
        """Called once the original is back in its place."""

    def attend(self, x: Tensor, cache: Any = None, **masks: Any) -> Tensor:
        """The core on tokens x; `cache`, where given, takes new keys and values and returns all of them."""
        given = None if _is_checkpointed() else running.spectrum(self)
        spectrum = self.core.own_spectrum(given)
        qkv = self.core.project(x, spectrum)
        if cache is not None:
            qkv = QKV(qkv.query, *cache(qkv.key, qkv.value))
        if masks.get("attn_mask") is not None:
            masks["attn_mask"] = masks["attn_mask"][..., : qkv.key.shape[2]]
        return self.core.attend(qkv, spectrum, **masks)


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

    parts = ("attn_drop", "proj_drop")

    def __init__(self, core: SpectralAttention, module: Any) -> None:
        super().__init__(core, module)
        self.proj_drop = module.proj_drop

    @staticmethod
    def attention_dropout(module: Any) -> float:
        return module.attn_drop.p

    @staticmethod
    def own_obstacle(module: Any) -> str | None:
        norms = (getattr(module, name, None) for name in ("q_norm", "k_norm", "norm"))
        if not all(norm is None or isinstance(norm, nn.Identity) for norm in norms):
            return "normalises its queries, keys or heads, which the spectral attention has not"
        if getattr(module, "gate", None) is not None:
            return "has a gate, which the spectral attention has not"
        return None

    @staticmethod
    def linears(module: Any, parent: Any) -> Linears:
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
    def linears(module: Any, parent: Any) -> Linears:
        return module.q_proj, module.k_proj, module.v_proj, module.o_proj

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        return self.attend_to(hidden_states, attention_mask, None, kwargs), None


class BertSelfAttention(HuggingFaceAttention):
    """transformers' BertSelfAttention, which has its output projection beside it, in the parent's `output`."""

    parts = ("dropout",)

    @staticmethod
    def attention_dropout(module: Any) -> float:
        return module.dropout.p

    @staticmethod
    def linears(module: Any, parent: Any) -> Linears:
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


# By the full name: a library may have a class of the same name, and another formula, in another place.
ADAPTERS: dict[str, type[Adapter]] = {
    "timm.layers.attention.Attention": TimmAttention,
    "timm.models.vision_transformer.Attention": TimmAttention,
    "transformers.models.vit.modeling_vit.ViTAttention": ViTAttention,
    "transformers.models.deit.modeling_deit.DeiTAttention": ViTAttention,
    "transformers.models.bert.modeling_bert.BertSelfAttention": BertSelfAttention,
    "transformers.models.gpt2.modeling_gpt2.GPT2Attention": GPT2Attention,
}

_WAY_OUT = "merge it into an ordinary layer first, or put it there after the conversion"


def adapter_for(module: nn.Module) -> type[Adapter] | None:
    """The adapter of a library's self-attention module, None for any other module."""
    return None if getattr(module, "is_cross_attention", False) else ADAPTERS.get(class_name(module))


def class_name(thing: object) -> str:
    """As it would be imported."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _on(name: str | None) -> str:
    """Which part of an attention module, for an error; BERT has its output layer outside."""
    return " in its output layer" if name is None else f" in {name}" if name else ""


def _is_ordinary(thing: Any) -> bool:
    """An unchanged linear layer, or a tensor of one."""
    if isinstance(thing, nn.Module):
        return is_plain(thing, type(thing) if _is_conv1d(thing) else nn.Linear)
    return thing is None or is_ordinary(thing)


def _is_conv1d(linear: nn.Module) -> bool:
    """transformers' linear layer whose weight is [in, out]."""
    return class_name(linear) == "transformers.pytorch_utils.Conv1D"


def _read(linear: Any) -> tuple[Tensor, Tensor]:
    weight = linear.weight.detach().mT if _is_conv1d(linear) else linear.weight.detach()
    bias = weight.new_zeros(weight.shape[0]) if linear.bias is None else linear.bias.detach()
    return weight, bias


def _unlike(weights: Weights) -> str | None:
    """How the layers do not fit into one attention."""
    matrices = weights[:4]
    if len({x.shape for x in matrices}) > 1 or matrices[0].shape[0] != matrices[0].shape[1]:
        return "has heads that do not add up to its width, which the spectral attention has not"
    if len({(x.dtype, x.device) for x in weights}) > 1:
        return "has layers of several dtypes or devices, which the spectral attention has not"
    return None


def read(linears: Linears) -> Weights:
    """Copies of an attention module's weights."""
    parts = [_read(linear) for linear in linears]
    if len(parts) == 2:
        (packed, packed_bias), output = parts
        parts = [*zip(packed.chunk(3), packed_bias.chunk(3), strict=True), output]
    weights, biases = zip(*parts, strict=True)
    return Weights(*weights, *biases)


def write(linears: Linears, weights: Weights) -> None:
    """Weights into the original layers."""
    for linear, matrices, biases in shares(linears, weights):
        write_linear(linear, torch.cat(matrices), torch.cat(biases))


def trainable(linears: Linears) -> Trainable:
    """Which weights and biases want a gradient; a bias that is missing, as its layer's weight does."""
    weights = [linear.weight.requires_grad for linear in linears]
    biases = [(linear.weight if linear.bias is None else linear.bias).requires_grad for linear in linears]
    if len(linears) == 2:
        weights, biases = ([each[0]] * 3 + each[1:] for each in (weights, biases))
    return Trainable(*weights, *biases)


def set_trainable(linears: Linears, wanted: Trainable) -> None:
    """The same into the original layers; a packed weight wants a gradient if a part of it does."""
    for linear, weights, biases in shares(linears, wanted):
        linear.weight.requires_grad_(any(weights))
        if linear.bias is not None:
            linear.bias.requires_grad_(any(biases))


def shares(linears: Linears, values: tuple) -> list[tuple[Any, tuple, tuple]]:
    """Every layer with what belongs to its weight and to its bias, in parts."""
    ends = (0, 3, 4) if len(linears) == 2 else range(5)
    return [
        (linear, values[:4][start:end], values[4:][start:end])
        for linear, (start, end) in zip(linears, itertools.pairwise(ends), strict=True)
    ]


def write_linear(linear: Any, weight: Tensor, bias: Tensor) -> None:
    linear.weight.copy_(weight.mT if _is_conv1d(linear) else weight)
    if linear.bias is not None:
        linear.bias.copy_(bias)
