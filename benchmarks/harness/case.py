"""What a benchmark case is: one op at one shape, dtype and mode, our function, and plain PyTorch to compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from overtone.benchmarks.harness.check import Check, Expected, check_against_truth

MODES = ("forward", "backward", "forward+backward")

# What a case can at best be limited by: reading memory, reading and writing it, or multiplying matrices.
BOUNDS = ("read", "map", "matmul")

Results = tuple[Tensor, ...]
Function = Callable[..., Any]


class Compiled:
    """`function` under torch.compile, compiled when first called: listing cases must not import the compiler."""

    def __init__(self, function: Function) -> None:
        self.function = function

    @cached_property
    def _compiled(self) -> Function:
        # fullgraph: a graph break would quietly time eager PyTorch under the compiler's name.
        return torch.compile(self.function, fullgraph=True, dynamic=False)

    def __call__(self, *inputs: Any) -> Any:
        return self._compiled(*inputs)


def with_compiled(functions: Mapping[str, Function]) -> dict[str, Function]:
    """The functions, and each of them compiled: the usual baselines of a case."""
    return {**functions, **{f"compiled {name}": Compiled(function) for name, function in functions.items()}}


class InFloat32:
    """`function` on float32 copies of a half-precision case's inputs, made beforehand: what not rounding costs."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def __call__(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def is_compiled(function: Function) -> bool:
    return isinstance(function.function if isinstance(function, InFloat32) else function, Compiled)


@dataclass(frozen=True, eq=False)
class Workload:
    """What a case runs.

    `ours` and every baseline take what `setup` returns and give a tensor or a tuple of tensors. The first baseline is
    the eager reference: in float64 it is the truth, unless `truth` computes the same in another way.
    """

    setup: Callable[[], tuple[Any, ...]]
    ours: Function
    baselines: Mapping[str, Function]
    flops: int
    bytes: int  # the least traffic: what must be read and written, once each
    bound_by: str = "map"
    truth: Function | None = None  # what a float64 case is judged by, instead of the reference's own rounding
    runs_own_backward: bool = False  # the functions take their own backward and return the gradients

    def __post_init__(self) -> None:
        if self.bound_by not in BOUNDS:
            raise ValueError(f"bound_by: got {self.bound_by!r}, wanted one of {', '.join(BOUNDS)}")
        if not self.baselines:
            raise ValueError("baselines: got none, wanted at least one")

    @property
    def reference(self) -> Function:
        return next(iter(self.baselines.values()))

    @property
    def work(self) -> int:
        """FLOPs or bytes, whichever bounds it."""
        return self.flops if self.bound_by == "matmul" else self.bytes


@dataclass(frozen=True, eq=False)
class Case:
    """One op at one shape, dtype and mode, what it runs, and how the results are judged.

    The gradients of the modes with a backward are taken of all results, with respect to every input that requires one.
    At the case's precision the reference's error sets the tolerance, unless `tolerance_from` has another function for
    the backend.
    """

    op: str
    shape: str
    dtype: torch.dtype
    mode: str
    workload: Workload
    variant: str = ""  # what distinguishes cases of one op, for instance "causal"
    backend: str = "cpu"  # whose kernels run; backends.py adds a copy of the case for every other one that is here
    targets: Mapping[str, float] = field(default_factory=dict)  # baseline -> how many times faster we want to be
    check: Callable[[Results, Expected], Check] = check_against_truth
    tolerance_from: Mapping[str, Function] = field(default_factory=dict)  # by backend

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode: got {self.mode!r}, wanted one of {', '.join(MODES)}")
        unknown = set(self.targets) - set(self.workload.baselines)
        if unknown:
            raise ValueError(f"{self.name}: got targets for {', '.join(unknown)}, wanted baselines")

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def name(self) -> str:
        """Unique among the cases."""
        backend = "" if self.backend == "cpu" else f"[{self.backend}]"
        return " ".join(filter(None, (self.op, self.variant, self.shape, self.dtype_name, self.mode, backend)))

    @property
    def call_mode(self) -> str:
        """The mode in which the functions are called."""
        return "forward" if self.workload.runs_own_backward else self.mode

    @property
    def plain(self) -> Function:
        """Plain PyTorch whose error sets the tolerance."""
        return self.tolerance_from.get(self.backend, self.workload.reference)


@dataclass(frozen=True)
class Call:
    """An implementation ready to run. Only `run` is timed; `prepare` makes what it takes."""

    run: Callable[[Any], Results]
    prepare: Callable[[], Any] = lambda: None

    def results(self) -> Results:
        return self.run(self.prepare())


def synchronized(call: Call, device: str) -> Call:
    """The call, waiting for the device's work to be done."""
    if device == "cpu":
        return call

    def run(state: Any) -> Results:
        results = call.run(state)
        torch.accelerator.synchronize()
        return results

    return Call(run, call.prepare)


def as_results(value: Any) -> Results:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def bind(function: Function, inputs: tuple[Any, ...], grads: Results, mode: str) -> Call:
    """The call of `function` on `inputs` in `mode`; `grads` are the gradients of its results."""
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]

    def forward(_: Any) -> Results:
        with torch.no_grad():
            return as_results(function(*inputs))

    def graph() -> Results:
        return as_results(function(*inputs))

    def backward(outputs: Results) -> Results:
        return torch.autograd.grad(outputs, leaves, grads)

    def forward_backward(_: Any) -> Results:
        outputs = graph()
        return *outputs, *backward(outputs)

    if mode == "forward":
        return Call(forward)
    # The graph is made anew for every backward: compiled graphs free their buffers and cannot be used twice.
    return Call(backward, prepare=graph) if mode == "backward" else Call(forward_backward)
