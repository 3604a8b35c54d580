"""The machine: what it is, whether others use it, and what it can do at best."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch

from overtone import hardware
from overtone.benchmarks.harness.case import Call, synchronized

# CPUs that other processes may use before a measurement counts as noisy: 6 % of one.
MAX_OTHER_LOAD = 0.06
# /proc/stat counts in ticks of 10 ms, so that a short measurement can be off by about two.
RESOLUTION_SECONDS = 0.02


def busy_seconds() -> float | None:
    """CPU time that everything on this machine has used since boot; None where the system does not say."""
    try:
        first_line = Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first_line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class OtherLoad:
    """How much CPU others use from its creation on: the machine's busy time minus our own.

    own: the CPU time that is ours so far; default: this process's.
    """

    def __init__(self, own: Callable[[], float] | None = None) -> None:
        self._own_time = own or time.process_time
        self._busy, self._own, self._wall = busy_seconds(), self._own_time(), time.perf_counter()

    def cpus(self) -> float | None:
        """The number of CPUs others kept busy, on average; None where it cannot be known."""
        busy = busy_seconds()
        if busy is None or self._busy is None:
            return None
        own = self._own_time() - self._own
        seconds = busy - self._busy - own
        if seconds <= RESOLUTION_SECONDS:
            return 0.0
        return seconds / (time.perf_counter() - self._wall)


def is_noisy(other_cpu_load: float | None) -> bool:
    return other_cpu_load is not None and other_cpu_load > MAX_OTHER_LOAD


def other_cpu_load(seconds: float = 1.0) -> float | None:
    """The CPUs others use while this process sleeps for `seconds`."""
    load = OtherLoad()
    time.sleep(seconds)
    return load.cpus()


def memory_probes(bound_by: str, size: int, device: str = "cpu") -> dict[str, Call]:
    """Plain passes over `size` bytes: the fastest of them is the bandwidth that a case of that traffic can have."""

    def ones(share: int) -> torch.Tensor:
        return torch.ones(max(1, size // share), device=device)

    if bound_by == "read":
        data = ones(4)
        probes = {"sum": Call(lambda _: (data.sum(),)), "max": Call(lambda _: (data.amax(),))}
    else:
        source, target = ones(8), ones(8)
        left, right, result = ones(12), ones(12), ones(12)
        probes = {
            "copy": Call(lambda _: (target.copy_(source),)),
            "triad": Call(lambda _: (torch.add(left, right, alpha=0.5, out=result),)),
        }
    return {name: synchronized(probe, device) for name, probe in probes.items()}


def matmul_peak(seconds: float = 0.5, device: str = "cpu") -> float:
    """The FLOP/s of torch's float32 matrix product, the best of many."""
    size = 1024 if device == "cpu" else 8192
    a, b = torch.ones(size, size, device=device), torch.ones(size, size, device=device)
    product = synchronized(Call(lambda _: (torch.mm(a, b),)), device)
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        product.results()
        samples.append(time.perf_counter() - start)
    return 2 * size**3 / min(samples)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def commit() -> str | None:
    """The commit of overtone's checkout, with "+changes" if it was edited; None for an installed package."""
    top = _git("rev-parse", "--show-toplevel")
    # An installed copy may lie inside somebody else's checkout, whose commit would say nothing.
    if top is None or Path(top) != Path(__file__).resolve().parents[2]:
        return None
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return f"{_git('rev-parse', 'HEAD')}{'+changes' if changes else ''}"


def describe() -> dict[str, object]:
    """What a figure depends on."""
    return {
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "isa": hardware.isa(),
        "threads": torch.get_num_threads(),
        "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in ("overtone", "torch", "triton", "timm", "transformers")},
        },
        "commit": commit(),
    }
