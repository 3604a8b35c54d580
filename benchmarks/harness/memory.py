"""Peak memory of one call: what it holds at most beyond what was there before, its results included.

On the CPU the kernel's own count is read, VmHWM of /proc/self/status: every byte that the call touches, whoever
allocates it (torch, our extension's scratch, MKL). Before the call the allocator gives free pages back, or the call
would reuse them unseen, and the peak is set back to what is in use now. So the figure counts pages: those that the
allocator keeps though they are free again (blocks below 32 MiB) count, as they do for the machine, and what a library
keeps from its first call to its last does not. On a GPU it is the peak of torch's allocator.
"""

from __future__ import annotations

import ctypes
import gc
import re
from functools import cache
from pathlib import Path

import torch

from overtone.benchmarks.harness.case import Call

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # what clear_refs wants for it: man 5 proc


def peak_bytes(call: Call, device: str = "cpu") -> int | None:
    """Bytes; None where the system does not say. The call must have run before, so that nothing is loaded here."""
    _freeze_what_is_loaded()
    state = call.prepare()
    gc.collect()
    return _on_cpu(call, state) if device == "cpu" else _on_gpu(call, state)


@cache
def _freeze_what_is_loaded() -> None:
    """Once: what libraries hold for good is no garbage, and looking through it would take a second every time."""
    gc.collect()
    gc.freeze()


def _on_cpu(call: Call, state: object) -> int | None:
    try:
        _give_free_pages_back()
        CLEAR.write_text(RESET_PEAK)
        before = _resident("VmRSS")
    except (OSError, AttributeError):  # not Linux, not glibc, or a container that forbids it
        return None
    results = call.run(state)
    peak = _resident("VmHWM")
    del results
    return max(0, peak - before)


def _on_gpu(call: Call, state: object) -> int:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call.run(state)
    peak = torch.cuda.max_memory_allocated()
    del results
    return peak - before


def _give_free_pages_back() -> None:
    ctypes.CDLL(None).malloc_trim(0)


def _resident(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{STATUS} has no {field}")
    return int(found[1]) * 1024
