"""What is measured while a run trains: summed on the device, and fetched without waiting for it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from overtone.spectrum import basis_status
from overtone.training.checkpoint import fitting
from overtone.training.distributed import Distributed


class EpochMetrics(NamedTuple):
    """Means over an epoch's samples."""

    loss: float
    accuracy: float
    ratios: list[float]  # ‖HFC‖/‖LFC‖ of every layer


class MetricSums:
    """What is added up over an epoch, on the device: loss, right answers, targets, and a ratio per layer."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self.values = torch.zeros(3 + layers, dtype=torch.float64, device=device)

    def add(self, loss: Tensor, logits: Tensor, targets: Tensor, ratios: Tensor, weights: Tensor | None = None) -> None:
        """loss: of all targets together. ratios: [layers, samples]. weights: 0 for samples that only fill a batch."""
        right = (logits.argmax(-1) == targets).double()
        one = right.new_ones(len(targets)) if weights is None else weights.double()
        right = right.flatten(1).sum(1) if right.dim() > 1 else right
        per_sample = targets[0].numel()
        totals = torch.stack((loss.detach().double(), (right * one).sum(), one.sum() * per_sample))
        # A ratio may be infinite.
        self.values += torch.cat((totals, ratios.double().where(one > 0, 0).sum(1) * per_sample))

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.values.copy_(fitting(tensors, "sums", self.values))

    def means(self, distributed: Distributed) -> EpochMetrics:
        """Over all processes. Waits for the device."""
        return _means(distributed.sum(self.values).tolist())


def _means(sums: list[float]) -> EpochMetrics:
    loss, right, count, *ratios = sums
    count = count or math.nan  # before the first step
    return EpochMetrics(loss / count, right / count, [ratio / count for ratio in ratios])


class FiniteGuard:
    """Keeps gradients that are not finite away from the weights, without asking the device.

    From the first such step on, the optimizer skips its updates, as it does for torch.amp.GradScaler. Which step that
    was is known at the next look.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        # The first step whose gradient, and whose loss, was not finite.
        self.steps = torch.full((2,), math.inf, dtype=torch.float64, device=device)

    def watch(self, step: int, gradient_norm: Tensor, loss: Tensor) -> None:
        """Between backward and the optimizer's step. gradient_norm is the same in all processes, loss is not."""
        is_finite = torch.stack((gradient_norm.double(), loss.double())).isfinite()
        self.steps = self.steps.where(is_finite, self.steps.clamp(max=step))
        self.optimizer.found_inf = self.steps[0].isfinite().float()  # type: ignore[attr-defined]


class Look(NamedTuple):
    """What a run shows, as it was when the look began."""

    metrics: EpochMetrics
    bad_gradient: int | None  # the first step whose gradient was not finite
    bad_loss: int | None
    bad_basis: str | None  # of a spectrum, by name


class PendingLook:
    """A look whose numbers are on their way from the device. All processes must begin it; none waits for it."""

    def __init__(self, sums: MetricSums, guard: FiniteGuard, model: nn.Module, distributed: Distributed) -> None:
        self._bases = basis_status(model)  # the same in every process
        conditions = self._bases.conditions.to(sums.values)
        values = torch.cat((distributed.min(guard.steps), conditions, distributed.sum(sums.values)))
        self._arrived = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._values = values

    def read(self) -> Look:
        """Waits until the numbers have arrived: not at all some steps later."""
        if self._arrived is not None:
            self._arrived.synchronize()
        steps, conditions, sums = self._values.split(
            [2, count := len(self._bases.names), len(self._values) - 2 - count]
        )
        bad_gradient, bad_loss = (int(step) if math.isfinite(step) else None for step in steps.tolist())
        try:
            self._bases.check(conditions)
        except torch.linalg.LinAlgError as error:
            return Look(_means(sums.tolist()), bad_gradient, bad_loss, str(error))
        return Look(_means(sums.tolist()), bad_gradient, bad_loss, None)
