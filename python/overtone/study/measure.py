"""What is measured of a trained model: numbers that JSON can keep, so that a finished run is never measured again."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overtone.analysis import METRICS, analyze
from overtone.study.corruptions import SEVERITIES, STRENGTHS, corrupted
from overtone.study.escalation import block_measures
from overtone.training import Data, DataInfo, build_model, load_data, load_model
from overtone.training.config import TrainConfig

Measures = dict[str, Any]
BATCH = 256


def settings(images: int) -> Measures:
    """What measures depend on besides the run: where it differs, they are taken again."""
    return {"images": images, "corruptions": {kind: list(values) for kind, values in STRENGTHS.items()}}


def measure(
    part: str, folder: str, config: TrainConfig, history: Sequence[dict], images: int, device: torch.device
) -> Measures:
    """What a part of the study wants to know of the trained run in a folder."""
    if part == "regimes":
        return measure_trained(folder, config, images, device) if config.data.train_fraction == 1 else {}
    data = load_data(config)
    if part == "text":
        windows = next(iter(data.test.batches([torch.arange(min(images, len(data.test)))])))
        tokens = data.info.prepare(windows.inputs, torch.float32)
        return {
            "bits": history[-1]["test_bits_per_byte"],
            "trained": model_measures(load_model(folder).to(device), tokens),
        }
    pixels, labels = _analyzed(data, images)
    trained = load_model(folder).to(device)
    if part == "depth":
        start = build_model(config, data.info).to(device)
        return {
            "init": block_measures(start, pixels.to(device), labels.to(device)),
            "trained": block_measures(trained, pixels.to(device), labels.to(device)),
        }
    return {
        "step_seconds": statistics.median(row["seconds"] for row in history) / (history[-1]["step"] / len(history)),
        "conditions": [row["condition"] for row in history if "condition" in row],
        "trained": model_measures(trained, pixels),
    }


def measure_trained(folder: str, config: TrainConfig, images: int, device: torch.device) -> Measures:
    """Accuracy under corruptions, and tokens, dominance and spectra before and after training."""
    data = load_data(config)
    trained = load_model(folder).to(device)
    pixels, _ = _analyzed(data, images)
    return {
        "corrupted": corrupted_accuracy(trained, data, device),
        "init": model_measures(build_model(config, data.info).to(device), pixels),
        "trained": model_measures(trained, pixels),
    }


def _analyzed(data: Data, images: int) -> tuple[Tensor, Tensor]:
    """The test images whose tokens are looked at, as the model takes them, and their labels."""
    first = torch.arange(min(images, len(data.test.labels)))
    return data.info.normalize(data.test.images(first)), data.test.labels[first]


def corrupted_accuracy(model: nn.Module, data: Data, device: torch.device) -> dict[str, list[float]]:
    """Of every kind: the share of test images that are classified rightly at severities 1 … 5."""
    images = data.test.images(torch.arange(len(data.test.labels)))
    return {
        kind: [accuracy(model, corrupted(images, kind, severity), data.test.labels, data.info, device)
               for severity in SEVERITIES]
        for kind in STRENGTHS
    }  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, info: DataInfo, device: torch.device) -> float:
    found = [model(info.normalize(batch.to(device))).argmax(1).cpu() for batch in images.split(BATCH)]
    return float((torch.cat(found) == labels).double().mean())


def model_measures(model: nn.Module, images: Tensor) -> Measures:
    """The metrics of tokens over depth (means over images), the verdicts, and the eigenvalues of every head's H."""
    analysis = analyze(model, images, batch_size=BATCH, max_spectra=0)
    eigenvalues = torch.stack([layer.weight_eigenvalues for layer in analysis.layers])  # [layers, heads, k]
    return {
        "curves": {metric: analysis.curve(metric).double().mean(1).tolist() for metric in METRICS},
        "verdicts": analysis.verdicts(),
        "eigenvalues": torch.view_as_real(eigenvalues.to(torch.complex128)).flatten(0, 2).tolist(),
    }
