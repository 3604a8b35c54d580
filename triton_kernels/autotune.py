"""Opt-in: with OVERTONE_AUTOTUNE=1 a kernel's first launch times the shipped configuration and its neighbors.

The fastest are kept in Triton's cache (TRITON_CACHE_DIR), by GPU, Triton, the kernels' sources and what a choice
depends on, so that later processes time nothing. A choice is made before the first launch whose result is used, and
holds for every batch size: results repeat bit for bit as they do with the table, from which they differ by rounding.
Launches can be repeated because a kernel never reads what it writes, and adds to nothing.
"""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton.errors import TritonError
from triton.runtime.cache import get_cache_manager

from overtone.triton_kernels.attention.config import TILES
from overtone.triton_kernels.runtime import LaunchConfig, interprets

TILE_SIZES = range(16, 257)
WARPS = range(2, 17)
STAGES = range(1, 5)

FILE = "overtone_config.txt"  # in Triton's cache, in the folder of a choice's key

_known: dict[tuple, LaunchConfig] = {}  # what this process has timed or read, by device, kernel and case
_lock = threading.Lock()  # autograd's threads must not time at once


def choose(
    kernel: str, shipped: LaunchConfig, case: tuple, device: torch.device, run: Callable[[LaunchConfig], Any]
) -> LaunchConfig:
    """The configuration to launch `kernel` with; `case` is what else it depends on, `run` launches with the one given.

    While a CUDA graph is captured nothing is timed: what is known by then is used, otherwise the table's.
    """
    with _lock:
        found = _known.get((device, kernel, case))
        gpu = None if found else gpu_name(device)
        if gpu is None:
            return found or shipped
        choices = {_as_text(config): config for config in candidates(kernel, shipped)}
        entry = " ".join(map(str, (kernel, *case)))
        key = hashlib.sha256(repr((gpu, triton.__version__, source_digest(), entry)).encode()).hexdigest()
        found = choices.get(_read(key))
        if found is None:
            if is_capturing(device):
                return shipped
            fastest = _fastest(entry, choices, device, run)
            if fastest is not None:
                _write(key, fastest)
            found = shipped if fastest is None else choices[fastest]
        _known[device, kernel, case] = found
        return found


@cache
def source_digest() -> str:
    """Of the kernels and launchers: a choice holds for what was timed."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def is_on() -> bool:
    value = os.environ.get("OVERTONE_AUTOTUNE", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"OVERTONE_AUTOTUNE={value!r}: wanted 0 or 1")
    return value == "1"


def gpu_name(device: torch.device) -> str | None:
    """None where nothing can be timed: in the interpreter, and with tensors on "meta"."""
    return None if interprets() or device.type != "cuda" else torch.cuda.get_device_name(device)


def is_capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def measure(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds on the GPU with a cold L2, the median of about 25 ms of launches after 5 ms of them."""
    with torch.cuda.device(device):
        return triton.testing.do_bench(run, warmup=5, rep=25, return_mode="median")


def candidates(kernel: str, shipped: LaunchConfig) -> list[LaunchConfig]:
    """The shipped configuration first, then those that differ in one thing: a tile's side, the warps, the stages."""
    single_pass = shipped.tile.get("SINGLE_PASS", False)  # then BN is all keys, and there is no loop to have stages
    found = [shipped]
    for name in TILES[kernel]:
        for size in (shipped.tile[name] // 2, shipped.tile[name] * 2):
            if size in TILE_SIZES and not (single_pass and name == "BN"):
                found.append(shipped._replace(tile=shipped.tile | {name: size}))
    for num_warps in (shipped.num_warps // 2, shipped.num_warps * 2):
        if num_warps in WARPS:
            found.append(shipped._replace(num_warps=num_warps))
    for num_stages in () if shipped.num_stages is None else (shipped.num_stages - 1, shipped.num_stages + 1):
        if num_stages in STAGES and not single_pass:
            found.append(shipped._replace(num_stages=num_stages))
    return found


def _as_text(config: LaunchConfig) -> str:
    return " ".join(f"{name}={value}" for name, value in config.meta.items())


def _fastest(
    entry: str, choices: dict[str, LaunchConfig], device: torch.device, run: Callable[[LaunchConfig], Any]
) -> str | None:
    """Of the choices that compile and fit; None, with a warning, if none could be timed."""
    times, problem = {}, None
    for text, config in choices.items():
        try:
            times[text] = measure(lambda config=config: run(config), device)
        except (TritonError, RuntimeError) as error:  # RuntimeError: of the compiler's passes, or no memory left
            problem = error
    if not times:
        _warn(f"nothing could be timed for '{entry}', the shipped configuration is used: {problem}")
        return None
    return min(times, key=times.__getitem__)


def _read(key: str) -> str:
    """What is cached; nothing where there is nothing, or, with a warning, where it cannot be read."""
    try:
        file = get_cache_manager(key).get_file(FILE)
        return "" if file is None else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        _warn(f"Triton's cache cannot be read, so configurations are timed again: {error}")
        return ""


def _write(key: str, text: str) -> None:
    """Other processes find the file either as it was or complete."""
    try:
        get_cache_manager(key).put(text, FILE, binary=False)
    except OSError as error:
        _warn(f"Triton's cache cannot be written, so the next process times configurations again: {error}")


def _warn(message: str) -> None:
    warnings.warn(f"OVERTONE_AUTOTUNE: {message}", stacklevel=2)
