"""Several processes: the losses of one, checkpoints that any number can go on from, and an end when one fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support import runs

from overtone.training import LostProcessError, TrainingError, checkpoint, train
from overtone.training.trainer import Trainer

# Stochastic depth draws per process; without it the runs differ only in the order of sums.
EXACT = runs.TINY.replace(precision="float64", drop_path=0.0, checkpoint_steps=0)
# In float64 that is 1e-16 a step, and AdamW may enlarge it; a sample, weight or factor that is wrong shows in the
# second digit of the loss.
ROUNDING = 1e-9


def train_all(folder: Path, changes: dict) -> None:
    train(EXACT.replace(**changes), folder, resume=True, progress=False)


def train_one_epoch(folder: Path, changes: dict) -> None:
    finish = Trainer._finish_epoch

    def finish_and_stop(self, *arguments):
        finish(self, *arguments)
        sys.exit(0)

    Trainer._finish_epoch = finish_and_stop
    train_all(folder, changes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    runs.run_well(train_all, folder, {})
    return folder


def check_same_up_to_rounding(folder: Path, alone: Path) -> None:
    (tensors, history), (expected_tensors, expected_history) = runs.outcome(folder), runs.outcome(alone)
    assert len(history) == len(expected_history) == EXACT.epochs
    for row, expected in zip(history, expected_history, strict=True):
        assert row == pytest.approx(expected, rel=ROUNDING)
    for name, expected in expected_tensors.items():
        torch.testing.assert_close(tensors[name], expected, rtol=ROUNDING, atol=ROUNDING, msg=name)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_as_one(alone, tmp_path, strategy):
    runs.run_well(train_all, tmp_path, {"strategy": strategy}, processes=2)
    check_same_up_to_rounding(tmp_path, alone)


def test_fsdp_and_a_method_that_reads_a_block_from_outside(tmp_path):
    changes = {"method": "neutreno", "epochs": 1}
    runs.run_well(train_all, tmp_path / "alone", changes)
    runs.run_well(train_all, tmp_path / "both", changes | {"strategy": "fsdp"}, processes=2)
    (both, _), (alone, _) = runs.outcome(tmp_path / "both"), runs.outcome(tmp_path / "alone")
    for name, expected in alone.items():
        torch.testing.assert_close(both[name], expected, rtol=ROUNDING, atol=ROUNDING, msg=name)


@pytest.mark.parametrize(("first", "then", "strategy"), [(2, 1, "fsdp"), (1, 2, "fsdp"), (2, 1, "ddp")])
def test_a_checkpoint_goes_on_with_another_number_of_processes(alone, tmp_path, first, then, strategy):
    runs.run_well(train_one_epoch, tmp_path, {"strategy": strategy}, processes=first)
    assert len(checkpoint.read_state(tmp_path / checkpoint.CHECKPOINT)["history"]) == 1
    runs.run_well(train_all, tmp_path, {"strategy": strategy}, processes=then)
    check_same_up_to_rounding(tmp_path, alone)


def refuse_to_train(folder: Path, change: str) -> None:
    """Every process has a folder of its own; each writes what it was refused with."""
    rank = os.environ["RANK"]
    mine = folder / rank
    config = EXACT
    if change == "data":
        config = EXACT.replace(
            data="folder", data_dir=str(folder / "data" / rank), train_fraction=1.0, image_size=8, patch_size=4
        )
    if change == "configuration":
        config = EXACT.replace(seed=int(rank))
    try:
        train(config.replace(timeout=30.0), mine, resume=True, progress=False)
    except TrainingError as error:
        mine.mkdir(exist_ok=True)
        (mine / "message").write_text(f"{type(error).__name__}: {error}")
        sys.exit(error.exit_status)


def make_states(folder: Path, change: str) -> None:
    """What the two ranks find: rank 1 another state than rank 0."""
    for rank in ("0", "1"):
        runs.run_well(train_one_epoch, folder / rank, {})
    if change == "no checkpoint":
        shutil.rmtree(folder / "1")
    elif change == "another step":
        (folder / "1" / checkpoint.CHECKPOINT).unlink()
        runs.run_well(train_all, folder / "1", {})
    elif change == "other weights":
        path = folder / "1" / checkpoint.CHECKPOINT
        state, tensors = checkpoint.read_state(path), checkpoint.read_tensors(path)
        tensors["model.head.bias"] = tensors["model.head.bias"] + 1
        checkpoint.write_tensors(path, tensors, state)
    elif change == "damage":
        path = folder / "1" / checkpoint.CHECKPOINT
        path.write_bytes(path.read_bytes()[:-1])
    else:
        for rank in ("0", "1"):
            shutil.rmtree(folder / rank)


def make_data(folder: Path) -> None:
    """Two copies of the same images, one of them with one more."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow to make images")
    for rank in (0, 1):
        for number in range(80 + rank):
            place = folder / str(rank) / "ab"[number % 2] / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            image.new("RGB", (8, 8), (number, 0, 0)).save(place)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("no checkpoint", r"rank 0: step 4 \(SHA-256 .*rank 1: no checkpoint"),
        ("another step", r"rank 0: step 4 \(SHA-256 .*rank 1: step 8 "),
        ("other weights", r"rank 0: step 4 \(SHA-256 (\w+)\).*rank 1: step 4 \(SHA-256 (?!\1)"),
        ("damage", r"checkpoint.safetensors is damaged"),
        ("configuration", r"rank 0: no checkpoint, configuration (\w+); rank 1: no checkpoint, configuration (?!\1)"),
        ("data", r"rank 0: 82 classes and images .*rank 1: 83 classes and images"),
    ],
)
def test_ranks_that_would_train_different_runs_are_refused(tmp_path, change, words):
    """Folders that only one machine sees; without a look at all of them, rank 0 would finish an average of both."""
    make_states(tmp_path, change)
    if change == "data":
        make_data(tmp_path / "data")
    assert runs.statuses(runs.start(refuse_to_train, tmp_path, change, processes=2)) == [2, 2]
    for rank in ("0", "1"):
        message = (tmp_path / rank / "message").read_text()
        assert re.search(words, message) and len(message.splitlines()) == 1
    assert change == "damage" or "the ranks would not train the same run" in message


