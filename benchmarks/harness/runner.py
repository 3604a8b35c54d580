"""Runs cases: the results are checked, then timed beside their baselines and beside what the machine can do."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import overtone as ot
from overtone import hardware
from overtone.benchmarks.harness import machine, memory
from overtone.benchmarks.harness.backends import device_of, moved, placed
from overtone.benchmarks.harness.case import (
    Call,
    Case,
    Function,
    InFloat32,
    Results,
    as_results,
    bind,
    is_compiled,
    synchronized,
)
from overtone.benchmarks.harness.check import Check, Expected, widened
from overtone.benchmarks.harness.timing import Measurement, Plan, Timing, interleave
from overtone.libraries import MissingLibrary

OURS = "ours"
BF16_WAY_OUT = "PyTorch's bfloat16 products die on this machine; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"

# The files of cases, one per op family, named like the op in every other layer.
MODULES = (
    "frequency",
    "metrics",
    "attention",
    "linalg.eig",
    "linalg.eigh",
    "linalg.extremal",
    "linalg.qr",
    "linalg.inverse",
    "dominance",
    "layer_norm",
    "linear",
    "module",
    "step",
)


def all_cases() -> list[Case]:
    """Every case of every module, on every backend present, in order."""
    modules = (importlib.import_module(f"overtone.benchmarks.{name}") for name in MODULES)
    return [copy for module in modules for case in module.cases() for copy in placed(case)]


class PreparedCase:
    """A case with its inputs made, and what its implementations' results are compared with, on the CPU."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.device = device_of(case.backend)
        given = case.workload.setup()
        self.inputs = tuple(moved(value, self.device) for value in given)
        self.grads = self._random_grads()
        plain = self.call(case.plain).results()
        self.expected = Expected(given, _on_cpu(plain), _on_cpu(self._truth()))

    def call(self, function: Function) -> Call:
        inputs, grads = self.inputs, self.grads
        if isinstance(function, InFloat32):
            inputs = tuple(_cast_input(x, torch.float32) for x in inputs)
            grads = tuple(x.float() for x in grads)
        return synchronized(bind(function, inputs, grads, self.case.call_mode), self.device)

    def check(self, name: str, call: Call) -> Check:
        """Whether the implementation of that name gives the right results."""
        expected, in_float32 = self.expected, isinstance(self.case.workload.baselines.get(name), InFloat32)
        if name != OURS:
            intermediate_dtype = None if in_float32 else self.case.dtype
            expected = replace(expected, num_terms=_elements(self.inputs), intermediate_dtype=intermediate_dtype)
        try:
            results = _on_cpu(call.results())
            if in_float32:
                results = tuple(x.to(plain.dtype) for x, plain in zip(results, expected.plain, strict=True))
            return self.case.check(results, expected)
        except MissingLibrary as missing:
            return Check.missing(str(missing))
        except Exception as error:  # whatever it raises, the other implementations and cases still run
            return Check.failed(f"raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")

    def _random_grads(self) -> Results:
        if self.case.call_mode == "forward":
            return ()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            outputs = as_results(self.case.workload.reference(*self.inputs))
        return tuple(torch.randn(y.shape, generator=generator).to(y) for y in outputs)

    def _truth(self) -> Results:
        inputs = tuple(_cast_input(x, torch.float64) for x in self.inputs)
        workload = self.case.workload
        function = workload.truth or workload.reference
        call = bind(function, inputs, tuple(map(widened, self.grads)), self.case.call_mode)
        return tuple(map(widened, call.results()))


def _on_cpu(results: Results) -> Results:
    return tuple(moved(result, "cpu") for result in results)


def _elements(inputs: tuple[Any, ...]) -> int:
    return sum(x.numel() for x in inputs if isinstance(x, Tensor))


def _cast_input(value: Any, dtype: torch.dtype) -> Any:
    """A copy of at least that precision; what is no number stays."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.detach().to(torch.promote_types(value.dtype, dtype)).requires_grad_(value.requires_grad)


def implementations(case: Case, *, compiled: bool = True) -> dict[str, Function]:
    """Our function and the baselines, by name."""
    functions = {OURS: case.workload.ours, **case.workload.baselines}
    return {name: f for name, f in functions.items() if compiled or not is_compiled(f)}


@dataclass(frozen=True)
class Result:
    """A case's checks, and its timings if our own result is right. Ratios are baseline time / our time, of medians."""

    case: Case
    checks: Mapping[str, Check]
    measurement: Measurement | None = None
    peak: float | None = None  # bytes or FLOPs per second, whichever limits the case
    memory: Mapping[str, int | None] = field(default_factory=dict)  # implementation -> peak bytes of one call

    @property
    def passed(self) -> bool:
        return all(check.passed or check.skipped for check in self.checks.values())

    @property
    def reliable(self) -> bool:
        return self.measurement is None or self.measurement.reliable

    @property
    def ours(self) -> Timing | None:
        return self._timing(OURS)

    def _timing(self, name: str) -> Timing | None:
        """None unless the implementation's result is right."""
        check = self.checks.get(name)
        return self.measurement.timings[name] if self.measurement and check and check.passed else None

    def ratio(self, baseline: str) -> float | None:
        """How many times faster we are; None if either was not measured."""
        ours, theirs = self._timing(OURS), self._timing(baseline)
        return theirs.median / ours.median if ours and theirs else None

    @property
    def ratios(self) -> dict[str, float]:
        found = {name: self.ratio(name) for name in self.case.workload.baselines}
        return {name: ratio for name, ratio in found.items() if ratio is not None}

    @property
    def fastest_baseline(self) -> tuple[str, float] | None:
        """The fastest baseline and our ratio to it."""
        return min(self.ratios.items(), key=lambda item: item[1], default=None)

    @property
    def rate(self) -> float | None:
        """Bytes or FLOPs per second, whichever limits the case."""
        return self.case.workload.work / self.ours.median if self.ours else None

    @property
    def share(self) -> float | None:
        """The rate as a share of what plain passes over as much memory, or matrix products, reached in this run."""
        return self.rate / self.peak if self.rate and self.peak else None


