"""The training loop.

All of its state is in its checkpoint: order and augmentation are functions of (seed, epoch, sample). Between epochs it
never waits for the device: what it shows and checks arrives some steps later, and the weights are guarded there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from overtone.models import GPTConfig
from overtone.spectrum import condition_numbers
from overtone.training import checkpoint, logging, rng
from overtone.training.config import OptimConfig, TrainConfig
from overtone.training.data import Batch, Data, identity
from overtone.training.data.augment import augment
from overtone.training.distributed import Distributed
from overtone.training.errors import ConfigError, DivergedError, machine_errors
from overtone.training.evaluation import evaluate, forward, loss_of
from overtone.training.metrics import EpochMetrics, FiniteGuard, Look, MetricSums, PendingLook
from overtone.training.model import build_model, save_model
from overtone.training.optim import EMA, build_optimizer, check_precision, learning_rate
from overtone.training.run_folder import CONFIG, Images, identified_data, saved_state

LOOK_STEPS = 10  # between looks at the metrics where a look costs something: on a GPU, or in several processes


class TrainResult(NamedTuple):
    """A finished run: its folder, and a row of metrics per epoch (the columns of metrics.csv)."""

    folder: Path
    history: list[logging.Row]

    @property
    def test_accuracy(self) -> float:
        """After the last epoch; no epoch is chosen by its test accuracy."""
        return self.history[-1]["test_accuracy"]

    def summary(self) -> str:
        """The last epoch in a few words."""
        last = self.history[-1]
        if "test_bits_per_byte" in last:
            return f"test: {last['test_bits_per_byte']:.3f} bits per byte, perplexity {last['test_perplexity']:.3f}"
        return f"test accuracy {self.test_accuracy:.2%}"


def train(config: TrainConfig, folder: str | Path, *, resume: bool = False, progress: bool = True) -> TrainResult:
    """Train a model and leave it in `folder`, with its configuration, metrics and a checkpoint.

    Args:
        config: what to train, on what, and how.
        folder: of the run. It may exist, but not hold another run.
        resume: continue from the checkpoint in `folder`, if there is one. On a CPU the result is the same, bit for
            bit, as that of a run that was never interrupted. A finished run is not repeated; with more `epochs` it
            continues, at the learning rates of the longer schedule. Other data than the run's is refused.
        progress: show a progress bar on stderr.
    """
    _check_packages()
    folder = Path(folder)
    with machine_errors(), Distributed(config) as distributed, _preserve_rng(distributed.device):
        with contextlib.ExitStack() as stack:

            def found() -> dict | None:
                if distributed.is_main:
                    stack.enter_context(checkpoint.locked(folder))
                return saved_state(folder, config, resume)

            state = distributed.agreed(found, lambda state: _brief(state, config))
            if state is not None and len(state["history"]) == config.optim.epochs:
                return TrainResult(folder, state["history"])
            check_precision(config, distributed.device)
            data, images = distributed.agreed(
                lambda: identified_data(folder, config, state), lambda found: str(found[1])
            )
            trainer = Trainer(config, folder, distributed, data, images)
            if state is not None:
                trainer.restore(state)
            return trainer.run(progress)


def _check_packages() -> None:
    missing = [name for name in ("safetensors", "tqdm") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"training needs {' and '.join(missing)}: pip install 'overtone[study]'")


def _brief(state: dict | None, config: TrainConfig) -> str:
    """What processes must have in common to continue together."""
    place = "no checkpoint" if state is None else f"step {state['step']} (SHA-256 {state['sha256'][:8]})"
    return f"{place}, configuration {config.digest()[:8]}"


@contextlib.contextmanager
def _preserve_rng(device: torch.device) -> Iterator[None]:
    """Training seeds torch's generators; the caller gets them back as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


