"""Runs the trainings of a study, several at a time, and goes on where an earlier study was stopped."""

from __future__ import annotations

import concurrent.futures
import contextlib
import csv
import ctypes
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from overtone.backends import forced_backend, use_backend
from overtone.study.measure import Measures, measure_trained, settings
from overtone.study.plan import Run
from overtone.training import checkpoint, train

MEASURES = "measures.json"
# Each process holds a copy of torch, some hundred megabytes.
MOST_JOBS = 8
SECONDS_BETWEEN_POLLS = 0.5


def run_all(
    runs: Sequence[Run], folder: Path, *, images: int, jobs: int | None = None, progress: bool = True
) -> dict[Run, Measures]:
    """Train and measure every run, in `folder`/its name. What is finished there already is only read.

    jobs: runs at a time; default: one per core, one alone where there is a GPU. On a CPU a run has one thread, so
    that its result does not depend on how many run beside it.
    """
    found = {run: finished(run, folder, images) for run in runs}
    missing = [run for run, measures in found.items() if measures is None]
    jobs = min(len(missing), jobs or default_jobs())
    with _Progress(runs, folder, progress) as bar:
        bar.poll(done=[run for run in runs if run not in missing])
        for run, measures in _results(missing, folder, images, jobs, bar):
            found[run] = measures
            bar.report(run, measures)
    return {run: measures for run, measures in found.items() if measures is not None}


def default_jobs() -> int:
    return 1 if torch.cuda.is_available() else min(MOST_JOBS, len(os.sched_getaffinity(0)))


def finished(run: Run, folder: Path, images: int) -> Measures | None:
    """The run's measures, if it has been trained and measured as it would be now."""
    path = folder / run.folder_name / MEASURES
    try:
        measures = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return measures if isinstance(measures, dict) and measures.get("settings") == settings(images) else None


def finish(run: Run, folder: Path, images: int, backend: str | None, progress: bool = False) -> Measures:
    """Train one run, or the rest of it, and measure the model."""
    place = folder / run.folder_name
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with use_backend(backend), _one_thread() if device.type == "cpu" else contextlib.nullcontext():
        result = train(run.config, place, resume=True, progress=progress)
        measures: Measures = {"settings": settings(images), "accuracy": result.test_accuracy}
        measures["seconds"] = sum(row["seconds"] for row in result.history)
        if run.fraction == 1:
            measures |= measure_trained(str(place), run.config, images, device)
    checkpoint.write_text(place / MEASURES, json.dumps(measures))
    return measures


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _results(
    runs: Sequence[Run], folder: Path, images: int, jobs: int, bar: _Progress
) -> Iterator[tuple[Run, Measures]]:
    """Each run and its measures, as they become ready."""
    if jobs <= 1:
        for run in runs:
            yield run, finish(run, folder, images, forced_backend(), progress=not bar.bar.disable)
        return
    others = multiprocessing.active_children()
    pool = concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _end_with_parent)
    try:
        waiting = {pool.submit(finish, run, folder, images, forced_backend()): run for run in runs}
        while waiting:
            ready, _ = concurrent.futures.wait(
                waiting, SECONDS_BETWEEN_POLLS, return_when=concurrent.futures.FIRST_COMPLETED
            )
            bar.poll()
            for future in ready:
                yield waiting.pop(future), future.result()
    except BaseException:
        # Whatever was under way goes on from its checkpoint next time; nobody waits for it now.
        for child in set(multiprocessing.active_children()) - set(others):
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """A study that is killed leaves no process behind, which would hold its run's lock."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


class _Progress:
    """A bar over the images of all runs. Runs tell how far they are by the metrics they write after every epoch."""

    def __init__(self, runs: Sequence[Run], folder: Path, shown: bool) -> None:
        from tqdm import tqdm

        self.folder, self.total, self.shown = folder, len(runs), shown
        self.left = list(runs)
        self.full = 0.0  # epochs of finished runs, weighted by their share of the data
        self.bar = tqdm(
            total=sum(map(_work, runs)),
            desc=f"0/{self.total} runs",
            disable=not (shown and sys.stderr.isatty()),  # a log gets a line per run instead
            bar_format="{desc} {percentage:3.0f} %|{bar}| {elapsed}, {remaining} left",
            dynamic_ncols=True,
        )

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def poll(self, done: Sequence[Run] = ()) -> None:
        """Where all runs are now; done: those that were finished before."""
        for run in done:
            self._finish(run)
        reached = self.full + sum(_work(run, _epochs(self.folder / run.folder_name)) for run in self.left)
        if done:
            self.bar.initial = reached  # what was there before says nothing about the time that is left
        self.bar.update(max(0.0, reached - self.bar.n))

    def report(self, run: Run, measures: Measures) -> None:
        self._finish(run)
        if self.shown:
            text = (
                f"[{self.total - len(self.left)}/{self.total}] {run}: {measures['accuracy']:.1%} of test images right"
            )
            self.bar.write(text, file=sys.stderr)
        self.poll()

    def _finish(self, run: Run) -> None:
        self.left.remove(run)
        self.full += _work(run)
        self.bar.set_description_str(f"{self.total - len(self.left)}/{self.total} runs", refresh=False)


def _work(run: Run, epochs: int | None = None) -> float:
    return (run.config.epochs if epochs is None else epochs) * run.fraction


def _epochs(folder: Path) -> int:
    """How many epochs a run has finished."""
    try:
        with (folder / "metrics.csv").open(newline="") as file:
            return sum(1 for _ in csv.reader(file)) - 1
    except OSError:
        return 0
