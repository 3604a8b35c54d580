"""Watches a model run: the attention matrices, the heads' outputs and the tokens of every layer, as they are computed.

Attention is caught where PyTorch computes it, inside a module that a reader knows: in scaled_dot_product_attention
(from its queries, keys and mask), in a softmax over [B, H, N, N], or in multi_head_attention_forward. So normalized
queries, rotary positions, biases and masks are all in it. Whether it is self-attention is known by what queries and
keys were computed from, which is followed from the module's arguments on; cross attention may have as many keys as
queries. Nothing is kept: a layer's tensors go to its `Callbacks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from overtone import reference
from overtone.analysis.readers import own_attention
from overtone.analysis.sites import Site, UnsupportedAttention

SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax)
PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum, torch.baddbmm)

# The arguments of a module that a tensor was computed from, by their place.
Origins: TypeAlias = frozenset[int]
NOWHERE: Origins = frozenset()


class Callbacks(Protocol):
    """What one layer computes for a batch goes here."""

    def on_input(self, tokens: Tensor) -> None:
        """The tokens [B, N, C] that enter the layer's block."""

    def on_attention(self, attention: Tensor, heads: Tensor) -> None:
        """A [B, H, N, N] and the heads' outputs A V [B, H, N, k]."""

    def on_output(self, tokens: Tensor) -> None:
        """The tokens that leave the block."""


class _Attention(NamedTuple):
    """An attention matrix, and what its queries and keys come from."""

    matrix: Tensor
    query: Origins
    key: Origins


class _Capture:
    """What one run of an attention module has shown so far."""

    def __init__(self, arguments: Any) -> None:
        self.attention: list[_Attention] = []
        self.heads: Tensor | None = None
        self.values: Tensor | None = None  # [B, N, E], of torch.nn.MultiheadAttention
        self._origins: Any = WeakTensorKeyDictionary()
        self._sides: Any = WeakTensorKeyDictionary()  # of products of queries and keys: what each side comes from
        places: dict[tuple, int] = {}
        for tensor in _tensors(arguments):
            place = places.setdefault(_memory(tensor), len(places))
            self._origins[tensor] = frozenset([place])

    def origins(self, *values: Any) -> Origins:
        return NOWHERE.union(*(self._origins.get(tensor, NOWHERE) for tensor in _tensors(values)))

    def sides(self, *values: Any) -> tuple[Origins, Origins]:
        """What the two sides of the product come from that these values were computed from, if there is one."""
        found = (self._sides.get(tensor) for tensor in _tensors(values))
        return next((sides for sides in found if sides is not None), (NOWHERE, NOWHERE))

    def follow(self, func: Any, arguments: tuple, result: Any) -> None:
        """A result comes from what its arguments come from."""
        origins = self.origins(arguments)
        if not origins:
            return
        sides = self.sides(arguments)
        if func in PRODUCTS:
            operands = [tensor for tensor in _tensors(arguments) if tensor.dim() > 2][-2:]
            sides = (self.origins(operands[0]), self.origins(operands[1])) if len(operands) == 2 else sides
        for tensor in _tensors(arguments[0] if func is Tensor.__setitem__ else result):
            self._origins[tensor] = origins
            if any(sides):
                self._sides[tensor] = sides


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors in nested arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(tuple(values.values()))


def _memory(tensor: Tensor) -> tuple:
    """The same for two views of the same numbers."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


class Observer(TorchFunctionMode):
    """Catches attention inside the modules that are running."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[_Capture] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.running:
            return func(*args, **kwargs)
        capture = self.running[-1]
        if func is F.multi_head_attention_forward:
            return self._multi_head(capture, *args, **kwargs)
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            matrix, query, key = _attention_of(*args, **kwargs)
            capture.attention.append(_Attention(matrix, capture.origins(query), capture.origins(key)))
        elif func in SOFTMAXES and result.dim() == 4:
            capture.attention.append(_Attention(result, *capture.sides(args, kwargs)))
        capture.follow(func, (*args, *kwargs.values()), result)
        return result

    def _multi_head(
        self,
        capture: _Capture,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        need_weights: bool = True,
        average_attn_weights: bool = True,
        **kwargs: Any,
    ):
        """torch's function takes sequences first, [N, B, E] or [N, E], and gives weights [B, H, N, N] or [H, N, N]."""
        kwargs |= {"need_weights": True, "average_attn_weights": False}
        output, weights = F.multi_head_attention_forward(query, key, value, *args, **kwargs)
        assert weights is not None  # as asked for
        matrix = weights if query.dim() == 3 else weights[None]
        capture.attention.append(_Attention(matrix, capture.origins(query), capture.origins(key)))
        capture.values = value.transpose(0, 1) if value.dim() == 3 else value[None]
        if not need_weights:
            return output, None
        return output, weights.mean(-3) if average_attn_weights else weights


