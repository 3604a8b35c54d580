"""reparameterize: our attention in other people's models, and the way back."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overtone import _validate as validate
from overtone import linalg
from overtone.integrations import adapter as adapters
from overtone.integrations.adapter import (
    Adapter,
    Linears,
    Trainable,
    Weights,
    adapter_for,
    class_name,
    running,
    write_linear,
)
from overtone.nn.attention import REGIMES, SpectralAttention, evaluate_spectra
from overtone.nn.linear import is_hooked, is_ordinary, is_plain
from overtone.spectrum import KINDS, SMALLEST, BasisCache

__all__ = ["Handle", "reparameterize"]

_NAME = "reparameterize"
STARTS = ("nearest", "fresh")
WEIGHTS = ("original", "trained")


def reparameterize(
    model: nn.Module,
    regime: str = "sharpen",
    kind: str = "symmetric",
    layers: Iterable[int] | None = None,
    *,
    bounded: bool = False,
    start: str = "nearest",
) -> Handle:
    """Give a model's self-attention a spectrum, in place. Make the optimizer afterwards: there are new parameters.

    Args:
        model: a timm ViT or DeiT, or a Hugging Face ViT, DeiT, BERT or GPT-2; or any model that contains one.
        regime: "free" keeps the function (to rounding) and its weights, on the fused op; "sharpen" or "smooth" gives
            W_V W_proj a spectrum of that sign.
        kind: of the spectra, "symmetric" or "general".
        layers: which attention layers, counted from 0 in the model's order; default: all.
        bounded: keeps λ in [−1, 0) or (0, 1].
        start: of the spectra. "nearest": the symmetric matrix with eigenvalues of the regime's sign that is nearest to
            the model's own W_V W_proj in the Frobenius norm: its symmetric part, eigenvalues clipped to the regime's
            interval (|λ| at least 0.001: at zero there is no gradient). Each eigenvector goes to the head that used it
            most. "fresh": a new initialisation. Queries, keys and the bias of the output are the model's in any case.

    Returns:
        A Handle, whose `restore` gives the original back.

    The converted modules keep the signature of those they replace. Masks, causal attention and caches of keys and
    values work; dropout of attention weights runs in plain PyTorch. output_attentions is refused: the fused op has no
    attention matrix. To load a saved converted model, convert a new one with the same arguments and load the
    state_dict.

    A layer that holds an adapter, a quantised weight or a hook is refused by name, before the model is touched, and so
    is an attention of another formula. What is frozen stays frozen.
    """
    validate.one_of(_NAME, "regime", regime, REGIMES)
    validate.one_of(_NAME, "start", start, STARTS)
    found = _attention_layers(model)
    chosen = range(len(found)) if layers is None else sorted(set(map(_layer_number, layers)))
    places = [_convertible(found, index) for index in chosen]
    swaps = [_convert(place, regime, kind, bounded, start) for place in places]
    for swap in swaps:
        swap.apply()
    how = f"regime={regime!r}" if regime == "free" else f"regime={regime!r}, kind={kind!r}, bounded={bounded}"
    return Handle(model, swaps, f"{len(swaps)} of {len(found)} attention layers of {type(model).__name__}, {how}")


class Handle:
    """What `reparameterize` did to a model, and the way back."""

    def __init__(self, model: nn.Module, swaps: list[_Swap], summary: str) -> None:
        self._swaps, self._summary = swaps, summary
        batch = _BatchedSpectra()
        for swap in swaps:
            swap.adapter.batch = batch
        self._hooks = [
            model.register_forward_pre_hook(batch.before, with_kwargs=True),
            model.register_forward_hook(batch.after, always_call=True),
        ]

    @property
    def attentions(self) -> list[SpectralAttention]:
        """The converted layers' modules, in the model's order."""
        return [swap.adapter.core for swap in self._swaps]

    @torch.no_grad()
    def restore(self, weights: str = "original") -> None:
        """Put the original modules back.

        weights: "original": bit for bit as they were before; "trained": with what was learned since written into them,
        W_V = basis_in and W_proj = diag(λ) basis_out. The rest of the model is left as it is.

        The originals come back as the model is now: on its device, in its dtype (original weights are rounded to a
        narrower one), in training or evaluation, frozen where their successors are. What was put into the converted
        layers since, adapters or hooks, must be taken out or merged first: it has no place in the originals.
        """
        validate.one_of("restore", "weights", weights, WEIGHTS)
        if not self._hooks:
            raise RuntimeError("restore: this model was already restored")
        learned = [swap.restorable(weights == "trained") for swap in self._swaps]  # raises before anything is touched
        for swap, learnt in zip(self._swaps, learned, strict=True):
            swap.undo(learnt)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __repr__(self) -> str:
        return f"<Handle: {self._summary}{'' if self._hooks else ', restored'}>"


class _Place(NamedTuple):
    """Where a model holds an attention module."""

    name: str
    parent: nn.Module
    attribute: str
    module: nn.Module


class _Swap(NamedTuple):
    place: _Place
    linears: Linears  # of the original
    adapter: Adapter

    def apply(self) -> None:
        setattr(self.place.parent, self.place.attribute, self.adapter)
        self.adapter.take_over(self.place.parent)

    def restorable(self, trained: bool) -> Weights | None:
        """What was learned, if that is wanted; raises where undoing would lose something."""
        place, adapter = self.place, self.adapter
        name = _put_in(adapter, getattr(place.parent, place.attribute), place.module)
        if name is not None:
            got = f"{place.name}{name}"
            raise RuntimeError(f"restore: {got}, which restoring would drop: merge or remove it first")
        if not trained:
            return None
        weights = _folded(adapter.core)
        for linear, _, biases in adapters.shares(self.linears, weights):
            if linear.bias is None and any(bool((bias != 0).any()) for bias in biases):
                raise ValueError(
                    f"restore: {place.name} has no bias to write the learned one into; take weights='original'"
                )
        return weights

    def undo(self, learned: Weights | None) -> None:
        module, parent, adapter = self.place.module, self.place.parent, self.adapter
        setattr(parent, self.place.attribute, module)
        adapter.give_back(parent)
        now, kept = _query_weight(adapter.core), set(adapter.modules())
        for whole in (module, *self.linears):
            whole.to(now.device, now.dtype)
            for part in set(whole.modules()) - kept:
                part.training = adapter.training
        if learned is not None:
            adapters.write(self.linears, learned)
        adapters.set_trainable(self.linears, _trainable(adapter.core))


def _put_in(adapter: Adapter, found: nn.Module, original: nn.Module) -> str | None:
    """What was put into a converted layer since, or in its place."""
    if found is not adapter:
        return f" is a {class_name(found)} now"
    kept = set(original.modules())
    for name, part in adapter.named_modules():
        if part not in kept and (is_hooked(part) or "forward" in vars(part)):
            return f" has hooks{f' on {name}' if name else ''}"
    core = adapter.core
    for name in ("qkv", "proj") if core.regime == "free" else ("qk", "spectrum"):
        part = getattr(core, name)
        if not is_plain(part, nn.Linear, *KINDS.values()):
            return f".core.{name} is a {class_name(part)}"
        for tensor in part.parameters():
            if not is_ordinary(tensor):
                return f".core.{name} holds a {class_name(tensor)}"
    return None


def _query_weight(core: SpectralAttention) -> Tensor:
    return core.qkv.weight if core.regime == "free" else core.qk.weight


def _trainable(core: SpectralAttention) -> Trainable:
    """Which of the original's weights want a gradient, as their successors do."""
    assert (bias := core.proj.bias if core.regime == "free" else core.bias) is not None
    if core.regime == "free":
        packed, value, output = core.qkv, core.qkv.weight.requires_grad, core.proj.weight.requires_grad
        value_bias = core.qkv.bias.requires_grad
    else:
        packed, value_bias = core.qk, bias.requires_grad
        value = output = any(parameter.requires_grad for parameter in core.spectrum.parameters())
    query, query_bias = packed.weight.requires_grad, packed.bias.requires_grad
    return Trainable(query, query, value, output, query_bias, query_bias, value_bias, bias.requires_grad)


