"""reparameterize: SpectralAttention in other people's models, and the way back."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from overtone import _validate as validate
from overtone._deprecated import accepts_renamed, renamed_value
from overtone.integrations import conversion
from overtone.integrations import weights as original
from overtone.integrations.adapter import Adapter, adapter_for, cached_spectra
from overtone.integrations.weights import AttentionWeights, Linears, class_name
from overtone.nn.attention import REGIMES, SpectralAttention, evaluate_spectra
from overtone.nn.linear import is_hooked, is_ordinary, is_plain
from overtone.spectrum import KINDS, BasisCache

__all__ = ["Handle", "reparameterize"]

_NAME = "reparameterize"
_INITS = ("nearest", "random")
_RENAMED_INITS = {"fresh": "random"}
_WEIGHTS = ("original", "trained")


@accepts_renamed(_NAME, start="init")
def reparameterize(
    model: nn.Module,
    regime: str = "sharpen",
    kind: str = "symmetric",
    layers: Iterable[int] | None = None,
    *,
    bounded: bool = False,
    init: str = "nearest",
) -> Handle:
    """Give a model's self-attention a spectrum, in place. Create the optimizer afterwards: parameters are replaced.

    Args:
        model: a timm ViT or DeiT, or a Hugging Face ViT, DeiT, BERT or GPT-2; or any model that contains one.
        regime: "free" keeps the function (up to rounding) and its weights, on the fused op; "sharpen" or "smooth" gives
            W_V W_proj a spectrum of that sign.
        kind: of the spectra, "symmetric" or "general".
        layers: which attention layers, counted from 0 in the model's order; default: all.
        bounded: keeps λ in [−1, 0) or (0, 1].
        init: of the spectra. "nearest": the symmetric matrix with eigenvalues of the regime's sign that is nearest to
            the model's own W_V W_proj in the Frobenius norm, i.e. its symmetric part with eigenvalues clipped to the
            regime's interval (|λ| at least 0.001: at zero there is no gradient). Each eigenvector goes to the head that
            used it most. "random": a new initialization. Queries, keys and the output's bias are kept either way.

    Returns:
        A Handle, whose `restore` gives the original back.

    The converted modules keep the signature of those they replace. Masks, causal attention and key/value caches work;
    dropout of attention weights runs in plain PyTorch. output_attentions is refused, as the fused op never holds the
    attention matrix. To load a saved converted model, convert a new one with the same arguments and load the
    state_dict.

    A layer that holds an adapter, a quantized weight or a hook is refused by name before the model is touched, and so
    is attention with another formula. What is frozen stays frozen.
    """
    validate.one_of(_NAME, "regime", regime, REGIMES)
    init = validate.one_of(_NAME, "init", renamed_value(_NAME, "init", init, _RENAMED_INITS), _INITS)
    found = _attention_layers(model)
    chosen = range(len(found)) if layers is None else sorted(set(map(_layer_number, layers)))
    places = [_convertible(found, index) for index in chosen]
    replacements = [_convert(place, regime, kind, bounded, init) for place in places]
    for replacement in replacements:
        replacement.apply()
    how = f"regime={regime!r}" if regime == "free" else f"regime={regime!r}, kind={kind!r}, bounded={bounded}"
    count = f"{len(replacements)} of {len(found)}"
    return Handle(model, replacements, f"{count} attention layers of {type(model).__name__}, {how}")


class Handle:
    """What `reparameterize` did to a model, and the way back."""

    def __init__(self, model: nn.Module, replacements: list[_Replacement], summary: str) -> None:
        self._replacements, self._summary = replacements, summary
        batch = _BatchedSpectra()
        for replacement in replacements:
            replacement.adapter.batch = batch
        self._hooks = [
            model.register_forward_pre_hook(batch.before, with_kwargs=True),
            model.register_forward_hook(batch.after, always_call=True),
        ]

    @property
    def attentions(self) -> list[SpectralAttention]:
        """The SpectralAttention of every converted layer, in the model's order."""
        return [replacement.adapter.core for replacement in self._replacements]

    @torch.no_grad()
    def restore(self, weights: str = "original") -> None:
        """Put the original modules back.

        weights: "original": bit for bit as they were before; "trained": with what has been learned since written into
        them, W_V = basis_in and W_proj = diag(λ) basis_out. The rest of the model is left as it is.

        The originals take on the model's present state: its device and dtype (original weights are rounded to a
        narrower one), training or evaluation mode, and which parameters are frozen. Adapters or hooks that were added
        to the converted layers must be merged or removed first: they have no place in the originals.
        """
        validate.one_of("restore", "weights", weights, _WEIGHTS)
        if not self._hooks:
            raise RuntimeError("restore: this model was already restored")
        learned: list[AttentionWeights | None] = []
        for replacement in self._replacements:  # raises before anything is touched
            replacement.check_undo()
            learned.append(replacement.learned_weights() if weights == "trained" else None)
        for replacement, values in zip(self._replacements, learned, strict=True):
            replacement.undo(values)
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