def run_case(case: Case, plan: Plan, *, compiled: bool = True, matmul_peak: float | None = None) -> Result:
    """Check every implementation, then time those that are right, provided ours is, and take their peak of memory."""
    with ot.use_backend(case.backend):
        return _run_case(case, plan, compiled, matmul_peak)


def _run_case(case: Case, plan: Plan, compiled: bool, matmul_peak: float | None) -> Result:
    if compiled:
        torch.compiler.reset()  # or the compiler's limit of variants per function is reached after a few cases
    if case.workload.bound_by == "matmul" and case.dtype == torch.bfloat16 and not hardware.bf16_matmul_works():
        return Result(case, {OURS: Check.failed(BF16_WAY_OUT)})
    try:
        prepared = PreparedCase(case)
    except Exception as error:
        return Result(case, {OURS: Check.failed(f"the case cannot be set up: {type(error).__name__}: {error}")})
    calls = {name: prepared.call(function) for name, function in implementations(case, compiled=compiled).items()}
    checks = {name: prepared.check(name, call) for name, call in calls.items()}
    if not checks[OURS].passed:
        return Result(case, checks)
    right = {name: call for name, call in calls.items() if checks[name].passed}
    if case.workload.bound_by == "matmul":
        measurement, peak = interleave(right, plan), matmul_peak
    else:
        measurement, peak = _beside_probes(case, right, plan, prepared.device)
    return Result(case, checks, measurement, peak, _memory(right, prepared.device))


def _beside_probes(case: Case, calls: Mapping[str, Call], plan: Plan, device: str) -> tuple[Measurement, float]:
    """The calls timed beside plain passes over as much memory, and the rate of the fastest pass."""
    found = machine.memory_probes(case.workload.bound_by, case.workload.bytes, device)
    probes = {f"probe {name}": call for name, call in found.items()}
    for probe in probes.values():
        probe.results()
    measurement = interleave({**calls, **probes}, plan)
    return measurement, max(case.workload.bytes / measurement.timings[name].minimum for name in probes)


def _memory(calls: Mapping[str, Call], device: str) -> dict[str, int | None]:
    return {name: memory.peak_bytes(call, device) for name, call in calls.items()}


@dataclass(frozen=True)
class Run:
    """Everything a report says."""

    results: list[Result]
    plan: Plan
    quick: bool
    machine: dict[str, object]
    other_cpu_load: float | None  # how many CPUs others used before the run
    matmul_peaks: dict[str, float]  # float32 FLOP/s of every device in use
    left_out: int = 0  # cases that were to follow when the run was interrupted, or its time was up
    interrupted: bool = False

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)

    @property
    def idle(self) -> bool:
        """Others left the machine alone before the run, and in enough rounds of every case."""
        return not machine.is_noisy(self.other_cpu_load) and all(result.reliable for result in self.results)


def run_cases(
    cases: Iterable[Case],
    plan: Plan,
    *,
    compiled: bool = True,
    without_compile: Container[str] = (),
    quick: bool = False,
    other_cpu_load: float | None = None,
    budget: float | None = None,
    before: Callable[[Case], None] = lambda case: None,
    after: Callable[[Run], None] = lambda run: None,
) -> Run:
    """Run the cases one after another; `before` is told of each, `after` gets what there is.

    without_compile: names of cases whose baselines under torch.compile are left out.
    budget: seconds that all of it may take; every case gets its share of what is left. An interrupt ends the run with
    what there is, provided there is something; so does the end of the budget.
    """
    start = time.perf_counter()
    cases = [case for case in cases if compiled or not is_compiled(case.workload.ours)]
    run = Run([], plan, quick, machine.describe(), other_cpu_load, {}, len(cases))
    for done, case in enumerate(cases, 1):
        share = None if budget is None else (start + budget - time.perf_counter()) / (len(cases) - done + 1)
        if share is not None and share <= 0:
            break
        before(case)
        try:
            device = device_of(case.backend)
            if device not in run.matmul_peaks:
                run.matmul_peaks[device] = machine.matmul_peak(0.05 if quick else 0.5, device)
            with_compile = compiled and case.name not in without_compile
            peak = run.matmul_peaks[device]
            result = run_case(case, plan.within(share), compiled=with_compile, matmul_peak=peak)
        except KeyboardInterrupt:
            if not run.results:
                raise
            return replace(run, interrupted=True)
        run = replace(run, results=[*run.results, result], left_out=len(cases) - done)
        after(run)
    return run
