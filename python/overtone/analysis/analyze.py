"""analyze: a model and inputs in, an `Analysis` out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from overtone._deprecated import accepts_renamed
from overtone.analysis.inputs import call, count, in_batches, require_batch, sample_dimension, unit_of
from overtone.analysis.measure import LayerRecorder, weight_spectra
from overtone.analysis.observe import observed
from overtone.analysis.readers import Weights
from overtone.analysis.result import Analysis
from overtone.analysis.sites import Site, UnsupportedAttention, find_sites

BATCH = 8


@accepts_renamed("analyze", spectra="max_spectra")
@torch.no_grad()
def analyze(
    model: nn.Module,
    inputs: Any,
    *,
    batch_size: int = BATCH,
    max_spectra: int = 4,
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
        max_spectra: of so many samples all eigenvalues of A are kept, for the figures.
        name: of the report; default: the model's class.
        progress: show a bar of the batches (needs tqdm).
        subject: the report's first sentence: which model, which weights, which inputs.

    Raises:
        ValueError: no attention module could be read; the message names every one that was found, and why not.
    """
    sites, weights, skipped = require_readable(model)
    spectra = weight_spectra(list(weights.values()))
    recorders = [LayerRecorder(site, *each, max_spectra) for site, each in zip(sites, spectra, strict=True)]
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with _evaluating(model):
        batches, dimension = _batched(inputs, batch_size, lambda batch: sample_dimension(model, sites, batch, device))
        batches = _with_progress(batches, inputs, progress)
        with observed(sites, recorders, skipped):
            samples, unit = _run(model, batches, dimension, device)
    if samples == 0:
        raise ValueError("analyze: inputs: got no samples, wanted at least one")
    skipped |= {recorder.site.name: "it was not called" for recorder in recorders if not recorder.tokens} | skipped
    layers = [recorder.layer() for recorder in recorders if recorder.site.name not in skipped]
    _require(layers, model, skipped)
    subject = subject or f"The model's weights as they were given; {samples} {unit} as they were given."
    return Analysis(name or type(model).__name__, samples, layers, skipped, subject, unit)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode and not compiled: hooks and modes do not reach into compiled code."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _run(model: nn.Module, batches: Iterable[Any], dimension: int | None, device: torch.device) -> tuple[int, str]:
    """Run the model on all batches; returns how many samples they have, and what these are called."""
    samples, unit = 0, "samples"
    for batch in batches:
        require_batch(batch)
        if size := count(batch, dimension):
            call(model, batch, device)
        samples, unit = samples + size, unit_of(batch)
    return samples, unit


def require_readable(model: nn.Module) -> tuple[list[Site], dict[str, Weights], dict[str, str]]:
    """The attention modules that can be read, their weights by name, and why others cannot; ValueError if none can.

    The model may be on the meta device.
    """
    sites, skipped = find_sites(model)
    weights = _readable_weights(sites, skipped)
    sites = [site for site in sites if site.name in weights]
    _require(sites, model, skipped)
    return sites, weights, skipped


def _require(readable: list, model: nn.Module, skipped: dict[str, str]) -> None:
    if not readable:
        reasons: dict[str, list[str]] = {}
        for where, why in skipped.items():
            reasons.setdefault(why, []).append(where)
        found = "; ".join(f"{_some(places)}: {why}" for why, places in reasons.items())
        found = found or "no module looks like attention"
        raise ValueError(f"analyze: no attention of {type(model).__name__} could be read ({found})")


def _some(places: list[str]) -> str:
    """The first of many layers stands for all."""
    return places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"


def _readable_weights(sites: list[Site], skipped: dict[str, str]) -> dict[str, Weights]:
    weights = {}
    for site in sites:
        try:
            weights[site.name] = site.weights()
        except UnsupportedAttention as error:
            skipped[site.name] = str(error)
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


def _with_progress(batches: Iterable[Any], inputs: Any, show: bool) -> Iterable[Any]:
    if not show:
        return batches
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError("analyze: progress=True needs tqdm: pip install 'overtone[report]'") from error
    counted = next((each for each in (batches, inputs) if isinstance(each, Sized)), None)
    return tqdm(batches, desc="analyze", unit="batch", total=None if counted is None else len(counted))
