"""analyze: a model and inputs in, an `Analysis` out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn

from overtone.analysis.inputs import call, count, in_batches, require_batch, sample_dimension, unit_of
from overtone.analysis.measure import Meter, weight_spectra
from overtone.analysis.observe import Listener, Site, Unreadable, find_sites, observed
from overtone.analysis.readers import Weights
from overtone.analysis.result import Analysis

BATCH = 8


@torch.no_grad()
def analyze(
    model: nn.Module,
    inputs: Any,
    *,
    batch_size: int = BATCH,
    spectra: int = 4,
    name: str | None = None,
    progress: bool = False,
    subject: str | None = None,
) -> Analysis:
    """Measure how a model smooths its tokens: per layer and head, over all inputs, in bounded memory.

    Args:
        model: any module whose attention a reader knows (timm, Hugging Face, torch.nn, overtone; see
            `overtone.analysis.readers`). It runs in eval mode on its own device, and is left as it was.
        inputs: what the model takes: a tensor [B, ...] or a dict of tensors, cut into batches here; or an iterable of
            batches, such as a DataLoader, each a tensor, a dict, or a tuple whose first element is the input.
            Modules of torch.nn with batch_first=False take [N, B, ...], and a sample without a batch dimension is one
            sample: which it is, is tried. Sequences must not be padded: tokens that mean nothing would be measured.
        batch_size: samples at once, where `inputs` is one tensor or one dict.
        spectra: of so many samples all eigenvalues of A are kept, for the figures.
        name: of the report; default: the model's class.
        progress: show a bar of the batches (needs tqdm).
        subject: a sentence on what is analysed, which weights and which inputs: the first of the report.

    Raises:
        ValueError: no attention module could be read; the message names every one that was found, and why not.
    """
    sites, weights, unread = require_readable(model)
    meters = [
        Meter(site, *each, spectra=spectra)
        for site, each in zip(sites, weight_spectra(list(weights.values())), strict=True)
    ]
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    modes = {module: module.training for module in model.modules()}
    samples, unit = 0, "samples"
    try:
        model.eval()
        # Hooks and modes do not reach into compiled code.
        with torch.compiler.set_stance("force_eager"):
            batches, dimension = _batched(
                inputs, batch_size, lambda batch: sample_dimension(model, sites, batch, device)
            )
            total = len(batches) if isinstance(batches, Sized) else len(inputs) if isinstance(inputs, Sized) else None
            with observed(sites, list[Listener](meters), unread):
                for batch in _with_progress(batches, total, progress):
                    require_batch(batch)
                    if size := count(batch, dimension):
                        call(model, batch, device)
                    samples, unit = samples + size, unit_of(batch)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if samples == 0:
        raise ValueError("analyze: inputs: got no samples, wanted at least one")
    unread |= {meter.site.name: "it was not called" for meter in meters if not meter.tokens} | unread
    layers = [meter.layer() for meter in meters if meter.site.name not in unread]
    _require(layers, model, unread)
    subject = subject or f"The model's weights as they were given; {samples} {unit} as they were given."
    return Analysis(name or type(model).__name__, samples, layers, unread, subject, unit)


def require_readable(model: nn.Module) -> tuple[list[Site], dict[str, Weights], dict[str, str]]:
    """The attention modules that can be read, their weights by name, and why others cannot; ValueError if none can.

    The model may be on the meta device.
    """
    sites, unread = find_sites(model)
    weights = _readable_weights(sites, unread)
    sites = [site for site in sites if site.name in weights]
    _require(sites, model, unread)
    return sites, weights, unread


def _require(readable: list, model: nn.Module, unread: dict[str, str]) -> None:
    if not readable:
        reasons: dict[str, list[str]] = {}
        for where, why in unread.items():
            reasons.setdefault(why, []).append(where)
        found = "; ".join(f"{_some(places)}: {why}" for why, places in reasons.items())
        found = found or "no module looks like attention"
        raise ValueError(f"analyze: no attention of {type(model).__name__} could be read ({found})")


def _some(places: list[str]) -> str:
    """The first of many layers stands for all."""
    return places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"


def _readable_weights(sites: list[Site], unread: dict[str, str]) -> dict[str, Weights]:
    weights = {}
    for site in sites:
        try:
            weights[site.name] = site.weights()
        except Unreadable as error:
            unread[site.name] = str(error)
    return weights


def _batched(inputs: Any, size: int, dimension_of: Callable[[Any], int | None]) -> tuple[Iterable[Any], int | None]:
    """Batches, and their dimension that counts samples."""
    if size < 1:
        raise ValueError(f"analyze: batch_size: got {size}, wanted at least 1")
    if isinstance(inputs, Tensor | Mapping):
        require_batch(inputs)
        dimension = dimension_of(inputs)
        return in_batches(inputs, size, dimension), dimension
    if not isinstance(inputs, Iterable):
        kind = type(inputs).__name__
        raise TypeError(f"analyze: inputs: got {kind}, wanted a tensor, a dict, or an iterable of batches")
    rest = iter(inputs)
    start = list(itertools.islice(rest, 1))
    for batch in start:
        require_batch(batch)
    return itertools.chain(start, rest), dimension_of(start[0]) if start else 0


def _with_progress(batches: Iterable[Any], total: int | None, show: bool) -> Iterable[Any]:
    if not show:
        return batches
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError("analyze: progress=True needs tqdm: pip install 'overtone[report]'") from error
    return tqdm(batches, desc="analyze", unit="batch", total=total)
