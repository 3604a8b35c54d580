"""Where a module keeps its value-projection weight: one small reader per kind of attention module.

A reader knows the weights; the attention matrices are seen as the model computes them (see observe.py). A module of
your own needs a reader that matches it:

    ot.analysis.READERS.insert(0, Reader("mine", matches=…, weights=…, projection=…))

or has `attention_weights(x)` [B, H, N, N], `value_projection()` (W_V, W_proj as they multiply
tokens) and `num_heads`, as ot.nn.SpectralAttention does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn


class Weights(NamedTuple):
    """What multiplies tokens, X W_V W_proj."""

    w_v: Tensor  #: [d, H·k]
    w_proj: Tensor  #: [H·k, d]
    num_heads: int


@dataclass(frozen=True)
class Reader:
    """How one kind of attention module is read."""

    name: str
    matches: Callable[[Any], bool]
    weights: Callable[[Any], Weights]
    #: The submodule whose input is the heads side by side, [B, N, H·k]; None where there is none that is called.
    projection: Callable[[Any], nn.Module | None] = lambda module: None


def reader_of(module: nn.Module) -> Reader | None:
    """The first reader that matches."""
    return next((reader for reader in READERS if reader.matches(module)), None)


def _has(module: nn.Module, *names: str) -> bool:
    return all(getattr(module, name, None) is not None for name in names)


_COUNTS = ("num_heads", "num_attention_heads", "n_heads")


def _count(module: Any) -> int:
    """The number of heads, which Llama's modules leave to their configuration; 0 where none is named."""
    holders = (module, getattr(module, "config", None))
    return int(next((count for holder in holders for name in _COUNTS if (count := getattr(holder, name, None))), 0))


def _has_weight(module: nn.Module | None, *names: str) -> bool:
    return all(isinstance(getattr(getattr(module, name, None), "weight", None), Tensor) for name in names)


def own_attention(module: Any) -> Any:
    """The module that shows its attention and weights by itself: this one, its `core` (ot.reparameterize), or None."""
    for each in (module, getattr(module, "core", None)):
        if each is not None and _has(each, "attention_weights", "value_projection", "num_heads"):
            return each
    return None


def _own_weights(module: Any) -> Weights:
    own = own_attention(module)
    w_v, w_proj = own.value_projection()
    return Weights(w_v, w_proj, own.num_heads)


def _packed_weights(module: Any) -> Weights:
    """The last third of qkv belongs to the values. nn.Linear stores transposes."""
    return Weights(module.qkv.weight.chunk(3)[-1].mT, module.proj.weight.mT, _count(module))


# HF's ViT, DeiT, DINO, Llama… say o_proj, CLIP and many others out_proj, DistilBERT out_lin, Phi dense, T5 o.
_VALUES = ("v_proj", "v_lin", "v")
_OUTPUTS = ("o_proj", "out_proj", "out_lin", "dense", "o")


def _first(module: nn.Module, names: tuple[str, ...]) -> Any:
    return next((getattr(module, name) for name in names if _has_weight(module, name)), None)


def _output(module: nn.Module) -> Any:
    return _first(module, _OUTPUTS)


def _split_matches(module: Any) -> bool:
    return _first(module, _VALUES) is not None and _output(module) is not None and _count(module) > 0


def _split_weights(module: Any) -> Weights:
    w_proj, num_heads = _output(module).weight.mT, _count(module)
    return Weights(_values_of_heads(_first(module, _VALUES).weight.mT, len(w_proj), num_heads), w_proj, num_heads)


def _values_of_heads(w_v: Tensor, width: int, num_heads: int) -> Tensor:
    """W_V [d, H·k = width], where neighboring heads may share columns: grouped or multi-query attention."""
    shared, rest = divmod(width, w_v.shape[1])
    if shared < 2 or rest or num_heads % shared:
        return w_v
    return w_v.unflatten(-1, (num_heads // shared, -1)).repeat_interleave(shared, -2).flatten(-2)


def _grouped_packed_weights(module: Any) -> Weights:
    """Phi-3 packs all queries, then keys and values that heads may share."""
    w_proj, num_heads = module.o_proj.weight.mT, _count(module)
    packed = module.qkv_proj.weight
    w_v = packed[len(w_proj) + (len(packed) - len(w_proj)) // 2 :].mT
    return Weights(_values_of_heads(w_v, len(w_proj), num_heads), w_proj, num_heads)


def _interleaved_matches(module: Any) -> bool:
    """GPT-NeoX and its kin; where heads share keys and values, their order is another one."""
    if not _has_weight(module, "query_key_value", "dense") or _count(module) == 0:
        return False
    return len(module.query_key_value.weight) == 3 * module.dense.weight.shape[1]


def _interleaved_weights(module: Any) -> Weights:
    """Queries, keys and values of one head after the other."""
    num_heads = _count(module)
    w_v = module.query_key_value.weight.unflatten(0, (num_heads, 3, -1))[:, 2].flatten(0, 1)
    return Weights(w_v.mT, module.dense.weight.mT, num_heads)


def _bert_matches(module: Any) -> bool:
    """BERT and its kin: `self` has the values, `output` projects."""
    inner, output = getattr(module, "self", None), getattr(module, "output", None)
    return isinstance(inner, nn.Module) and _has_weight(inner, "value") and _has_weight(output, "dense")


def _bert_weights(module: Any) -> Weights:
    return Weights(module.self.value.weight.mT, module.output.dense.weight.mT, _count(module.self))


def _gpt2_weights(module: Any) -> Weights:
    """transformers' Conv1D stores what multiplies tokens, not its transpose."""
    return Weights(module.c_attn.weight.chunk(3, -1)[-1], module.c_proj.weight, _count(module))


def _multihead_weights(module: Any) -> Weights:
    packed = module.in_proj_weight
    w_v = module.v_proj_weight if packed is None else packed[-module.embed_dim :]
    return Weights(w_v.mT, module.out_proj.weight.mT, module.num_heads)


READERS: list[Reader] = [
    Reader(
        "overtone attention",
        matches=lambda module: own_attention(module) is not None,
        weights=_own_weights,
    ),
    Reader(
        "torch.nn.MultiheadAttention",
        matches=lambda module: isinstance(module, nn.MultiheadAttention),
        weights=_multihead_weights,
    ),
    Reader(
        "packed qkv (timm)",
        matches=lambda module: _has_weight(module, "qkv", "proj") and _count(module) > 0,
        weights=_packed_weights,
        projection=lambda module: module.proj,
    ),
    Reader(
        "split q, k, v (Hugging Face)",
        matches=_split_matches,
        weights=_split_weights,
        projection=_output,
    ),
    Reader(
        "packed q, k, v (Phi-3)",
        matches=lambda module: _has_weight(module, "qkv_proj", "o_proj") and _count(module) > 0,
        weights=_grouped_packed_weights,
        projection=lambda module: module.o_proj,
    ),
    Reader(
        "interleaved q, k, v (GPT-NeoX)",
        matches=_interleaved_matches,
        weights=_interleaved_weights,
        projection=lambda module: module.dense,
    ),
    Reader(
        "BERT attention",
        matches=_bert_matches,
        weights=_bert_weights,
        projection=lambda module: module.output.dense,
    ),
    Reader(
        "GPT-2 attention",
        matches=lambda module: _has_weight(module, "c_attn", "c_proj") and _count(module) > 0,
        weights=_gpt2_weights,
        projection=lambda module: module.c_proj,
    ),
]
