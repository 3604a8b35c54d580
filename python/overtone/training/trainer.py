"""The training loop.

All of its state is in its checkpoint: order and augmentation are functions of (seed, epoch, sample).
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overtone.spectrum import condition_numbers
from overtone.training import checkpoint, identity, logging, rng
from overtone.training.augment import augmented
from overtone.training.config import TrainConfig
from overtone.training.data import Data, load_data, resolved
from overtone.training.distributed import Processes
from overtone.training.errors import CheckpointError, ConfigError, DataError, DivergedError, machine_errors
from overtone.training.model import build_model, save_model
from overtone.training.optim import WeightAverage, check_precision, learning_rate, optimizer_of

CONFIG = "config.json"
REPORT_STEPS = 10  # between looks at the means, where several processes must take them together


class TrainResult(NamedTuple):
    """A finished run: its folder, and a row of metrics per epoch (the columns of metrics.csv)."""

    folder: Path
    history: list[logging.Row]

    @property
    def test_accuracy(self) -> float:
        """After the last epoch; no epoch is chosen by its test accuracy."""
        return self.history[-1]["test_accuracy"]


def train(config: TrainConfig, folder: str | Path, *, resume: bool = False, progress: bool = True) -> TrainResult:
    """Train a model and leave it in `folder`, with its configuration, metrics and a checkpoint.

    Args:
        config: what to train, on what, and how.
        folder: of the run. It may exist, but not hold another run.
        resume: go on from the folder's checkpoint, if there is one. On a CPU the result is the same, bit for bit, as
            that of a run that was never interrupted. A finished run is not repeated; with more `epochs` it goes on,
            at the learning rates of the longer schedule. Other data than the run's is refused.
        progress: show a progress bar on stderr.
    """
    _check_packages()
    config, folder = resolved(config), Path(folder)
    with machine_errors(), Processes(config) as processes, _generators_kept(processes.device):
        with contextlib.ExitStack() as stack:

            def found() -> dict | None:
                if processes.is_first:
                    stack.enter_context(checkpoint.locked(folder))
                return _saved_state(folder, config, resume)

            state = processes.agreed(found, lambda state: _brief(state, config))
            if state is not None and len(state["history"]) == config.epochs:
                return TrainResult(folder, state["history"])
            check_precision(config, processes.device)
            data, images = processes.agreed(lambda: _identified(folder, config, state), lambda found: str(found[1]))
            trainer = Trainer(config, folder, processes, data, images)
            if state is not None:
                trainer.restore(state)
            return trainer.run(progress)


def _check_packages() -> None:
    missing = [name for name in ("safetensors", "tqdm") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"training needs {' and '.join(missing)}: pip install 'overtone[study]'")


def saved_config(folder: Path) -> TrainConfig | None:
    """The configuration of the run in the folder: its checkpoint's, or what it was started with; None without a run."""
    path = folder / checkpoint.CHECKPOINT
    if path.exists():
        return TrainConfig.from_saved(checkpoint.read_run(path)["config"], str(path))
    path = folder / CONFIG
    return TrainConfig.from_json(path) if path.exists() else None


def _saved_state(folder: Path, config: TrainConfig, resume: bool) -> dict | None:
    """What the folder's checkpoint says besides tensors; None if there is none."""
    path = folder / checkpoint.CHECKPOINT
    if path.exists() and not resume:
        raise CheckpointError(f"{folder} holds a run already: resume it (--resume), or choose another folder")
    before = saved_config(folder) if resume else None
    if before is not None:
        check_same_run(folder, before, config)
    return checkpoint.read_run(path) if path.exists() else None


def check_same_run(folder: Path, before: TrainConfig, config: TrainConfig) -> None:
    """More epochs do not make it another run; everything else that decides the result does."""
    longer = before.replace(epochs=max(before.epochs, config.epochs))
    differences = (longer if longer.epochs == config.epochs else before).differences(config)
    if differences:
        raise CheckpointError(f"{folder} holds another run; different are (there, here): {'; '.join(differences)}")


def _brief(state: dict | None, config: TrainConfig) -> str:
    """What processes must have in common to go on together."""
    place = "no checkpoint" if state is None else f"step {state['step']} (SHA-256 {state['sha256'][:8]})"
    return f"{place}, configuration {config.digest()[:8]}"