def lose_a_process(folder: Path, fate: str) -> None:
    update = Trainer._step

    def dying_step(self, *arguments):
        if self.step == 2 and self.distributed.rank == 1:
            runs.die() if fate == "dies" else time.sleep(runs.SECONDS)
        update(self, *arguments)

    Trainer._step = dying_step
    try:
        train_all(folder, {"timeout": 5.0})
    except LostProcessError as error:
        (folder / "message").write_text(str(error))
        sys.exit(error.exit_status)


@pytest.mark.parametrize("fate", ["dies", "hangs"])
def test_a_lost_process_ends_the_others(tmp_path, fate):
    first, second = runs.start(lose_a_process, tmp_path, fate, processes=2)
    first.join(runs.SECONDS)
    second.kill()
    assert first.exitcode == 1
    message = (tmp_path / "message").read_text()
    assert message.startswith("rank 0 of 2 lost contact with the other ranks") and "--resume" in message


def test_torchrun_ends_when_one_process_fails(tmp_path):
    """One image is broken, so one of the two processes fails while the other waits for its gradients."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow to make images")
    for number in range(8):
        place = tmp_path / "data" / str(number % 2) / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (8, 8), (number, 0, 0)).save(place)
    broken = tmp_path / "data" / "1" / "3.png"
    broken.write_bytes(broken.read_bytes()[:40])
    options = "--data folder --image-size 8 --patch-size 4 --dim 16 --num-heads 2 --depth 1 --batch-size 2 --timeout 60"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "overtone", "train", *options.split(), "--data-dir", str(tmp_path / "data")]
    result = subprocess.run(
        [*command, "--out", str(tmp_path / "run")], capture_output=True, text=True, timeout=runs.SECONDS, check=False
    )
    assert result.returncode != 0
    assert f"cannot read image {broken}" in result.stderr
