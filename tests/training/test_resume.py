"""A run that was killed, at any moment, and resumed is the run that was not: the same bits in every tensor."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from support import runs

from overtone.training import checkpoint, train


def go_on(folder: Path) -> None:
    train(runs.TINY, folder, resume=True, progress=False)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, float]:
    """The run, and the seconds it took."""
    folder = tmp_path_factory.mktemp("runs")
    runs.run_well(go_on, folder / "warm-up")
    start = time.perf_counter()
    runs.run_well(go_on, folder / "uninterrupted")
    runs.check_same_bits(folder / "uninterrupted", folder / "warm-up")
    return folder / "uninterrupted", time.perf_counter() - start


def go_on_and_die(folder: Path, moment: str, write: int) -> None:
    """Be killed around the given write of a checkpoint."""
    save, replace, counted = checkpoint.write_tensors, os.replace, [0]

    def dying_save(path, *arguments):
        if path.name == checkpoint.CHECKPOINT:
            counted[0] += 1
        save(path, *arguments)

    def dying_replace(draft, path):
        due = counted[0] == write and Path(path).name == checkpoint.CHECKPOINT
        if due and moment == "half written":
            os.truncate(draft, os.path.getsize(draft) // 2)
        if due and moment != "after the rename":
            runs.die()
        replace(draft, path)
        if due:
            runs.die()

    checkpoint.write_tensors, os.replace = dying_save, dying_replace
    go_on(folder)


# The first write, one within an epoch, and one between epochs.
@pytest.mark.parametrize(
    ("moment", "write"),
    [
        ("half written", 1),
        ("half written", 4),
        ("before the rename", 3),
        ("after the rename", 1),
        ("after the rename", 4),
    ],
)
def test_killed_while_a_checkpoint_is_written(uninterrupted, tmp_path, moment, write):
    assert runs.statuses(runs.start(go_on_and_die, tmp_path, moment, write)) == [-9]
    done = write if moment == "after the rename" else write - 1
    path = tmp_path / checkpoint.CHECKPOINT
    assert (checkpoint.read_state(path)["step"] if path.exists() else 0) == done
    runs.run_well(go_on, tmp_path)
    runs.check_same_bits(tmp_path, uninterrupted[0])


def test_killed_at_random_moments(uninterrupted, tmp_path):
    expected, seconds = uninterrupted
    draw = random.Random()  # other moments whenever the test runs
    kills = 0
    for attempt in range(20):
        (process,) = runs.start(go_on, tmp_path / str(attempt - kills))
        process.join(draw.uniform(0.1, 0.9) * seconds)
        kills += process.exitcode is None
        process.kill()
        process.join()
        if kills == 4:
            break
    assert kills
    for folder in tmp_path.iterdir():
        runs.run_well(go_on, folder)
        runs.check_same_bits(folder, expected)
