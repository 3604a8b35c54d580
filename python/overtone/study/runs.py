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

from overtone.backends import active_backend, use_backend
from overtone.study.measure import Measures, measure, settings
from overtone.study.plan import Run
from overtone.training import checkpoint, train

# Each process holds a copy of torch, some hundred megabytes.
MOST_JOBS = 8
SECONDS_BETWEEN_POLLS = 0.5


def run_all(
    runs: Sequence[Run], folder: Path, *, images: int, jobs: int | None = None, progress: bool = True
) -> dict[Run, Measures]:
    """Train and measure every run, in `folder`/its name. What is finished there already is only read.

    Runs of different comparisons that are the same training are trained once.

    jobs: runs at a time; default: one per core, one alone where there is a GPU. On a CPU a run has one thread, so
    that its result does not depend on how many run beside it.
    """
    found = {run: finished(run, folder, images) for run in runs}
    missing: dict[str, list[Run]] = {}
    for run in runs:
        if found[run] is None:
            missing.setdefault(run.folder_name, []).append(run)
    trainings = list({run.folder_name: run for run in runs}.values())
    jobs = min(len(missing), jobs or default_jobs())
    with _Progress(trainings, folder, progress) as bar:
        bar.poll(done=[run for run in trainings if run.folder_name not in missing])
        for measured in _results(list(missing.values()), folder, images, jobs, bar):
            found |= measured
            bar.report(*next(iter(measured.items())))
    return {run: measures for run, measures in found.items() if measures is not None}


def default_jobs() -> int:
    return 1 if torch.cuda.is_available() else min(MOST_JOBS, len(os.sched_getaffinity(0)))


def finished(run: Run, folder: Path, images: int) -> Measures | None:
    """The run's measures, if it has been trained and measured as it would be now."""
    path = folder / run.folder_name / f"{run.part}.json"
    try:
        measures = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return measures if isinstance(measures, dict) and measures.get("settings") == settings(images) else None


def finish(
    runs: Sequence[Run], folder: Path, images: int, backend: str | None, progress: bool = False
) -> dict[Run, Measures]:
    """Train what these runs share, or the rest of it, and measure the model for each of them."""
    config, place = runs[0].config, folder / runs[0].folder_name
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[Run, Measures] = {}
    with use_backend(backend), _one_thread() if device.type == "cpu" else contextlib.nullcontext():
        result = train(config, place, resume=True, progress=progress)
        for run in runs:
            measures: Measures = {"settings": settings(images), "accuracy": result.test_accuracy}
            measures["seconds"] = sum(row["seconds"] for row in result.history)
            measures |= measure(run.part, str(place), config, result.history, images, device)
            checkpoint.write_text(place / f"{run.part}.json", json.dumps(measures))
            found[run] = measures
    return found


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _results(
    groups: Sequence[Sequence[Run]], folder: Path, images: int, jobs: int, bar: _Progress
) -> Iterator[dict[Run, Measures]]:
    """The measures of each group of runs that share a training, as they become ready."""
    if jobs <= 1:
        for runs in groups:
            yield finish(runs, folder, images, active_backend(), progress=not bar.bar.disable)
        return
    others = multiprocessing.active_children()
    pool = concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _end_with_parent)
    try:
        waiting = {pool.submit(finish, runs, folder, images, active_backend()) for runs in groups}
        while waiting:
            ready, _ = concurrent.futures.wait(
                waiting, SECONDS_BETWEEN_POLLS, return_when=concurrent.futures.FIRST_COMPLETED
            )
            bar.poll()
            for future in ready:
                waiting.remove(future)
                yield future.result()
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
        self.full = 0.0  # work of finished runs
        self.bar = tqdm(
            total=sum(run.work for run in runs),
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
        reached = self.full + sum(_done(run, self.folder) for run in self.left)
        if done:
            self.bar.initial = reached  # what was there before says nothing about the time that is left
        self.bar.update(max(0.0, reached - self.bar.n))

    def report(self, run: Run, measures: Measures) -> None:
        self._finish(run)
        if self.shown:
            text = f"[{self.total - len(self.left)}/{self.total}] {run}: test accuracy {measures['accuracy']:.1%}"
            self.bar.write(text, file=sys.stderr)
        self.poll()

    def _finish(self, run: Run) -> None:
        self.left = [other for other in self.left if other.folder_name != run.folder_name]
        self.full += run.work
        self.bar.set_description_str(f"{self.total - len(self.left)}/{self.total} runs", refresh=False)


def _done(run: Run, folder: Path) -> float:
    """How much of its work a run has done."""
    try:
        with (folder / run.folder_name / "metrics.csv").open(newline="") as file:
            epochs = sum(1 for _ in csv.reader(file)) - 1
    except OSError:
        return 0.0
    return run.work * epochs / run.epochs