class Images(NamedTuple):
    """Which images a run is about: see `identity`."""

    listed: str
    digest: str

    def __str__(self) -> str:
        return f"{len(self.listed.splitlines())} classes and images (SHA-256 {self.digest[:8]})"


def _identified(folder: Path, config: TrainConfig, state: dict | None) -> tuple[Data, Images]:
    """The data, and which they are. A run goes on with its own data only."""
    data = load_data(config)
    listed = identity.listed(data)
    images = Images(listed, identity.digest(listed))
    before = images.digest if state is None else state.get("data_sha256", images.digest)
    if before != images.digest:
        raise DataError(
            f"{folder}: not the data that the run was trained on: {identity.difference(folder, before, listed)}; "
            "restore them, or train in another folder"
        )
    return data, images


@contextlib.contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    """Training seeds torch's generators; the caller gets them back as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


class Sums:
    """What is added up over an epoch's images, on the device: loss, right answers, images, and a ratio per layer."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self.values = torch.zeros(3 + layers, dtype=torch.float64, device=device)

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor, ratios: Tensor, weights: Tensor | None = None) -> None:
        """loss: of all images together. ratios: [layers, images]. weights: 0 for images that only fill a batch."""
        right = (logits.argmax(1) == labels).double()
        one = torch.ones_like(right) if weights is None else weights.double()
        totals = torch.stack((loss.detach().double(), (right * one).sum(), one.sum()))
        self.values += torch.cat((totals, ratios.double().where(one > 0, 0).sum(1)))  # a ratio may be infinite

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.values.copy_(checkpoint.fitting(tensors, "sums", self.values))


class Means(NamedTuple):
    loss: float
    accuracy: float
    ratios: list[float]