class Trainer:
    """The loop of one run, from its configuration to its last checkpoint. See `train`."""

    def __init__(self, config: TrainConfig, folder: Path, distributed: Distributed, data: Data, images: Images) -> None:
        self.config, self.folder, self.distributed, self.data, self.images = config, folder, distributed, data, images
        self.device = distributed.device
        self.dtype = torch.float64 if config.optim.precision == "float64" else torch.float32
        self.steps_per_epoch = self._steps_per_epoch()
        is_text = isinstance(config.model, GPTConfig)
        self.targets_per_sample = config.model.context_length if is_text else 1  # type: ignore[attr-defined]
        self.model = build_model(config, data.info).to(self.device, self.dtype)
        if config.run.compile:
            # A graph per shape, whatever came before it, and torch's own random numbers: resuming stays exact.
            self.model.compile(dynamic=False, options={"fallback_random": True})
        self.wrapped = distributed.wrap(self.model)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.guard = FiniteGuard(self.optimizer, self.device)
        self.ema = EMA(self.model, config.optim.ema) if config.optim.ema else None
        self.step = 0
        self.history: list[logging.Row] = []
        self.sums = MetricSums(config.model.depth, self.device)  # of the epoch that is under way
        self.seconds = 0.0  # of the epoch that is under way, in all sessions
        self.targets_here, self.seconds_here = 0, 0.0  # of this session
        self.look_steps = 1 if self.device.type == "cpu" and distributed.world_size == 1 else LOOK_STEPS
        self.pending: PendingLook | None = None

    def _steps_per_epoch(self) -> int:
        batch, samples = self.config.optim.batch_size, len(self.data.train)
        parts = self.config.optim.grad_accumulation * self.distributed.world_size
        if batch % parts:
            raise ConfigError(f"batch_size: got {batch}, wanted a multiple of grad_accumulation × processes = {parts}")
        if samples < batch:
            what = "training images" if self.data.info.unit == "images" else "windows of the training text"
            raise ConfigError(f"batch_size: got {batch}, wanted at most the {samples} {what}")
        return samples // batch

    @property
    def steps(self) -> int:
        return self.config.optim.epochs * self.steps_per_epoch

    def run(self, progress: bool) -> TrainResult:
        is_main = self.distributed.is_main
        if is_main:
            self._describe(progress)
        self.bar = logging.Progress(self.folder.name, self.step, self.steps, shown=progress and is_main)
        self.events = logging.TensorBoardLogger(
            self.folder / "tensorboard", self.config.run.tensorboard and is_main, first_epoch=len(self.history)
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
            train, test = self.data.train.total, self.data.test.total
            print(f"data: {train} training and {test} test {self.data.info.unit} ({self.data.origin})", file=sys.stderr)

    def _epoch(self, epoch: int) -> None:
        batches = self._batches(epoch)
        parts = self.data.train.in_epoch(self.config.run.seed, epoch).batches(
            part for batch in batches for part in batch
        )
        checkpoint_steps = self.config.run.checkpoint_steps
        for batch in batches:
            start = time.perf_counter()
            self._step(epoch, batch, parts)
            self.step += 1
            is_last = self.step % self.steps_per_epoch == 0
            is_kept = checkpoint_steps > 0 and self.step % checkpoint_steps == 0
            metrics = self._look(wait=is_last or is_kept)
            self._count_time(time.perf_counter() - start)
            self._report(metrics)
            if is_last:
                assert metrics is not None
                self._finish_epoch(epoch, metrics)
            elif is_kept:
                self._save()

    def _batches(self, epoch: int) -> Tensor:
        """This process's samples in what is left of the epoch, [steps, parts, samples]."""
        optim, distributed = self.config.optim, self.distributed
        order = rng.permutation(len(self.data.train), rng.ORDER, self.config.run.seed, epoch)
        order = order[: self.steps_per_epoch * optim.batch_size]
        parts = order.view(self.steps_per_epoch, optim.grad_accumulation, distributed.world_size, -1)
        return parts[self.step % self.steps_per_epoch :, :, distributed.rank]

    def _step(self, epoch: int, batch: Tensor, parts: Iterator[Batch]) -> None:
        """One step of the optimizer, on a batch [parts, samples]. Nothing in it waits for the device."""
        self.wrapped.train()
        losses = []
        for part, samples in enumerate(batch):
            # Stochastic depth draws from torch's generator; whatever came before, this step draws the same.
            torch.manual_seed(rng.seed(rng.LAYERS, self.config.run.seed, self.step, part, self.distributed.rank))
            with self.distributed.gradients(self.wrapped, complete=part == len(batch) - 1):
                losses.append(self._accumulate(epoch, samples, next(parts)))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.steps_per_epoch, self.config.optim)
        limit = self.config.optim.clip_grad_norm or float("inf")
        norm = checkpoint.full_tensor(nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        self.guard.watch(self.step, norm, torch.stack(losses).sum())
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update(self.step)

    def _accumulate(self, epoch: int, samples: Tensor, batch: Batch) -> Tensor:
        """Add to the gradient; returns the loss of all samples together."""
        to_device, seed = self.distributed.to_device, self.config.run.seed
        targets = to_device(batch.targets)
        inputs = augment(to_device(batch.inputs), to_device(samples), epoch, self.config.data, seed)
        scores, ratios = self._forward(self.wrapped, inputs)
        loss = loss_of(scores, targets, self.config.optim.label_smoothing or 0.0)
        # DDP and FSDP2 take the mean over processes; what is wanted is the mean over the targets of all of them.
        (loss * (self.distributed.world_size / (self.config.optim.batch_size * self.targets_per_sample))).backward()
        self.sums.add(loss, scores, targets, ratios)
        return loss.detach()

    def _look(self, wait: bool) -> EpochMetrics | None:
        """The means of the epoch so far, over all processes, if there are new ones; raises if the run has diverged.

        wait: for those of this step. Otherwise they are those of the look before, which have arrived.
        """
        if not wait and self.step % self.look_steps:
            return None
        before, self.pending = self.pending, PendingLook(self.sums, self.guard, self.distributed)
        if wait:
            before, self.pending = self.pending, None
        if before is None:
            return None
        look = before.read()
        self._check_metrics(look)
        return look.metrics

    def _check_metrics(self, look: Look) -> None:
        if look.bad_gradient is not None:
            raise self._diverged("the gradient is not finite", look.bad_gradient, look.metrics.loss)
        if look.bad_loss is not None or not math.isfinite(look.metrics.loss):
            step = self.step if look.bad_loss is None else look.bad_loss
            raise self._diverged("the gradient is still finite", step, look.metrics.loss)

    def _diverged(self, what: str, step: int, loss: float) -> DivergedError:
        path = self.folder / checkpoint.CHECKPOINT
        last = "no checkpoint was written yet"
        if path.exists():
            last = f"the last good checkpoint, of step {checkpoint.read_state(path)['step']}, is {path}"
        return DivergedError(
            f"stopped at step {step} of {self.steps}: mean loss of the epoch is {loss:.4g} and {what}; {last}. "
            "A lower learning_rate, more warmup_epochs or clip_grad_norm=1 usually helps"
        )

    def _forward(self, model: Callable, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, and every layer's HFC/LFC, [layers, samples]."""
        try:
            return forward(model, self.data.info.prepare(inputs, self.dtype), self.config.optim.precision)
        except torch.linalg.LinAlgError as error:  # a spectrum's basis has become singular, in every process
            raise self._diverged(str(error), self.step, self.sums.means(self.distributed).loss) from None

    def _count_time(self, seconds: float) -> None:
        self.seconds += seconds
        self.seconds_here += seconds
        self.targets_here += self.config.optim.batch_size * self.targets_per_sample

    def _report(self, metrics: EpochMetrics | None) -> None:
        self.bar.show(self.step, metrics, self.targets_here / self.seconds_here, self.data.info.unit)

    def _finish_epoch(self, epoch: int, metrics: EpochMetrics) -> None:
        with self.ema.swapped_in() if self.ema is not None else contextlib.nullcontext():
            tested = evaluate(self.model, self._forward, self.data, self.distributed, self.config)
        targets = self.steps_per_epoch * self.config.optim.batch_size * self.targets_per_sample
        row: logging.Row = {
            "epoch": epoch + 1,
            "step": self.step,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "train_loss": metrics.loss,
            "train_accuracy": metrics.accuracy,
            "test_loss": tested.loss,
            "test_accuracy": tested.accuracy,
            f"{self.data.info.unit}_per_second": targets / self.seconds,
            "seconds": self.seconds,
        }
        row |= self.data.info.means(tested.loss)
        row |= {logging.ratio_column(layer): ratio for layer, ratio in enumerate(tested.ratios, 1)}
        self.sums = MetricSums(self.config.model.depth, self.device)
        self.seconds = 0.0
        weights = checkpoint.final_weights(self.model, self.ema)
        if self.distributed.is_main and self.config.model.kind == "general":
            row["condition"] = max(condition_numbers(self.model, weights).values(), default=math.nan)
        self.history.append(row)
        if self.distributed.is_main:
            logging.write_csv(self.folder / "metrics.csv", self.history)
            self.events.write(row)
            save_model(self.folder, self.config, self.data.info, weights)
        self._save()

    def _save(self) -> None:
        tensors = checkpoint.state_tensors(self.model, self.optimizer, self.ema)
        tensors["sums"] = self.distributed.sum(self.sums.values).cpu()
        if self.distributed.is_main:
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
        if self.distributed.is_main:
            checkpoint.note_if_unchecked(path)
        tensors = checkpoint.read_tensors(path)
        checkpoint.restore_state(tensors, self.model, self.optimizer, self.ema)
        if self.distributed.is_main:  # the others add nothing to what was summed before
            self.sums.restore(tensors)
        self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]
        before = TrainConfig.from_saved(state["config"], str(path)).optim
        if self.distributed.is_main:
            print(f"resumed at step {self.step} of {self.steps}", file=sys.stderr)
        if before.epochs != self.config.optim.epochs:
            self._extend(before)

    def _extend(self, before: OptimConfig) -> None:
        """From now on this is a run of more epochs, also for the next --resume."""
        if self.distributed.is_main:
            now = self.config.optim
            rates = [learning_rate(self.step, self.steps_per_epoch, optim) for optim in (before, now)]
            print(
                f"epochs: {before.epochs} become {now.epochs}: from here the cosine is that of the longer run, "
                f"so the learning rate goes from {rates[0]:.3g} to {rates[1]:.3g}; "
                f"the result is not that of {now.epochs} epochs from the start",
                file=sys.stderr,
            )
        self._save()
