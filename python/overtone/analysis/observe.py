"""Watches a model run: the attention matrices, the heads' outputs and the tokens of every layer, as they are computed.

Attention is caught where PyTorch computes it, inside a module that a reader knows: in scaled_dot_product_attention
(from its queries, keys and mask), in a softmax over [B, H, N, N], or in multi_head_attention_forward. So normalised
queries, rotary positions, biases and masks are all in it. Nothing is kept: a layer's tensors go to its `Listener`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from overtone import reference
from overtone.analysis.readers import Reader, Weights, own_attention, reader_of

SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax)


class Unreadable(Exception):
    """Why a module's attention cannot be analysed."""


class Listener(Protocol):
    """Takes what one layer computes for a batch."""

    def on_input(self, tokens: Tensor) -> None:
        """The tokens [B, N, C] that enter the layer's block."""

    def on_attention(self, attention: Tensor, heads: Tensor) -> None:
        """A [B, H, N, N] and the heads' outputs A V [B, H, N, k]."""

    def on_output(self, tokens: Tensor) -> None:
        """The tokens that leave the block."""


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
            raise Unreadable(
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
    unread = {
        name: f"no reader for {type(module).__name__}; see overtone.analysis.readers"
        for name, module in modules.items()
        if "attention" in type(module).__name__.lower()
        and not any(_is_inside(name, site.name) or _is_inside(site.name, name) for site in sites)
    }
    # The outermost of nested modules is enough.
    return sites, {name: why for name, why in unread.items() if not any(_is_within(name, other) for other in unread)}


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


@dataclass
class _Seen:
    """What one run of an attention module has shown so far."""

    attention: list[Tensor] = field(default_factory=list)
    heads: Tensor | None = None


class Observer(TorchFunctionMode):
    """Catches attention inside the modules that are running."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[_Seen] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.running:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._multi_head(*args, **kwargs)
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self.running[-1].attention.append(_attention_of(*args, **kwargs))
        elif func in SOFTMAXES and result.dim() == 4:
            self.running[-1].attention.append(result)
        return result

    def _multi_head(self, *args: Any, need_weights: bool = True, average_attn_weights: bool = True, **kwargs: Any):
        kwargs |= {"need_weights": True, "average_attn_weights": False}
        output, weights = F.multi_head_attention_forward(*args, **kwargs)
        assert weights is not None  # as asked for
        self.running[-1].attention.append(weights)
        if not need_weights:
            return output, None
        return output, weights.mean(1) if average_attn_weights else weights


def _attention_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention's matrices, in float32 or float64."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    return reference.attention_weights(query, key, attn_mask=attn_mask, is_causal=is_causal, scale=scale)


@contextmanager
def observed(sites: list[Site], listeners: list[Listener], unread: dict[str, str]) -> Iterator[None]:
    """While it is open, what the model computes goes to the listeners; a site that cannot be read goes to `unread`."""
    with ExitStack() as stack:
        observer = stack.enter_context(Observer())
        for site, listener in zip(sites, listeners, strict=True):
            for handle in _hooks(site, listener, observer, unread):
                stack.callback(handle.remove)
        yield


def _hooks(site: Site, listener: Listener, observer: Observer, unread: dict[str, str]) -> list[Any]:
    def enter_block(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if site.name not in unread:
            listener.on_input(_tokens(site, (*args, *kwargs.values())))

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
        observer.running.append(_Seen())

    def project(module: nn.Module, args: tuple) -> None:
        if observer.running:
            observer.running[-1].heads = args[0]

    def leave(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        seen = observer.running.pop()
        if site.name in unread:
            return
        try:
            listener.on_attention(*_matrices(site, seen, (*args, *kwargs.values()), kwargs))
        except Unreadable as error:
            unread[site.name] = str(error)

    def leave_block(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if site.name not in unread:
            listener.on_output(_tokens(site, output if isinstance(output, tuple | list) else (output,)))

    handles = [
        site.block.register_forward_pre_hook(enter_block, with_kwargs=True),
        site.module.register_forward_pre_hook(enter, with_kwargs=True),
        site.module.register_forward_hook(leave, with_kwargs=True),
        site.block.register_forward_hook(leave_block, with_kwargs=True),
    ]
    projection = site.reader.projection(site.module)
    if projection is not None:
        handles.append(projection.register_forward_pre_hook(project))
    return handles


def _tokens(site: Site, values: Any) -> Tensor:
    """The first tensor that can be tokens, [B, N, C]; images of tokens are flattened."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 3:
            is_batch_first = getattr(site.module, "batch_first", True)  # torch.nn.MultiheadAttention
            return value.flatten(1, -2) if is_batch_first else value.transpose(0, 1)
    raise TypeError(f"analyze: the block of {site.name!r} has no tokens [B, N, C] among its arguments or results")


def _matrices(site: Site, seen: _Seen, values: tuple, kwargs: dict) -> tuple[Tensor, Tensor]:
    """Attention and the heads' outputs."""
    own = own_attention(site.module)
    if own is not None:
        seen.attention = [own.attention_weights(_tokens(site, values), **_masks(site, kwargs))]
    if len(seen.attention) != 1:
        raise Unreadable(
            f"{len(seen.attention)} calls of scaled_dot_product_attention or softmax were seen in it, wanted 1"
        )
    attention = seen.attention[0]
    if attention.dim() != 4 or attention.shape[-1] != attention.shape[-2]:
        raise Unreadable(f"attention of shape {list(attention.shape)}, wanted [B, H, N, N]: self-attention")
    num_heads = site.weights().num_heads
    if attention.shape[1] != num_heads:
        raise Unreadable(f"attention of {attention.shape[1]} heads, its weights have {num_heads}")
    if seen.heads is not None:
        return attention, seen.heads.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    return attention, _heads(site, attention, _tokens(site, values))


def _masks(site: Site, kwargs: dict) -> dict[str, Any]:
    """What a module that computes its attention for us must know: the mask, or that it is causal."""
    mask = next((kwargs[name] for name in ("attn_mask", "attention_mask") if kwargs.get(name) is not None), None)
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(site.module, "is_causal", False) if is_causal is None else is_causal
    return {"attn_mask": mask, "is_causal": bool(is_causal) and mask is None}


def _heads(site: Site, attention: Tensor, tokens: Tensor) -> Tensor:
    """A V where no projection module shows it; without the values' bias unless the module projects by itself."""
    own = own_attention(site.module)
    if hasattr(own, "project"):
        values = own.project(tokens)[2].to(attention.dtype)
    else:
        values = tokens.to(attention.dtype) @ site.weights().w_v.to(attention.dtype)
        values = values.unflatten(-1, (attention.shape[1], -1)).transpose(1, 2)
    return attention @ values
