"""What this machine can do: the instruction set of the CPU kernels, and whether bf16 matrix products work."""

from __future__ import annotations

import functools
import math
import subprocess
import sys

from overtone import _extension

__all__ = [
    "BF16_REMEDY",
    "available_isas",
    "bf16_matmul_works",
    "build_info",
    "cpu_features",
    "isa",
    "last_kernel",
    "set_isa",
    "thread_latency",
]

BF16_REMEDY = "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before torch is imported"


def available_isas() -> list[str]:
    """The instruction sets this machine can run, lowest first; empty without the extension."""
    return _extension.module.available_isas() if _extension.module else []


def isa() -> str | None:
    """The instruction set the CPU kernels use; None without the extension."""
    return _extension.module.isa() if _extension.module else None


def build_info() -> dict[str, str]:
    """How the extension was built, or under "missing" why there is none."""
    return _extension.module.build_info() if _extension.module else {"missing": _extension.load_error}


def cpu_features() -> list[str]:
    """What this CPU has of the instructions the kernels are built for; empty without the extension."""
    features = _extension.module.cpu_features() if _extension.module else {}
    return [name for name, present in features.items() if present]


def set_isa(name: str) -> None:
    """Cap the instruction set of the CPU kernels for this process."""
    if _extension.module is None:
        raise RuntimeError(f"set_isa: no CPU kernels: {_extension.load_error}")
    _extension.module.set_isa(name)


def last_kernel() -> str:
    """The CPU kernel that ran last on this thread, as "op/isa"."""
    return _extension.module.last_kernel() if _extension.module else ""


def thread_latency() -> float | None:
    """Seconds a cache line takes from one of torch's threads to another and back; None where that is unknown.

    On a virtual machine it changes while a process runs, as the host moves the virtual CPUs: those that share a
    third-level cache are several times closer, and whatever waits for other threads is faster there.
    """
    seconds = _extension.module.line_round_trip() if _extension.module else math.nan
    return None if math.isnan(seconds) else seconds


@functools.lru_cache(maxsize=1)
def bf16_matmul_works() -> bool:
    """Whether bf16 matrix products run in this environment: on some virtual machines oneDNN crashes in them.

    Tried in a child process, which may die. Setting ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before torch is imported keeps
    oneDNN off the instructions at fault.
    """
    script = (
        "import torch; a = torch.ones(256, 256, dtype=torch.bfloat16); "
        "assert (a @ a == 256).all() and (torch.nn.functional.linear(a, a) == 256).all()"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0
