"""Interleaved timing: every round runs each implementation for a moment, A, B, A, B, so that drift hits all alike.

A round in which other processes used the machine is discarded, for all implementations together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from overtone import hardware
from overtone.benchmarks.harness import machine
from overtone.benchmarks.harness.case import Call

# Figures from fewer clean rounds are marked. Slow cases get this many times their seconds to see them.
ENOUGH_ROUNDS = 3
MAX_RETRY_FACTOR = 10


@dataclass(frozen=True)
class Plan:
    """How long to measure: until `rounds` clean rounds were seen, at most `seconds` per case.

    A case without enough of them by then goes on until it has them, at most `retry_factor` times as long.
    """

    rounds: int = 10
    seconds: float = 15.0
    slice_seconds: float = 0.05  # how long an implementation runs in one round, one call at least
    retry_factor: float = MAX_RETRY_FACTOR

    def within(self, seconds: float | None) -> Plan:
        """The plan for a case that may take that long, checks and compilation included; the same for None."""
        if seconds is None:
            return self
        own = min(self.seconds, seconds / 3)
        return replace(self, seconds=own, retry_factor=min(self.retry_factor, max(1.0, seconds / own / 2)))


QUICK = Plan(rounds=2, seconds=1.0, slice_seconds=0.0)


@dataclass(frozen=True)
class Timing:
    """Seconds per call, over all kept rounds and of each of them."""

    minimum: float
    median: float
    calls: int
    round_minimums: tuple[float, ...]
    round_medians: tuple[float, ...]


@dataclass(frozen=True)
class Measurement:
    timings: dict[str, Timing]
    rounds: int
    clean_rounds: int
    reliable: bool  # enough clean rounds; otherwise the timings may be of a shared machine
    round_trips: tuple[float | None, ...] = ()  # of a cache line between two threads, before each kept round


@dataclass(frozen=True)
class _Round:
    seconds: dict[str, list[float]]
    noisy: bool
    round_trip: float | None


def time_slice(call: Call, seconds: float) -> list[float]:
    """Seconds of every call that fits into `seconds`, of one at least."""
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while not samples or time.perf_counter() < end:
        state = call.prepare()
        start = time.perf_counter()
        call.run(state)
        samples.append(time.perf_counter() - start)
    return samples


def _run_round(calls: Mapping[str, Call], slice_seconds: float) -> _Round:
    load = machine.OtherLoad()
    round_trip = hardware.thread_latency()
    seconds = {name: time_slice(call, slice_seconds) for name, call in calls.items()}
    return _Round(seconds, machine.is_noisy(load.cpus()), round_trip)


def _summarize(name: str, rounds: list[_Round]) -> Timing:
    per_round = [each.seconds[name] for each in rounds]
    samples = [sample for each in per_round for sample in each]
    return Timing(
        min(samples), median(samples), len(samples), tuple(map(min, per_round)), tuple(map(median, per_round))
    )


def interleave(calls: Mapping[str, Call], plan: Plan) -> Measurement:
    """Time the calls in rounds. They must have run once before, so that nothing is compiled here."""
    rounds: list[_Round] = []
    clean: list[_Round] = []
    enough = min(ENOUGH_ROUNDS, plan.rounds)
    start = time.perf_counter()

    def seconds_allowed() -> float:
        return plan.seconds * (1 if len(clean) >= enough else plan.retry_factor)

    while not rounds or (len(clean) < plan.rounds and time.perf_counter() - start < seconds_allowed()):
        rounds.append(_run_round(calls, plan.slice_seconds))
        if not rounds[-1].noisy:
            clean.append(rounds[-1])
    reliable = len(clean) >= enough
    kept = clean or rounds
    timings = {name: _summarize(name, kept) for name in calls}
    return Measurement(timings, len(rounds), len(clean), reliable, tuple(each.round_trip for each in kept))
