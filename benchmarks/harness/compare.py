"""Two builds of overtone in one run: two processes take turns, round by round, and a slowdown is told from noise.

Every round gives one ratio, new time / old time, the order changing from round to round. The interval holds the true
median of the ratios with 99 % confidence, whatever their distribution: it is made of their order alone. A case is
slower if the whole interval is above the tolerance. Two processes may also differ by where their memory happens to lie,
which no number of rounds shows (6 % was seen between equal builds), so a case that looks slower or faster is measured
again by two new processes, whose word counts.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

from overtone.benchmarks.harness import machine

CONFIDENCE = 0.99
TOLERANCE = 0.02  # a smaller change is not looked for
ROUNDS, FEWEST_ROUNDS, SLICE_SECONDS = 20, 8, 0.05
MAX_RETRY_FACTOR = 3  # times as many rounds are tried on a machine that others use


class SideDied(RuntimeError):
    """A side's process ended before it answered."""


class Side(Protocol):
    """One build, ready to be told what to do."""

    cpu: float

    def prepare(self, case: str) -> str: ...  # what is wrong, or nothing

    def run(self, seconds: float) -> float: ...  # seconds of one call


class Process:
    """A side in a process of its own; `site` is the folder of its package, None for this one's."""

    def __init__(self, site: Path | None, threads: int | None = None) -> None:
        environment = dict(os.environ)
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        if site is not None:
            environment["PYTHONPATH"] = str(site)
        self.cpu = 0.0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "overtone.benchmarks.harness.worker"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        with suppress(BrokenPipeError):  # the missing answer says it
            print(json.dumps(order), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SideDied(f"a benchmark process ended with status {self._process.wait()}")
        return json.loads(answer)

    def prepare(self, case: str) -> str:
        answer = self._ask(case=case)
        return "" if answer["passed"] else answer["message"]

    def run(self, seconds: float) -> float:
        answer = self._ask(seconds=seconds)
        self.cpu = answer["cpu"]
        return answer["median"]

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        with suppress(BrokenPipeError):  # it has died, and that was said
            self._process.stdin.close()
        self._process.wait()


class Interval(NamedTuple):
    low: float
    high: float


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Order statistics that hold the median of what the values are samples of, with at least this confidence.

    The number of samples below the median is binomial with p = ½. With too few values it is all of them.
    """
    ordered, count = sorted(values), len(values)
    outside, skipped = 0.0, 0
    while skipped < (count - 1) // 2:
        outside += math.comb(count, skipped) / 2**count
        if 2 * outside > 1 - confidence:
            break
        skipped += 1
    first = max(0, skipped - 1)
    return Interval(ordered[first], ordered[count - 1 - first])


@dataclass(frozen=True)
class Comparison:
    """One case on both sides: seconds of every kept round, or what went wrong."""

    case: str
    old: tuple[float, ...] = ()
    new: tuple[float, ...] = ()
    reliable: bool = True
    failure: str = ""
    tolerance: float = TOLERANCE

    @property
    def ratios(self) -> list[float]:
        return [new / old for old, new in zip(self.old, self.new, strict=True)]

    @property
    def interval(self) -> Interval:
        return median_interval(self.ratios)

    @property
    def verdict(self) -> str:
        if self.failure:
            return "FAILED"
        low, high = self.interval
        if low > 1 + self.tolerance:
            return "SLOWER"
        return "faster" if high < 1 - self.tolerance else "same"

    def row(self) -> str:
        mark = "" if self.reliable else "~"
        if self.failure:
            return f"{self.verdict:8}{self.case}: {self.failure}"
        low, high = self.interval
        times = f"{median(self.old) * 1e3:9.3f} → {median(self.new) * 1e3:9.3f} ms"
        return f"{self.verdict:8}{times}  × {median(self.ratios):.3f}  [{low:.3f}, {high:.3f}]  {mark}{self.case}"


def compare(
    case: str,
    old: Side,
    new: Side,
    *,
    rounds: int = ROUNDS,
    seconds: float = SLICE_SECONDS,
    tolerance: float = TOLERANCE,
) -> Comparison:
    """Time one case on both sides in turns."""
    for name, side in (("old", old), ("new", new)):
        wrong = side.prepare(case)
        if wrong:
            return Comparison(case, failure=f"the {name} one: {wrong}")
    for side in (old, new):
        side.run(0.0)  # the first call after the other side's set-up
    kept: list[tuple[float, float]] = []
    every: list[tuple[float, float]] = []
    while len(kept) < rounds and len(every) < MAX_RETRY_FACTOR * rounds:
        load = machine.OtherLoad(lambda: time.process_time() + old.cpu + new.cpu)
        if len(every) % 2:
            pair = (old.run(seconds), new.run(seconds))
        else:
            pair = (new.run(seconds), old.run(seconds))[::-1]
        every.append(pair)
        if not machine.is_noisy(load.cpus()):
            kept.append(pair)
    reliable = len(kept) >= min(rounds, FEWEST_ROUNDS)
    old_seconds, new_seconds = zip(*(kept if reliable else every), strict=True)
    return Comparison(case, old_seconds, new_seconds, reliable, tolerance=tolerance)


Sides = Callable[[], tuple[Any, Any]]  # two context managers, of the old side and of the new one


def compare_all(
    cases: Sequence[str], sides: Sides, report: Callable[[Comparison], None], **options: Any
) -> list[Comparison]:
    """Every case; those that look slower or faster once more, by new processes."""

    def measured(names: Sequence[str]) -> list[Comparison]:
        first, second = sides()
        with first as old, second as new:
            found = []
            for name in names:
                found.append(compare(name, old, new, **options))
                report(found[-1])
            return found

    results = measured(cases)
    suspects = [result.case for result in results if result.verdict in ("SLOWER", "faster")]
    if not suspects:
        return results
    again = {result.case: result for result in measured(suspects)}
    return [again.get(result.case, result) for result in results]
