"""A step of the trainer never waits for the device.

On fake tensors nothing has a value: whatever asked for one, a branch, .item() or .tolist(), would raise. What is in
the host's memory is real, and must pass through `Distributed.to_device`, whose copies are not waited for: fake and
real tensors in one operation raise too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import runs
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from overtone.training import TrainConfig
from overtone.training.distributed import Distributed
from overtone.training.metrics import FiniteGuard, MetricSums, PendingLook
from overtone.training.optim import EMA, build_optimizer
from overtone.training.run_folder import identified_data
from overtone.training.trainer import Trainer

IMAGES = runs.TINY.replace(regime="free", shift=1, flip=True, crop=0.5)
TEXT = TrainConfig(
    data="text", train_fraction=0.01, dim=16, num_heads=2, depth=2, context_length=16, batch_size=16, ema=0.9,
    grad_accumulation=2, drop_path=0.1, tensorboard=False,
)  # fmt: skip


class Record(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def on_fake_device(config: TrainConfig, folder: Path, mode: FakeTensorMode) -> Trainer:
    """A trainer all of whose state is fake."""
    distributed = Distributed(config)
    trainer = Trainer(config, folder, distributed, *identified_data(folder, config, None))
    with mode:
        for module in trainer.model.modules():
            for name, value in module._parameters.items():
                if value is not None:
                    module._parameters[name] = nn.Parameter(torch.empty(value.shape, dtype=value.dtype))
        trainer.optimizer = build_optimizer(trainer.model, config.optim)
        trainer.guard = FiniteGuard(trainer.optimizer, trainer.device)
        trainer.ema = EMA(trainer.model, config.optim.ema)
        trainer.sums = MetricSums(config.model.depth, trainer.device)
    distributed.to_device = mode.from_tensor  # type: ignore[method-assign]
    return trainer


@pytest.mark.parametrize(("config", "precision"), [(IMAGES, "float32"), (IMAGES, "bfloat16"), (TEXT, "float32")])
def test_a_step_on_fake_tensors(tmp_path, config, precision):
    mode = FakeTensorMode()
    trainer = on_fake_device(config.replace(precision=precision), tmp_path, mode)
    batches = [list(batch) for batch in trainer._batches(0)]
    parts = list(trainer.data.train.batches(part for batch in batches[:2] for part in batch))
    with mode, Record() as record:
        for step in range(2):
            trainer._step(0, batches[step], iter(parts[2 * step : 2 * step + 2]))
            trainer.step += 1
            look = PendingLook(trainer.sums, trainer.guard, trainer.distributed)
    assert isinstance(look._values, FakeTensor)
    assert record.names.count("aten::_fused_adamw_") >= 2  # the updates are in the record
    waits = {"aten::_local_scalar_dense", "aten::equal", "aten::item", "aten::nonzero", "aten::lift_fresh"}
    assert not waits & set(record.names)


def test_the_check_sees_a_wait(tmp_path, monkeypatch):
    mode = FakeTensorMode()
    trainer = on_fake_device(TEXT, tmp_path, mode)
    batch = list(trainer._batches(0)[0])
    parts = list(trainer.data.train.batches(batch))
    watch = FiniteGuard.watch
    monkeypatch.setattr(FiniteGuard, "watch", lambda self, step, norm, loss: watch(self, norm.item(), norm, loss))
    with mode, pytest.raises(Exception, match="_local_scalar_dense"):
        trainer._step(0, batch, iter(parts))


def test_the_guard_freezes_the_weights_and_names_the_first_step():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    guard = FiniteGuard(optimizer, weight.device)
    before = []
    for step, bad in enumerate((False, False, True, False)):
        weight.grad = torch.full((3,), float("nan") if bad else 1.0)
        guard.watch(step, weight.grad.norm(), torch.tensor(1.0 if step else float("inf")))
        optimizer.step()
        before.append(weight.detach().clone())
    assert not torch.equal(before[0], before[1])
    assert torch.equal(before[1], before[2]) and torch.equal(before[2], before[3])
    assert int(optimizer.state[weight]["step"]) == 2
    assert guard.steps.tolist() == [2, 0]  # of the gradient, and of the loss
