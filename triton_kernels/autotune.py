"""Opt-in: with OVERTONE_AUTOTUNE=1 a kernel's first launch times the shipped blocks and their neighbours on this GPU.

The fastest are kept in $XDG_CACHE_HOME/overtone/autotune.json (XDG_CACHE_HOME: ~/.cache), by GPU, Triton and overtone,
so that later processes time nothing. A choice is made before the first launch whose result is used, and holds for every
batch size: results repeat bit for bit as they do with the table, from which they differ by rounding.
Launches can be repeated because a kernel never reads what it writes, and adds to nothing.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.errors import TritonError

import overtone
from overtone.backends import triton_interprets
from overtone.triton_kernels.attention.config import TILES, Blocks

TILE_SIZES = range(16, 257)
WARPS = range(2, 17)
STAGES = range(1, 5)

_known: dict[tuple, Blocks] = {}  # what this process has timed or read, by device, kernel and case
_lock = threading.Lock()  # autograd's threads must not time at once


def choose(kernel: str, shipped: Blocks, case: tuple, device: torch.device, run: Callable[[Blocks], Any]) -> Blocks:
    """The blocks to launch `kernel` with; `case` is what else they depend on, `run` launches with those it is given.

    While a CUDA graph is captured nothing is timed: blocks that are known by then are used, otherwise the table's.
    """
    with _lock:
        found = _known.get((device, kernel, case))
        gpu = None if found else gpu_name(device)
        if gpu is None:
            return found or shipped
        choices = {_as_text(blocks): blocks for blocks in candidates(kernel, shipped)}
        section = f"{gpu}, triton {triton.__version__}, overtone {overtone.__version__}"
        entry = " ".join(map(str, (kernel, *case)))
        found = choices.get(str(_read().get(section, {}).get(entry)))
        if found is None:
            if is_capturing(device):
                return shipped
            fastest = _fastest(entry, choices, device, run)
            if fastest is not None:
                _write(section, entry, fastest)
            found = choices.get(fastest, shipped)
        _known[device, kernel, case] = found
        return found


def is_on() -> bool:
    value = os.environ.get("OVERTONE_AUTOTUNE", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"OVERTONE_AUTOTUNE={value!r}: wanted 0 or 1")
    return value == "1"


def gpu_name(device: torch.device) -> str | None:
    """None where nothing can be timed: in the interpreter, and with tensors on "meta"."""
    return None if triton_interprets() or device.type != "cuda" else torch.cuda.get_device_name(device)


def is_capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def measure(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds on the GPU with a cold L2, the median of about 25 ms of launches after 5 ms of them."""
    with torch.cuda.device(device):
        return triton.testing.do_bench(run, warmup=5, rep=25, return_mode="median")


def candidates(kernel: str, shipped: Blocks) -> list[Blocks]:
    """The shipped blocks first, then those that differ in one thing: a tile's side, the warps, the stages."""
    whole = shipped.tile.get("WHOLE", False)  # then BN is all keys, and there is no loop to have stages
    found = [shipped]
    for name in TILES[kernel]:
        for size in (shipped.tile[name] // 2, shipped.tile[name] * 2):
            if size in TILE_SIZES and not (whole and name == "BN"):
                found.append(shipped._replace(tile=shipped.tile | {name: size}))
    for num_warps in (shipped.num_warps // 2, shipped.num_warps * 2):
        if num_warps in WARPS:
            found.append(shipped._replace(num_warps=num_warps))
    for num_stages in (shipped.num_stages - 1, shipped.num_stages + 1):
        if num_stages in STAGES and not whole:
            found.append(shipped._replace(num_stages=num_stages))
    return found


def _as_text(blocks: Blocks) -> str:
    return " ".join(f"{name}={value}" for name, value in blocks.meta.items())


def _fastest(entry: str, choices: dict[str, Blocks], device: torch.device, run: Callable[[Blocks], Any]) -> str | None:
    """Of the choices that compile and fit; None, with a warning, if none could be timed."""
    times, problem = {}, None
    for text, blocks in choices.items():
        try:
            times[text] = measure(lambda blocks=blocks: run(blocks), device)
        except (TritonError, RuntimeError) as error:  # RuntimeError: of the compiler's passes, or no memory left
            problem = error
    if not times:
        _warn(f"nothing could be timed for '{entry}', the shipped blocks are used: {problem}")
        return None
    return min(times, key=times.__getitem__)


def _path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "overtone" / "autotune.json"


def _read() -> dict[str, dict[str, str]]:
    """All that is cached; nothing, with a warning, where the file is broken."""
    try:
        content = json.loads(_path().read_text())
        if not isinstance(content, dict) or not all(isinstance(entries, dict) for entries in content.values()):
            raise ValueError("not an object of objects")
        return content
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _warn(f"{_path()} cannot be read, so blocks are timed again: {error}")
        return {}


def _write(section: str, entry: str, text: str) -> None:
    """Add an entry to the file, which other processes find either as it was or complete."""
    content = _read()
    content.setdefault(section, {})[entry] = text
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # on the same file system
            new = Path(folder, path.name)
            new.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
            new.replace(path)
    except OSError as error:
        _warn(f"{path} cannot be written, so the next process times blocks again: {error}")


def _warn(message: str) -> None:
    warnings.warn(f"OVERTONE_AUTOTUNE: {message}", stacklevel=2)