class Trainer:
    """One run, from its configuration to its last checkpoint. See `train`."""

    def __init__(self, config: TrainConfig, folder: Path, processes: Processes, data: Data, images: Images) -> None:
        self.config, self.folder, self.processes, self.data, self.images = config, folder, processes, data, images
        self.device = processes.device
        self.dtype = torch.float64 if config.precision == "float64" else torch.float32
        self.steps_per_epoch = self._steps_per_epoch()
        self.model = build_model(config, data.info).to(self.device, self.dtype)
        if config.compile:
            # A graph per shape, whatever came before it, and torch's own random numbers: resuming stays exact.
            self.model.compile(dynamic=False, options={"fallback_random": True})
        self.wrapped = processes.wrapped(self.model)
        self.optimizer = optimizer_of(self.model, config)
        self.average = WeightAverage(self.model, config.ema) if config.ema else None
        self.step = 0
        self.history: list[logging.Row] = []
        self.sums = Sums(config.depth, self.device)  # of the epoch that is under way
        self.seconds = 0.0  # of the epoch that is under way, in all sessions
        self.images_here, self.seconds_here = 0, 0.0  # of this session

    def _steps_per_epoch(self) -> int:
        batch, images = self.config.batch_size, len(self.data.train.labels)
        parts = self.config.accumulate * self.processes.count
        if batch % parts:
            raise ConfigError(f"batch_size: got {batch}, wanted a multiple of accumulate × processes = {parts}")
        if images < batch:
            raise ConfigError(f"batch_size: got {batch}, wanted at most the {images} training images")
        return images // batch

    @property
    def steps(self) -> int:
        return self.config.epochs * self.steps_per_epoch

    def run(self, progress: bool) -> TrainResult:
        first = self.processes.is_first
        if first:
            self._describe(progress)
        self.bar = logging.Progress(self.folder.name, self.step, self.steps, shown=progress and first)
        self.events = logging.EventFiles(
            self.folder / "tensorboard", self.config.tensorboard and first, first_epoch=len(self.history)
        )
        try:
            while self.step < self.steps:
                self._epoch(self.step // self.steps_per_epoch)
        finally:
            self.bar.close()
            self.events.close()
        return TrainResult(self.folder, self.history)

    def _describe(self, progress: bool) -> None:
        checkpoint.write_text(self.folder / CONFIG, self.config.to_json())
        checkpoint.write_text(self.folder / identity.LIST, self.images.listed)
        if progress:
            train, test = (len(images.labels) for images in (self.data.train, self.data.test))
            print(f"data: {train} training and {test} test images ({self.data.origin})", file=sys.stderr)

    def _epoch(self, epoch: int) -> None:
        batches = self._batches(epoch)
        images = self.data.train.batches(part for batch in batches for part in batch)
        for batch in batches:
            start = time.perf_counter()
            self._update(epoch, batch, images)
            self.step += 1
            is_last = self.step % self.steps_per_epoch == 0
            is_kept = self.config.checkpoint_steps > 0 and self.step % self.config.checkpoint_steps == 0
            is_shown = self.processes.count == 1 or self.step % REPORT_STEPS == 0
            means = self._look() if is_last or is_kept or is_shown else None
            self._count_time(time.perf_counter() - start, batch.numel() * self.processes.count)
            if means is not None:
                self._report(means)
            if is_last:
                assert means is not None
                self._finish_epoch(epoch, means)
            elif is_kept:
                self._save()

    def _batches(self, epoch: int) -> Tensor:
        """This process's samples in what is left of the epoch, [steps, parts, samples]."""
        config, processes = self.config, self.processes
        order = rng.permutation(len(self.data.train.labels), rng.ORDER, config.seed, epoch)
        order = order[: self.steps_per_epoch * config.batch_size]
        parts = order.view(self.steps_per_epoch, config.accumulate, processes.count, -1)
        return parts[self.step % self.steps_per_epoch :, :, processes.rank]

    def _update(self, epoch: int, batch: Tensor, images: Iterator[Tensor]) -> None:
        """One step of the optimizer, on a batch [parts, samples]."""
        self.wrapped.train()
        for part, samples in enumerate(batch):
            # Stochastic depth draws from torch's generator; whatever came before, this step draws the same.
            torch.manual_seed(rng.seed(rng.LAYERS, self.config.seed, self.step, part, self.processes.rank))
            with self.processes.gradients(self.wrapped, complete=part == len(batch) - 1):
                self._add_gradients(epoch, samples, next(images))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.steps_per_epoch, self.config)
        limit = self.config.clip or float("inf")
        norm = checkpoint.whole(nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        if not math.isfinite(norm.item()):  # the same in every process; the weights never see it
            raise self._diverged("the gradient is not finite")
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.step)

    def _add_gradients(self, epoch: int, samples: Tensor, images: Tensor) -> None:
        labels = self.data.train.labels[samples].to(self.device)
        images = augmented(images.to(self.device), samples.to(self.device), epoch, self.config)
        logits, ratios = self._forward(self.wrapped, images)
        loss = self._loss(logits, labels)
        # DDP and FSDP2 take the mean over processes; what is wanted is the mean over the images of all of them.
        (loss * (self.processes.count / self.config.batch_size)).backward()
        self.sums.add(loss, logits, labels, ratios)

    def _forward(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
        """Class scores, and every layer's HFC/LFC, [layers, images]."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16"):
            try:
                logits, norms = model(self.data.info.normalise(images, self.dtype), return_norms=True)
            except torch.linalg.LinAlgError as error:  # a spectrum's basis has become singular, in every process
                raise self._diverged(str(error)) from None
        return logits.to(self.dtype), norms.ratio.detach()

    def _loss(self, logits: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
        return F.cross_entropy(logits, labels, label_smoothing=self.config.label_smoothing, reduction=reduction)

    def _look(self) -> Means:
        """The means of the epoch so far, over all processes; raises if the run has diverged."""
        means = self._means(self.sums)
        if not math.isfinite(means.loss):
            raise self._diverged("the gradient is still finite")
        return means

    def _diverged(self, what: str) -> DivergedError:
        """All processes must call it."""
        loss = self._means(self.sums).loss
        path = self.folder / checkpoint.CHECKPOINT
        last = "no checkpoint was written yet"
        if path.exists():
            last = f"the last good checkpoint, of step {checkpoint.read_state(path)['step']}, is {path}"
        return DivergedError(
            f"stopped at step {self.step} of {self.steps}: mean loss of the epoch is {loss:.4g} and {what}; {last}. "
            "A lower learning_rate, a longer warmup or clip=1 usually helps"
        )

    def _means(self, sums: Sums) -> Means:
        loss, right, images, *ratios = self.processes.sum(sums.values).tolist()
        images = images or math.nan  # before the first step
        return Means(loss / images, right / images, [ratio / images for ratio in ratios])

    def _count_time(self, seconds: float, images: int) -> None:
        self.seconds += seconds
        self.seconds_here += seconds
        self.images_here += images

    def _report(self, means: Means) -> None:
        self.bar.show(self.step, means.loss, means.accuracy, self.images_here / self.seconds_here, means.ratios)

    def _finish_epoch(self, epoch: int, means: Means) -> None:
        with self.average.applied() if self.average is not None else contextlib.nullcontext():
            tested = self.evaluate()
        row: logging.Row = {
            "epoch": epoch + 1,
            "step": self.step,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "train_loss": means.loss,
            "train_accuracy": means.accuracy,
            "test_loss": tested.loss,
            "test_accuracy": tested.accuracy,
            "images_per_second": self.steps_per_epoch * self.config.batch_size / self.seconds,
            "seconds": self.seconds,
        }
        row |= {logging.ratio_column(layer): ratio for layer, ratio in enumerate(tested.ratios, 1)}
        self.sums = Sums(self.config.depth, self.device)
        self.seconds = 0.0
        weights = checkpoint.gathered(checkpoint.weights(self.model, self.average), self.processes.is_first)
        if self.processes.is_first and self.config.kind == "general":
            row |= {"condition": max(condition_numbers(self.model, weights).values(), default=math.nan)}
        self.history.append(row)
        if self.processes.is_first:
            logging.write_csv(self.folder / "metrics.csv", self.history)
            self.events.write(row)
            save_model(self.folder, self.config, self.data.info, weights)
        self._save()

    @torch.no_grad()
    def evaluate(self) -> Means:
        """On the test images, without augmentation."""
        self.model.eval()
        sums, labels = Sums(self.config.depth, self.device), self.data.test.labels
        batches, weights = self._test_batches()
        for samples, weight, images in zip(batches, weights, self.data.test.batches(batches), strict=True):
            logits, ratios = self._forward(self.model, images.to(self.device))
            weight, expected = weight.to(self.device), labels[samples].to(self.device)
            loss = (self._loss(logits, expected, "none") * weight).sum()
            sums.add(loss, logits, expected, ratios, weight)
        return self._means(sums)

    def _test_batches(self) -> tuple[list[Tensor], list[Tensor]]:
        """This process's test samples, and a weight for each: processes get equally many, the last some of weight 0."""
        count, images = self.processes.count, len(self.data.test.labels)
        padded = torch.arange(-(-images // count) * count)
        mine = padded.view(-1, count)[:, self.processes.rank]
        parts = mine.split(max(1, self.config.batch_size // count))
        return [part.clamp(max=images - 1) for part in parts], [(part < images).to(self.dtype) for part in parts]

    def _save(self) -> None:
        tensors = checkpoint.collected(self.model, self.optimizer, self.average)
        tensors["sums"] = self.processes.sum(self.sums.values)
        tensors = checkpoint.gathered(tensors, self.processes.is_first)
        if self.processes.is_first:
            state = {
                "step": self.step,
                "seconds": self.seconds,
                "config": self.config.to_dict(),
                "data_sha256": self.images.digest,
                "history": self.history,
            }
            checkpoint.write_tensors(self.folder / checkpoint.CHECKPOINT, tensors, state)

    def restore(self, state: dict) -> None:
        path = self.folder / checkpoint.CHECKPOINT
        if self.processes.is_first:
            checkpoint.note_if_unchecked(path)
        tensors = checkpoint.read_tensors(path)
        checkpoint.restore(tensors, self.model, self.optimizer, self.average)
        if self.processes.is_first:  # the others add nothing to what was summed before
            self.sums.restore(tensors)
        self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]
        before = TrainConfig.from_saved(state["config"], str(path))
        if self.processes.is_first:
            print(f"resumed at step {self.step} of {self.steps}", file=sys.stderr)
        if before.epochs != self.config.epochs:
            self._extend(before)

    def _extend(self, before: TrainConfig) -> None:
        """From now on this is a run of more epochs, also for the next --resume."""
        if self.processes.is_first:
            rates = [learning_rate(self.step, self.steps_per_epoch, config) for config in (before, self.config)]
            print(
                f"epochs: {before.epochs} become {self.config.epochs}: from here the cosine is that of the longer run, "
                f"so the learning rate goes from {rates[0]:.3g} to {rates[1]:.3g}; "
                f"the result is not that of {self.config.epochs} epochs from the start",
                file=sys.stderr,
            )
        self._save()