class _Replacement(NamedTuple):
    """An attention module, and the adapter that takes its place."""

    place: _Place
    linears: Linears  # of the original
    adapter: Adapter

    def apply(self) -> None:
        setattr(self.place.parent, self.place.attribute, self.adapter)
        self.adapter.attach(self.place.parent)

    def check_undo(self) -> None:
        """Raises if undoing would lose something."""
        found = _addition(self.adapter, getattr(self.place.parent, self.place.attribute), self.place.module)
        if found is not None:
            got = f"{self.place.name}{found}"
            raise RuntimeError(f"restore: {got}, which restoring would drop: merge or remove it first")

    def learned_weights(self) -> AttentionWeights:
        """What the adapter's attention has learned, in the original's form; raises if that has no place for it."""
        weights = conversion.merged_weights(self.adapter.core)
        for linear, _, biases in original.per_linear(self.linears, weights):
            if linear.bias is None and any(bool((bias != 0).any()) for bias in biases):
                raise ValueError(
                    f"restore: {self.place.name} has no bias to write the learned one into; use weights='original'"
                )
        return weights

    def undo(self, learned: AttentionWeights | None) -> None:
        module, parent, adapter = self.place.module, self.place.parent, self.adapter
        setattr(parent, self.place.attribute, module)
        adapter.detach(parent)
        now, kept = conversion.query_weight(adapter.core), set(adapter.modules())
        for whole in (module, *self.linears):
            whole.to(now.device, now.dtype)
            for part in set(whole.modules()) - kept:
                part.training = adapter.training
        if learned is not None:
            original.write(self.linears, learned)
        original.set_requires_grad(self.linears, conversion.requires_grad(adapter.core))


def _addition(adapter: Adapter, found: nn.Module, original: nn.Module) -> str | None:
    """What a user has added to a converted layer, or put in its place; None if nothing."""
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


class _BatchedSpectra:
    """Hooks of the whole model: one factorization for every layer's spectrum, before any layer runs.

    The layers are those of the module that is called: a replica or a copy of a model evaluates its own.
    """

    def __init__(self) -> None:
        self.cache = BasisCache()

    def before(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        config = getattr(model, "config", None)
        if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
            raise ValueError(
                "output_attentions: got True, wanted False: the fused op never holds the attention matrix. Use "
                "handle.attentions[layer].attention_weights(x), or handle.restore() first"
            )
        parts = list(model.modules())
        own = [part for part in parts if isinstance(part, Adapter) and part.batch is self]
        # Blocks that are recomputed in backward must do the same in both passes: each evaluates its own.
        if not any(map(_recomputes, parts)):
            spectra = evaluate_spectra([adapter.core for adapter in own], self.cache)
            pairs = zip(own, spectra, strict=True)
            cached_spectra.put(self, [(adapter, spectrum) for adapter, spectrum in pairs if spectrum is not None])

    def after(self, model: nn.Module, args: tuple, output: Any) -> None:
        cached_spectra.clear(self)


def _recomputes(module: nn.Module) -> bool:
    """Whether gradient checkpointing is on, by Hugging Face's or timm's switch or by PyTorch's wrapper.

    Blocks that are checkpointed in another way find out themselves, at the cost of one more factorization.
    """
    if type(module).__name__ == "CheckpointWrapper":
        return True
    return getattr(module, "gradient_checkpointing", False) or getattr(module, "grad_checkpointing", False)


def _attention_layers(model: nn.Module) -> list[_Place]:
    places = []
    for parent_name, parent in model.named_modules():
        if isinstance(parent, Adapter):
            continue  # its content is ours
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
    shown = "".join(f"; {name} is a {kind}, whose formula is unknown" for kind, name in [*kinds.items()][:3])
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
        raise ValueError(f"{_NAME}: layers: layer {index}, {place.name}, is already converted; restore it first")
    twins = [other.name for other in places if other.module is place.module]
    if len(twins) > 1:
        raise ValueError(f"{_NAME}: {' and '.join(twins)} are one module; wanted layers with weights of their own")
    adapter = adapter_for(place.module)
    assert adapter is not None
    reason = adapter.unsupported_reason(place.module, place.parent)
    if reason is not None:
        raise ValueError(f"{_NAME}: {place.name} {reason} ({class_name(place.module)})")
    return place


def _convert(place: _Place, regime: str, kind: str, bounded: bool, init: str) -> _Replacement:
    adapter = adapter_for(place.module)
    assert adapter is not None
    linears = adapter.linears(place.module, place.parent)
    weights = original.read(linears)
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
    conversion.initialize(core, weights, init)
    conversion.set_requires_grad(core, original.requires_grad(linears))
    return _Replacement(place, linears, adapter(core.train(place.module.training), place.module))