def _attention_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """scaled_dot_product_attention's matrices, in float32 or float64, and its queries and keys."""
    keys = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3) if enable_gqa else key
    matrix = reference.attention_weights(query, keys, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    return matrix, query, key


@contextmanager
def observed(sites: Sequence[Site], callbacks: Sequence[Callbacks], skipped: dict[str, str]) -> Iterator[None]:
    """Inside, what the model computes at each site goes to its callbacks; `skipped` gets why a site cannot be read."""
    with ExitStack() as stack:
        observer = stack.enter_context(Observer())
        for site, own in zip(sites, callbacks, strict=True):
            for handle in _Hooks(site, own, observer, skipped).register():
                stack.callback(handle.remove)
        yield


class _Hooks:
    """The forward hooks of one site: they hand its tokens and its attention to its callbacks."""

    def __init__(self, site: Site, callbacks: Callbacks, observer: Observer, skipped: dict[str, str]) -> None:
        self.site, self.callbacks, self.observer, self.skipped = site, callbacks, observer, skipped
        self.entered: list[Tensor | None] = []  # the tokens of the blocks that are running
        self.attention: Tensor | None = None  # of the block that is running

    def register(self) -> list[RemovableHandle]:
        module, block = self.site.module, self.site.block
        handles = [
            block.register_forward_pre_hook(self.enter_block, with_kwargs=True),
            module.register_forward_pre_hook(self.enter, with_kwargs=True),
            module.register_forward_hook(self.leave, with_kwargs=True),
            block.register_forward_hook(self.leave_block, with_kwargs=True),
        ]
        projection = self.site.reader.projection(module)
        if projection is not None:
            handles.append(projection.register_forward_pre_hook(self.project))
        return handles

    @property
    def is_skipped(self) -> bool:
        return self.site.name in self.skipped

    def enter_block(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        # A copy: how its dimensions are meant is known when attention was seen, and the block may write into it.
        tokens = _first_tokens(self.site, (*args, *kwargs.values()))
        self.entered.append(tokens if tokens is None or self.is_skipped else tokens.clone())

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.observer.running.append(_Capture((*args, *kwargs.values())))

    def project(self, module: nn.Module, args: tuple) -> None:
        if self.observer.running:
            self.observer.running[-1].heads = args[0]

    def leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        capture = self.observer.running.pop()
        if self.is_skipped:
            return
        try:
            self.attention, heads = _matrices(self.site, capture, (*args, *kwargs.values()), kwargs)
        except UnsupportedAttention as error:
            self.skipped[self.site.name] = str(error)
            return
        self.callbacks.on_attention(self.attention, heads)

    def leave_block(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        before, attention = self.entered.pop(), self.attention
        if self.is_skipped or attention is None:
            return
        after = _first_tokens(self.site, output if isinstance(output, tuple | list) else (output,))
        if before is None or after is None:
            self.skipped[self.site.name] = "its block has no tokens [B, N, C] among its arguments or results"
            return
        self.attention = None
        self.callbacks.on_input(_samples_first(self.site, before, attention))
        self.callbacks.on_output(_samples_first(self.site, after, attention))


def _first_tokens(site: Site, values: Any) -> Tensor | None:
    """The first tensor that can be tokens; those of torch's modules may have no batch dimension."""
    least = 2 if hasattr(site.module, "batch_first") else 3
    tensors = (value for value in values if isinstance(value, Tensor))
    return next((value for value in tensors if value.is_floating_point() and value.dim() >= least), None)


def _samples_first(site: Site, tokens: Tensor, attention: Tensor) -> Tensor:
    """Tokens as [B, N, C]; images of tokens are flattened."""
    if tokens.dim() != 3:
        return tokens[None] if tokens.dim() == 2 else tokens.flatten(1, -2)
    if not hasattr(site.module, "batch_first"):
        return tokens
    # A block may turn what it is given for its attention module; where the sizes do not tell, it is as the module's.
    turns = not site.module.batch_first
    batch, count = attention.shape[0], attention.shape[-1]
    if batch != count and tuple(tokens.shape[:2]) in ((batch, count), (count, batch)):
        turns = tuple(tokens.shape[:2]) == (count, batch)
    return tokens.transpose(0, 1) if turns else tokens


def _matrices(site: Site, capture: _Capture, values: tuple, kwargs: dict) -> tuple[Tensor, Tensor]:
    """Attention and the heads' outputs."""
    tokens = _first_tokens(site, values)
    if tokens is None:
        raise UnsupportedAttention("it has no tokens [B, N, C] among its arguments")
    own = own_attention(site.module)
    if own is not None:
        attention = own.attention_weights(tokens, **_masks(site, kwargs))
    else:
        attention = _self_attention(capture, tokens)
    num_heads = site.weights().num_heads
    if attention.shape[1] != num_heads:
        raise UnsupportedAttention(f"attention of {attention.shape[1]} heads, its weights have {num_heads}")
    if capture.heads is not None:
        return attention, capture.heads.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    return attention, _heads(site, attention, tokens if capture.values is None else capture.values)


def _self_attention(capture: _Capture, tokens: Tensor) -> Tensor:
    """The one attention matrix [B, H, N, N] that was seen, if its queries and keys are made of the module's tokens."""
    if len(capture.attention) != 1:
        raise UnsupportedAttention(
            f"{len(capture.attention)} calls of scaled_dot_product_attention or softmax were seen in it, wanted 1"
        )
    matrix, query, key = capture.attention[0]
    if matrix.dim() != 4 or matrix.shape[-1] != matrix.shape[-2]:
        raise UnsupportedAttention(f"attention of shape {list(matrix.shape)}, wanted [B, H, N, N]: self-attention")
    for name, origins in (("queries", query), ("keys", key)):
        if not capture.origins(tokens) & origins:
            raise UnsupportedAttention(
                f"its {name} are not computed from its tokens, wanted self-attention: cross attention?"
            )
    return matrix


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
