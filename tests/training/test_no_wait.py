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
from support.tracing import Trace, fake_gpu, without_numbers
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from overtone.training import DivergedError, TrainConfig
from overtone.training.distributed import Distributed
from overtone.training.metrics import FiniteGuard, MetricSums, PendingLook
from overtone.training.optim import EMA, build_optimizer
from overtone.training.run_folder import identified_data
from overtone.training.trainer import Trainer

IMAGES = runs.TINY.replace(shift=1, flip=True, crop=0.5)
TEXT = TrainConfig(
    data="text", train_fraction=0.01, dim=16, num_heads=2, depth=2, context_length=16, batch_size=16, ema=0.9,
    grad_accumulation=2, drop_path=0.1, tensorboard=False,
)  # fmt: skip


def on_fake_device(trainer: Trainer, mode: FakeTensorMode) -> None:
    """All of a trainer's state becomes fake, inside `fake_gpu`."""
    without_numbers(trainer.model)
    trainer.optimizer = build_optimizer(trainer.model, trainer.config.optim)
    trainer.guard = FiniteGuard(trainer.optimizer, trainer.device)
    trainer.ema = EMA(trainer.model, trainer.config.optim.ema)
    trainer.sums = MetricSums(trainer.config.model.depth, trainer.device)
    trainer.distributed.to_device = mode.from_tensor  # type: ignore[method-assign]


def trainer_of(config: TrainConfig, folder: Path) -> Trainer:
    return Trainer(config, folder, Distributed(config), *identified_data(folder, config, None))


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (IMAGES, {"regime": "free"}),
        (IMAGES, {}),
        (IMAGES, {"kind": "general", "precision": "bfloat16", "grad_checkpointing": True}),
        (TEXT, {"regime": "sharpen,free"}),
    ],
    ids=["free", "symmetric", "general bf16", "text"],
)
def test_a_step_never_waits(monkeypatch, tmp_path, config, changes):
    trainer = trainer_of(config.replace(**changes), tmp_path)
    batches = [list(batch) for batch in trainer._batches(0)]
    parts = list(trainer.data.train.batches(part for batch in batches[:2] for part in batch))
    with fake_gpu(monkeypatch) as mode:
        on_fake_device(trainer, mode)
        with Trace() as trace:
            for step in range(2):
                trainer._step(0, batches[step], iter(parts[2 * step : 2 * step + 2]))
                trainer.step += 1
            look = PendingLook(trainer.sums, trainer.guard, trainer.model, trainer.distributed)
    assert isinstance(look._values, FakeTensor)
    assert trace.calls["aten::_fused_adamw_"] == 4  # two groups in two steps: the updates are in the trace
    waits = {"aten::_local_scalar_dense", "aten::equal", "aten::item", "aten::nonzero", "aten::lift_fresh"}
    assert sorted(waits & trace.calls.keys()) == []


def test_the_trace_sees_a_wait(monkeypatch, tmp_path):
    """The trainer as it would be if it looked at the norm of every gradient."""
    trainer = trainer_of(TEXT, tmp_path)
    batch = list(trainer._batches(0)[0])
    parts = list(trainer.data.train.batches(batch))
    watch = FiniteGuard.watch
    monkeypatch.setattr(FiniteGuard, "watch", lambda self, step, norm, loss: watch(self, norm.item(), norm, loss))
    with fake_gpu(monkeypatch) as mode, pytest.raises(DataDependentOutputException):
        on_fake_device(trainer, mode)
        trainer._step(0, batch, iter(parts))


def test_a_bad_basis_is_named_at_the_next_look(monkeypatch, tmp_path):
    """A GPU's step leaves nan in the condition of a singular basis, and gradients of nan; the look says which layer."""
    trainer = trainer_of(runs.TINY.replace(checkpoint_steps=0), tmp_path)
    trainer.look_steps = 10
    step, watch = Trainer._step, FiniteGuard.watch

    def on_a_gpu(self, *arguments):
        before = self.model.head.weight.detach().clone()
        step(self, *arguments)
        if self.step >= 1:
            self.model.blocks[0].attn.spectrum.condition.fill_(torch.nan)
            assert torch.equal(self.model.head.weight, before)

    monkeypatch.setattr(Trainer, "_step", on_a_gpu)
    monkeypatch.setattr(
        FiniteGuard, "watch", lambda self, step, norm, loss: watch(self, step, norm / (step != 1), loss)
    )
    with pytest.raises(DivergedError, match=r"stopped at step 1 of 8: .* blocks.0.attn.spectrum: basis is singular or"):
        trainer.run(progress=False)


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
