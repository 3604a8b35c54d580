"""The attention modules of a model that have a reader, each with the block whose tokens belong to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from overtone.analysis.readers import Reader, Weights, reader_of


class UnsupportedAttention(Exception):
    """Why a module's attention cannot be analysed."""


@dataclass
class Site:
    """An attention module of a model, and the block whose tokens belong to it."""

    name: str
    module: Any  # an nn.Module whose attributes the reader knows
    reader: Reader
    block: nn.Module

    def weights(self) -> Weights:
        w_v, w_proj, num_heads = self.reader.weights(self.module)
        if w_v.shape[1] != w_proj.shape[0] or w_v.shape[0] != w_proj.shape[1] or w_v.shape[1] % num_heads:
            raise UnsupportedAttention(
                f"W_V {list(w_v.shape)} and W_proj {list(w_proj.shape)} with {num_heads} heads do not make a square "
                "weight (grouped or multi-query attention?)"
            )
        return Weights(w_v.detach(), w_proj.detach(), num_heads)


def find_sites(model: nn.Module) -> tuple[list[Site], dict[str, str]]:
    """The attention modules that have a reader, in order, and what looks like attention but has none."""
    modules = dict(model.named_modules())
    sites: list[Site] = []
    for name, module in modules.items():
        reader = reader_of(module)
        if reader is not None and not any(_is_inside(name, site.name) for site in sites):
            sites.append(Site(name, module, reader, _block_of(name, modules)))
    skipped = {
        name: f"no reader for {type(module).__name__}; see overtone.analysis.readers"
        for name, module in modules.items()
        if "attention" in type(module).__name__.lower()
        and not any(_is_inside(name, site.name) or _is_inside(site.name, name) for site in sites)
    }
    # The outermost of nested modules is enough.
    return sites, {name: why for name, why in skipped.items() if not any(_is_within(name, other) for other in skipped)}


def _is_inside(name: str, outer: str) -> bool:
    return name == outer or _is_within(name, outer)


def _is_within(name: str, outer: str) -> bool:
    return name != outer and (outer == "" or name.startswith(f"{outer}."))


def _block_of(name: str, modules: dict[str, nn.Module]) -> nn.Module:
    """The nearest ancestor that is an element of a list of blocks, else the parent, else the module itself."""
    ancestor, _, _ = name.rpartition(".")
    while ancestor:
        parent, _, _ = ancestor.rpartition(".")
        if isinstance(modules[parent], nn.ModuleList | nn.Sequential):
            return modules[ancestor]
        ancestor = parent
    parent, _, _ = name.rpartition(".")
    return modules[parent] if parent else modules[name]