def _set_trainable(core: SpectralAttention, of: Trainable) -> None:
    """What was frozen stays frozen; what is in one piece now wants a gradient if a part of it did."""
    if core.regime == "free":
        core.qkv.weight.requires_grad_(of.query or of.key or of.value)
        core.qkv.bias.requires_grad_(of.query_bias or of.key_bias or of.value_bias)
        core.proj.weight.requires_grad_(of.output)
        core.proj.bias.requires_grad_(of.output_bias)
        return
    core.qk.weight.requires_grad_(of.query or of.key)
    core.qk.bias.requires_grad_(of.query_bias or of.key_bias)
    core.spectrum.requires_grad_(of.value or of.output)
    assert core.bias is not None
    core.bias.requires_grad_(of.output_bias or of.value_bias)


class _BatchedSpectra:
    """Hooks of the whole model: every layer's spectrum from one factorisation, before any layer runs.

    The layers are those of the module that is called: a replica or a copy of a model evaluates its own.
    """

    def __init__(self) -> None:
        self.cache = BasisCache()

    def before(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        config = getattr(model, "config", None)
        if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
            raise ValueError(
                "output_attentions: got True, wanted False: the fused attention never holds its matrix. Take "
                "handle.attentions[layer].attention_weights(x), or handle.restore() first"
            )
        parts = list(model.modules())
        own = [part for part in parts if isinstance(part, Adapter) and part.batch is self]
        # Blocks that are computed again in backward must do in both passes what they do: each evaluates its own.
        if not any(map(_recomputes, parts)):
            spectra = evaluate_spectra([adapter.core for adapter in own], self.cache)
            running.give(
                self, [(adapter, each) for adapter, each in zip(own, spectra, strict=True) if each is not None]
            )

    def after(self, model: nn.Module, args: tuple, output: Any) -> None:
        running.take_back(self)


def _recomputes(module: nn.Module) -> bool:
    """Whether gradient checkpointing is on, as Hugging Face, timm or PyTorch's own wrapper say it.

    Blocks that are checkpointed in another way find it out themselves, at the price of one factorisation more.
    """
    if type(module).__name__ == "CheckpointWrapper":
        return True
    return getattr(module, "gradient_checkpointing", False) or getattr(module, "grad_checkpointing", False)


def _attention_layers(model: nn.Module) -> list[_Place]:
    places = []
    for parent_name, parent in model.named_modules():
        if isinstance(parent, Adapter):
            continue  # what it holds is ours
        for attribute, module in parent.named_children():
            if isinstance(module, Adapter) or adapter_for(module) is not None:
                places.append(_Place(f"{parent_name}.{attribute}".lstrip("."), parent, attribute, module))
    if not places:
        raise ValueError(f"{_NAME}: model: got {_without_known_attention(model)}, wanted {_KNOWN}")
    return places


_KNOWN = "a timm ViT or DeiT, or a Hugging Face ViT, DeiT, BERT or GPT-2"


def _without_known_attention(model: nn.Module) -> str:
    """The model, and what in it looks like attention."""
    kinds: dict[str, str] = {}
    for name, part in model.named_modules():
        if _looks_like_attention(name, part):
            kinds.setdefault(class_name(part), name)
    shown = "".join(f"; {name} is a {kind}, whose formula is not known" for kind, name in [*kinds.items()][:3])
    return f"{type(model).__name__} without a known self-attention{shown}"


def _looks_like_attention(name: str, part: nn.Module) -> bool:
    kind = type(part).__name__.lower()
    is_named_so = name.rpartition(".")[2] in ("attn", "attention", "self_attn", "self_attention")
    return is_named_so or "attention" in kind or "attn" in kind


def _layer_number(layer: object) -> int:
    try:
        return operator.index(layer)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{_NAME}: layers: got {validate.describe(layer)} among them, wanted integers") from None


def _convertible(places: list[_Place], index: int) -> _Place:
    if not 0 <= index < len(places):
        raise ValueError(f"{_NAME}: layers: got {index}, wanted 0 to {len(places) - 1}")
    place = places[index]
    if isinstance(place.module, Adapter):
        raise ValueError(f"{_NAME}: layers: layer {index}, {place.name}, has been converted; restore it first")
    twins = [other.name for other in places if other.module is place.module]
    if len(twins) > 1:
        raise ValueError(f"{_NAME}: {' and '.join(twins)} are one module; wanted layers with weights of their own")
    adapter = adapter_for(place.module)
    assert adapter is not None
    obstacle = adapter.obstacle(place.module, place.parent)
    if obstacle is not None:
        raise ValueError(f"{_NAME}: {place.name} {obstacle} ({class_name(place.module)})")
    return place


def _convert(place: _Place, regime: str, kind: str, bounded: bool, start: str) -> _Swap:
    adapter = adapter_for(place.module)
    assert adapter is not None
    linears = adapter.linears(place.module, place.parent)
    weights = adapters.read(linears)
    core = SpectralAttention(
        weights.query.shape[1],
        adapter.num_heads(place.module),
        regime,
        kind,
        bounded=bounded,
        proj_bias=True,
        attn_drop=adapter.attention_dropout(place.module),
        scale=adapter.scale(place.module),
        device=weights.query.device,
        dtype=weights.query.dtype,
    )
    _fill(core, weights, start)
    _set_trainable(core, adapters.trainable(linears))
    return _Swap(place, linears, adapter(core.train(place.module.training), place.module))


@torch.no_grad()
def _fill(core: SpectralAttention, weights: Weights, start: str) -> None:
    if core.regime == "free":
        write_linear(core.qkv, torch.cat(weights[:3]), torch.cat(weights[4:7]))
        write_linear(core.proj, weights.output, weights.output_bias)
        return
    write_linear(core.qk, torch.cat(weights[:2]), torch.cat(weights[4:6]))
    assert core.bias is not None
    core.bias.copy_(weights.output_bias)
    if start == "nearest":
        # The rows of A sum to one, so the values' bias passes through it. Rounded once, where the model is of halves.
        output, value_bias, output_bias = (_wide(x) for x in (weights.output, weights.value_bias, weights.output_bias))
        core.bias.copy_(output_bias + output @ value_bias)
        core.spectrum.set_spectrum(*nearest_spectrum(weights.value.mT, weights.output.mT, core))


def _wide(x: Tensor) -> Tensor:
    return x.to(validate.statistics_dtype(x.dtype))


def nearest_spectrum(w_v: Tensor, w_proj: Tensor, core: SpectralAttention) -> tuple[Tensor, Tensor]:
    """The Frobenius-nearest V Λ Vᵀ of w_v @ w_proj with Λ in the regime's interval, eigenvectors sorted by head."""
    w_v, w_proj = w_v.double(), w_proj.double()
    weight = w_v @ w_proj
    eigenvalues, vectors = linalg.eigh((weight + weight.mT) / 2)
    sign = core.spectrum.sign
    largest = 1.0 if core.spectrum.bounded or core.kind == "general" else float("inf")
    clipped = sign * (sign * eigenvalues).clamp(SMALLEST, largest)
    # How much of eigenvector j's own quotient v_jᵀ W v_j comes from head h.
    seen = (vectors.mT @ w_v).unflatten(-1, (core.num_heads, -1))  # [j, h, k]
    sent = (w_proj @ vectors).unflatten(0, (core.num_heads, -1))  # [h, k, j]
    order = _assign(torch.einsum("jhk,hkj->hj", seen, sent) * sign)
    return vectors[:, order], clipped[order]


def _assign(affinity: Tensor) -> Tensor:
    """Eigenvectors [j] in the order of heads, from affinities [h, j]: the largest first, every head its share."""
    heads, count = affinity.shape
    free = [count // heads] * heads
    owner: dict[int, int] = {}
    for place in affinity.flatten().argsort(descending=True).tolist():
        head, vector = divmod(place, count)
        if vector not in owner and free[head] > 0:
            owner[vector] = head
            free[head] -= 1
    return torch.tensor(sorted(owner, key=lambda vector: (owner[vector], vector)), device=affinity.device)


def _folded(core: SpectralAttention) -> Weights:
    """A converted layer as ordinary weights."""
    packed = core.qkv if core.regime == "free" else core.qk
    query, key = packed.weight.split(core.dim)[:2]
    query_bias, key_bias = packed.bias.split(core.dim)[:2]
    w_v, w_proj = core.value_projection()
    bias = core.proj.bias if core.regime == "free" else core.bias
    assert bias is not None
    value_bias = packed.bias[2 * core.dim :] if core.regime == "free" else torch.zeros_like(bias)
    return Weights(query, key, w_v.mT, w_proj.mT, query_bias, key_bias, value_bias, bias)
