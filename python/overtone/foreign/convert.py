"""reparameterize: our attention in other people's models, and the way back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overtone import linalg
from overtone.foreign.adapters import Adapter, Weights, adapter_for, running, write_linear
from overtone.nn.attention import REGIMES, SpectralAttention, evaluate_layers
from overtone.ops import checks
from overtone.spectrum import SMALLEST, BasisCache

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
    """
    checks.one_of(_NAME, "regime", regime, REGIMES)
    checks.one_of(_NAME, "start", start, STARTS)
    found = _attention_layers(model)
    chosen = range(len(found)) if layers is None else sorted(set(layers))
    places = [_convertible(found, index) for index in chosen]
    swaps = [_convert(place, regime, kind, bounded, start) for place in places]
    for swap in swaps:
        swap.apply()
    return Handle(model, swaps)


class Handle:
    """What `reparameterize` did to a model, and the way back."""

    def __init__(self, model: nn.Module, swaps: list[_Swap]) -> None:
        self._swaps = swaps
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
        """
        checks.one_of("restore", "weights", weights, WEIGHTS)
        if not self._hooks:
            raise RuntimeError("restore: this model was already restored")
        for swap in self._swaps:
            swap.undo(trained=weights == "trained")
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class _Place(NamedTuple):
    """Where a model holds an attention module."""

    name: str
    parent: nn.Module
    attribute: str
    module: nn.Module


class _Swap(NamedTuple):
    place: _Place
    adapter: Adapter

    def apply(self) -> None:
        setattr(self.place.parent, self.place.attribute, self.adapter)
        self.adapter.take_over(self.place.parent)

    def undo(self, trained: bool) -> None:
        setattr(self.place.parent, self.place.attribute, self.place.module)
        self.adapter.give_back(self.place.parent)
        if trained:
            self.adapter.write(self.place.module, self.place.parent, _folded(self.adapter.core))


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
        adapters = self._adapters(model)
        # Blocks that are computed again in backward must do in both passes what they do: each evaluates its own.
        spectra = [] if _recomputes(model) else evaluate_layers([adapter.core for adapter in adapters], self.cache)
        for adapter, spectrum in zip(adapters, spectra, strict=False):
            if spectrum is not None:
                running.give(adapter, spectrum)

    def after(self, model: nn.Module, args: tuple, output: Any) -> None:
        for adapter in self._adapters(model):
            running.take_back(adapter)

    def _adapters(self, model: nn.Module) -> list[Adapter]:
        return [part for part in model.modules() if isinstance(part, Adapter) and part.batch is self]


def _recomputes(model: nn.Module) -> bool:
    """Whether gradient checkpointing is on, as Hugging Face, timm or PyTorch's own wrapper say it.

    Blocks that are checkpointed in another way find it out themselves, at the price of one factorisation more.
    """
    names = ("gradient_checkpointing", "grad_checkpointing")
    return any(
        type(module).__name__ == "CheckpointWrapper" or any(getattr(module, name, False) for name in names)
        for module in model.modules()
    )


def _attention_layers(model: nn.Module) -> list[_Place]:
    places = []
    for parent_name, parent in model.named_modules():
        if isinstance(parent, Adapter):
            continue  # what it holds is ours
        for attribute, module in parent.named_children():
            if isinstance(module, Adapter) or adapter_for(module) is not None:
                places.append(_Place(f"{parent_name}.{attribute}".lstrip("."), parent, attribute, module))
    if not places:
        wanted = "a timm ViT or DeiT, or a Hugging Face ViT, DeiT, BERT or GPT-2"
        raise ValueError(f"{_NAME}: model: got {type(model).__name__} without a known self-attention, wanted {wanted}")
    return places


def _convertible(places: list[_Place], index: int) -> _Place:
    if not 0 <= index < len(places):
        raise ValueError(f"{_NAME}: layers: got {index}, wanted 0 to {len(places) - 1}")
    place = places[index]
    if isinstance(place.module, Adapter):
        raise ValueError(f"{_NAME}: layers: layer {index}, {place.name}, has been converted; restore it first")
    adapter = adapter_for(place.module)
    assert adapter is not None
    obstacle = adapter.obstacle(place.module)
    if obstacle is not None:
        raise ValueError(f"{_NAME}: {place.name} {obstacle}, which the spectral attention has not")
    return place


def _convert(place: _Place, regime: str, kind: str, bounded: bool, start: str) -> _Swap:
    adapter = adapter_for(place.module)
    assert adapter is not None
    weights = adapter.read(place.module, place.parent)
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
    return _Swap(place, adapter(core.train(place.module.training), place.module))


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
    return x.to(checks.statistics_dtype(x.dtype))


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
