"""analyze: a model and inputs in, an `Analysis` out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
) -> Analysis:
    """Measure how a model smooths its tokens: per layer and head, over all inputs, in bounded memory.

    Args:
        model: any module whose attention a reader knows (timm, Hugging Face, torch.nn, overtone; see
            `overtone.analysis.readers`). It runs in eval mode on its own device, and is left as it was.
        inputs: what the model takes: a tensor [B, ...] or a dict of tensors, cut into batches here; or an iterable of
            batches, such as a DataLoader, each a tensor, a dict, or a tuple whose first element is the input.
            Sequences must not be padded: tokens that mean nothing would be measured.
        batch_size: samples at once, where `inputs` is one tensor or one dict.
        spectra: of so many samples all eigenvalues of A are kept, for the figures.
        name: of the report; default: the model's class.
        progress: show a bar of the batches (needs tqdm).

    Raises:
        ValueError: no attention module could be read; the message names every one that was found, and why not.
    """
    sites, unread = find_sites(model)
    weights = _readable_weights(sites, unread)
    sites = [site for site in sites if site.name in weights]
    _require(sites, model, unread)
    meters = [
        Meter(site, *each, spectra=spectra)
        for site, each in zip(sites, weight_spectra(list(weights.values())), strict=True)
    ]
    batches = _with_progress(_batches(inputs, batch_size), progress)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    modes = {module: module.training for module in model.modules()}
    samples = 0
    try:
        model.eval()
        # Hooks and modes do not reach into compiled code.
        with torch.compiler.set_stance("force_eager"), observed(sites, list[Listener](meters), unread):
            for batch in batches:
                samples += _run(model, batch, device)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if samples == 0:
        raise ValueError("analyze: inputs: got no samples, wanted at least one")
    unread |= {meter.site.name: "it was not called" for meter in meters if not meter.tokens} | unread
    layers = [meter.layer() for meter in meters if meter.site.name not in unread]
    _require(layers, model, unread)
    return Analysis(name or type(model).__name__, samples, layers, unread)


def _require(readable: list, model: nn.Module, unread: dict[str, str]) -> None:
    if not readable:
        found = "; ".join(f"{where}: {why}" for where, why in unread.items()) or "no module looks like attention"
        raise ValueError(f"analyze: no attention of {type(model).__name__} could be read ({found})")


def _readable_weights(sites: list[Site], unread: dict[str, str]) -> dict[str, Weights]:
    weights = {}
    for site in sites:
        try:
            weights[site.name] = site.weights()
        except Unreadable as error:
            unread[site.name] = str(error)
    return weights


def _batches(inputs: Any, size: int) -> Iterable[Any]:
    if size < 1:
        raise ValueError(f"analyze: batch_size: got {size}, wanted at least 1")
    if isinstance(inputs, Tensor):
        return inputs.split(size)
    if isinstance(inputs, Mapping):
        parts = {name: value.split(size) for name, value in inputs.items() if isinstance(value, Tensor)}
        return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
    if isinstance(inputs, Iterable):
        return inputs
    raise TypeError(f"analyze: inputs: got {type(inputs).__name__}, wanted a tensor, a dict, or an iterable of batches")


def _run(model: nn.Module, batch: Any, device: torch.device) -> int:
    """Run the model on one batch; the number of samples."""
    if isinstance(batch, tuple | list):
        batch = batch[0]
    if isinstance(batch, Tensor):
        if len(batch):
            model(batch.to(device))
        return len(batch)
    if not isinstance(batch, Mapping):
        raise TypeError(f"analyze: inputs: got a batch of {type(batch).__name__}, wanted a tensor, a dict or a tuple")
    mask = batch.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise ValueError("analyze: inputs: attention_mask hides tokens; wanted sequences of one length without padding")
    model(**{name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()})
    return len(next(value for value in batch.values() if isinstance(value, Tensor)))


def _with_progress(batches: Iterable[Any], show: bool) -> Iterator[Any] | Iterable[Any]:
    if not show:
        return batches
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError("analyze: progress=True needs tqdm: pip install 'overtone[report]'") from error
    return tqdm(batches, desc="analyze", unit="batch")
