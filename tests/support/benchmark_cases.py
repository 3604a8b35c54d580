"""Benchmark cases of known behavior."""

from __future__ import annotations

import torch

from overtone.benchmarks.harness import runner, timing
from overtone.benchmarks.harness.case import Case, Workload

PLAN = timing.Plan(rounds=4, seconds=60.0, slice_seconds=0.0)


def square(x):
    return x * x


def wrong_square(x):
    return x * x + 0.01


def case(**fields) -> Case:
    given = {
        "setup": lambda: (torch.linspace(1, 2, 1000),),
        "ours": square,
        "baselines": {"reference": lambda x: x**2},
        "flops": 1000,
        "bytes": 8000,
        "bound_by": "map",
        "runs_own_backward": False,
    }
    workload = Workload(**{name: fields.pop(name, value) for name, value in given.items()})
    return Case(
        **{"op": "square", "shape": "1000", "dtype": torch.float32, "mode": "forward", **fields}, workload=workload
    )


def run(*cases: Case, plan: timing.Plan = PLAN) -> runner.Run:
    return runner.run_cases(cases, plan, compiled=False, quick=True, other_cpu_load=0.0)


def taking(clock, seconds: float, function=square):
    def call(*inputs):
        clock.sleep(seconds)
        return function(*inputs)

    return call
