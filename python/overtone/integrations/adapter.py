"""Adapters: SpectralAttention in the place, and with the signature, of another library's attention module.

Adapters are looked up by the full name of the class they replace, so that neither library is imported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from overtone.integrations.weights import Linears, class_name, is_conv1d, mismatch, read
from overtone.nn.attention import QKV, SpectralAttention
from overtone.nn.linear import is_hooked, is_ordinary, is_plain
from overtone.types import Spectrum

__all__ = ["Adapter", "adapter_for", "cached_spectra", "register"]

# By the full name: a library may have a class of the same name, with another formula, in another module.
_ADAPTERS: dict[str, type[Adapter]] = {}
_AdapterClass = TypeVar("_AdapterClass", bound="type[Adapter]")

_HOW_TO_KEEP_IT = "merge it into an ordinary layer first, or apply it after the conversion"


def register(*names: str) -> Callable[[_AdapterClass], _AdapterClass]:
    """A decorator: the adapter replaces modules of these classes, given by their full names."""

    def decorate(adapter: _AdapterClass) -> _AdapterClass:
        _ADAPTERS.update(dict.fromkeys(names, adapter))
        return adapter

    return decorate


def adapter_for(module: nn.Module) -> type[Adapter] | None:
    """The adapter of a library's self-attention module; None for any other module."""
    return None if getattr(module, "is_cross_attention", False) else _ADAPTERS.get(class_name(module))


class _CachedSpectra(threading.local):
    """The spectra that a converted model's hook has evaluated for the forward pass that runs in this thread.

    Other libraries' blocks pass nothing of ours on to their attention, and all threads share a module's attributes.
    """

    def __init__(self) -> None:
        # By the id of the conversion, then of the adapter: unlike modules, torch.compile tells ids apart across graph
        # breaks. The adapter is kept with its spectrum, so that its id is not reused.
        self._spectra: dict[int, dict[int, tuple[Adapter, Spectrum]]] = {}

    def put(self, batch: object, spectra: Iterable[tuple[Adapter, Spectrum]]) -> None:
        self._spectra[id(batch)] = {id(adapter): (adapter, spectrum) for adapter, spectrum in spectra}

    def clear(self, batch: object) -> None:
        self._spectra.pop(id(batch), None)

    def get(self, adapter: Adapter) -> Spectrum | None:
        entry = self._spectra.get(id(adapter.batch), {}).get(id(adapter))
        return None if entry is None else entry[1]


cached_spectra = _CachedSpectra()


class Adapter(nn.Module):
    """Holds the SpectralAttention `core`. A subclass knows one class of one library."""

    # The conversion whose hook evaluates this layer's spectrum together with those of others.
    batch: Any = None

    # The original's own parts, besides its linear layers, that ours has too.
    parts: tuple[str, ...] = ()

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

    @staticmethod
    def linears(module: Any, parent: Any) -> Linears:
        """The layers of queries, keys, values and output; or the packed one, and the output's."""
        raise NotImplementedError

    @classmethod
    def unsupported_reason(cls, module: Any, parent: Any) -> str | None:
        """What the module has, or has been given, that conversion would lose; or None."""
        linears = cls.linears(module, parent)
        names = {part: name for name, part in module.named_modules()}
        for part in (*names, *linears):
            if is_hooked(part) or "forward" in vars(part):
                return f"has hooks{_location(names.get(part))}, which conversion would drop: remove them first"
        for linear in linears:
            tensors = (getattr(linear, "weight", None), getattr(linear, "bias", None))
            for part in (linear, *tensors):
                if not _is_unchanged(part):
                    found = f"{class_name(part)}{_location(names.get(linear))}"
                    return f"has a {found}, which conversion would drop: {_HOW_TO_KEEP_IT}"
        return cls.own_unsupported_reason(module) or cls._unknown_part(module, linears) or mismatch(read(linears))

    @staticmethod
    def own_unsupported_reason(module: Any) -> str | None:
        """The same for options of this class alone."""
        return None

    @classmethod
    def _unknown_part(cls, module: nn.Module, linears: Linears) -> str | None:
        """Other versions of a library may have more parts in the same class."""
        for name, part in module.named_children():
            if not (name in cls.parts or isinstance(part, nn.Identity) or any(part is linear for linear in linears)):
                return f"has a part {name!r} ({class_name(part)}), which SpectralAttention does not support"
        for name, _ in module.named_parameters(recurse=False):
            return f"has a parameter {name!r}, which SpectralAttention does not support"
        return None

    def attach(self, parent: Any) -> None:
        """Called after the adapter has taken the original's place."""

    def detach(self, parent: Any) -> None:
        """Called after the original has been put back."""

    def attend(self, x: Tensor, cache: Any = None, **masks: Any) -> Tensor:
        """The core on tokens x; `cache`, where given, takes new keys and values and returns all of them."""
        cached_spectrum = None if _is_checkpointed() else cached_spectra.get(self)
        spectrum = self.core.own_spectrum(cached_spectrum)
        qkv = self.core.project(x, spectrum)
        if cache is not None:
            qkv = QKV(qkv.query, *cache(qkv.key, qkv.value))
        if masks.get("attn_mask") is not None:
            masks["attn_mask"] = masks["attn_mask"][..., : qkv.key.shape[2]]
        return self.core.attend(qkv, spectrum, **masks)


def _is_checkpointed() -> bool:
    """Whether torch.utils.checkpoint runs this layer. It must then evaluate its own spectrum, as it will in backward.

    A compiler's checkpoint keeps what comes from outside.
    """
    if torch.compiler.is_compiling():
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _location(name: str | None) -> str:
    """Which part of an attention module, for an error; BERT has its output layer outside."""
    return " in its output layer" if name is None else f" in {name}" if name else ""


def _is_unchanged(part: Any) -> bool:
    """Whether it is a linear layer as its library made it, or an ordinary tensor of one."""
    if isinstance(part, nn.Module):
        return is_plain(part, type(part) if is_conv1d(part) else nn.Linear)
    return part is None or is_ordinary(part)
