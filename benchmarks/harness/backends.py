"""Where a case runs: on the CPU's kernels, and on every other backend that has kernels for its op and is here.

`ot.backends()` decides: a case is written once and names no backend. The kit sets it, and a backend that is set runs or
raises, so that a figure is never of something else. The reference is a baseline of every case (linalg: torch.linalg,
which the reference calls).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import overtone as ot
from overtone.backends import SUPPORT, triton_interpreter_enabled
from overtone.benchmarks.harness.baselines import SplitOverThreads
from overtone.benchmarks.harness.case import Case

# Ops that run on another op's kernels. What is neither here nor in SUPPORT, such as a whole model, runs on the CPU.
SUPPORT_OF = {
    "de_escalate": "frequency_filter",
    "cosine_similarity": "frequency_norms",
    "extremal_eigvals": "eigvals",
    "eigvalsh": "eigh",
}


def device_of(backend: str) -> str:
    """The device whose tensors a backend's kernels take."""
    on_gpu = backend == "cuda" or (backend == "triton" and not triton_interpreter_enabled())
    return "cuda" if on_gpu else "cpu"


def placed(case: Case) -> list[Case]:
    """The case, and a copy of it for every backend present."""
    kernels = SUPPORT.get(SUPPORT_OF.get(case.op, case.op), {})
    status = ot.backends()
    others = [
        name
        for name, support in kernels.items()
        if name != case.backend and case.dtype in support.dtypes and status[name].available
    ]
    return [case, *(_copy(case, name) for name in others)]


def _copy(case: Case, backend: str) -> Case:
    """Targets are of the CPU, and so is splitting a batch over its threads."""
    split = SplitOverThreads if device_of(backend) != "cpu" else ()
    kept = {name: function for name, function in case.workload.baselines.items() if not isinstance(function, split)}
    return replace(case, backend=backend, workload=replace(case.workload, baselines=kept), targets={})


def moved(value: Any, device: str) -> Any:
    """A tensor on that device, a leaf there if it was one; anything else as it is."""
    if not isinstance(value, Tensor) or value.device == torch.device(device):
        return value
    return value.detach().to(device).requires_grad_(value.requires_grad)
