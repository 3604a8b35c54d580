"""What a model says about data: forward, loss, and both over the test set."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overtone.training.config import TrainConfig
from overtone.training.data import Data
from overtone.training.distributed import Distributed
from overtone.training.metrics import EpochMetrics, MetricSums


def forward(model: Callable, inputs: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Scores, and every layer's HFC/LFC, [layers, samples]."""
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        scores, norms = model(inputs, return_norms=True)
    return scores.to(torch.float64 if precision == "float64" else torch.float32), norms.ratio.detach()


def loss_of(scores: Tensor, targets: Tensor, label_smoothing: float, reduction: str = "sum") -> Tensor:
    """Of class scores [b, classes], or of those of every byte [b, n, bytes]; "none" gives one per sample."""
    losses = F.cross_entropy(
        scores.flatten(0, -2), targets.flatten(), label_smoothing=label_smoothing, reduction=reduction
    )
    return losses.view(targets.shape).flatten(1).sum(1) if losses.dim() and targets.dim() > 1 else losses


@torch.no_grad()
def evaluate(
    model: nn.Module, run: Callable, data: Data, distributed: Distributed, config: TrainConfig
) -> EpochMetrics:
    """On the test data, without augmentation. run(model, inputs) gives scores and ratios."""
    model.eval()
    sums = MetricSums(config.model.depth, distributed.device)
    batches, weights = _batches(len(data.test), distributed, config.optim.batch_size)
    # The loss of text is the entropy that bits per byte are made of, whatever it is trained with.
    smoothing = 0.0 if config.data.name == "text" else config.optim.label_smoothing or 0.0
    for weight, batch in zip(weights, data.test.batches(batches), strict=True):
        scores, ratios = run(model, distributed.to_device(batch.inputs))
        weight, targets = distributed.to_device(weight).to(scores.dtype), distributed.to_device(batch.targets)
        losses = loss_of(scores, targets, smoothing, "none")
        sums.add((losses * weight).sum(), scores, targets, ratios, weight)
    return sums.means(distributed)


def _batches(count: int, distributed: Distributed, batch_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """This process's samples, and a weight for each: processes get equally many, the last some of weight 0."""
    padded = torch.arange(-(-count // distributed.world_size) * distributed.world_size)
    mine = padded.view(-1, distributed.world_size)[:, distributed.rank]
    parts = mine.split(max(1, batch_size // distributed.world_size))
    return [part.clamp(max=count - 1) for part in parts], [part < count for part in parts]
