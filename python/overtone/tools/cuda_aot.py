"""Compiles the CUDA kernels with nvcc, for GPUs that need not be there, and reads what they take from ptxas."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

CSRC = Path(__file__).resolve().parents[3] / "csrc"
SOURCE = CSRC / "cuda" / "linalg" / "kernels.cu"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
DTYPES = (torch.float32, torch.float64)
WARPS_PER_BLOCK = 4  # that have a matrix each
TRAILING_UPDATE = {torch.float32: 50, torch.float64: 47}  # numbers of the leader's message to the block
# As setup.py and torch compile them.
FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-I{CSRC}"]


class Launch(NamedTuple):
    """A kernel at a size, as csrc/cuda/linalg/launch.h launches it; `path` is "warp", "block" or "block_global"."""

    op: str
    path: str
    n: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.op}_{self.path}"

    @property
    def symbol(self) -> str:
        """The beginning of the compiled kernel's mangled name."""
        letter = "f" if self.dtype == torch.float32 else "d"
        function = self.op + ("_warp" if self.path == "warp" else "_block")
        flag = {"block": "Lb1E", "block_global": "Lb0E"}.get(self.path, "") if self.op == "eig" else ""
        return f"_ZN8overtone4cuda{len(function)}{function}I{letter}{flag}E"

    @property
    def warps(self) -> int:
        """Of a block."""
        return WARPS_PER_BLOCK if self.path == "warp" else -(-self.n // 32)

    @property
    def matrices_per_block(self) -> int:
        return WARPS_PER_BLOCK if self.path == "warp" else 1

    @property
    def shared_bytes(self) -> int:
        """Of a block."""
        n, scratch = self.n, 0 if self.path == "warp" else 16
        dense, packed = n * (n | 1), n * (n + 7) // 2
        numbers = {
            "eigh": scratch + dense + 9 * n + 1,
            "eig": scratch
            + TRAILING_UPDATE[self.dtype]
            + (2 * n + packed if self.path == "block_global" else 4 * n + dense),
            "qr": 2 * dense + 64,
        }[self.op]
        return numbers * self.dtype.itemsize * self.matrices_per_block


def shipped(dtype: torch.dtype) -> list[Launch]:
    """Every kernel at its largest size that all architectures have, or at a ViT's."""
    is_double = dtype == torch.float64
    return [
        Launch("eigh", "warp", 16, dtype),
        Launch("eigh", "warp", 32, dtype),
        Launch("eigh", "block", 64, dtype),
        Launch("eigh", "block", 104 if is_double else 150, dtype),
        Launch("eig", "warp", 32, dtype),
        Launch("eig", "block", 65, dtype),
        Launch("eig", "block_global", 150 if is_double else 197, dtype),
        Launch("qr", "warp", 32, dtype),
    ]


def obstacle() -> str | None:
    """Why the kernels cannot be compiled here, or None if they can."""
    if not SOURCE.exists():
        return "their sources, csrc/cuda, are not installed: run it in a clone"
    return "nvcc was not found: install the CUDA toolkit, or set CUDA_HOME" if find_nvcc() is None else None


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


def compile_all(architectures: Sequence[str], workers: int) -> Iterator[tuple[Launch, str, int, int]]:
    """(launch, architecture, registers, bytes spilled) of every kernel as it is shipped."""
    with ThreadPoolExecutor(workers) as pool:
        for name, usage in zip(architectures, pool.map(ptxas_report, architectures), strict=True):
            found = read_report(usage)
            for dtype in DTYPES:
                for launch in shipped(dtype):
                    registers, spills = next(v for symbol, v in found.items() if symbol.startswith(launch.symbol))
                    yield launch, name, registers, spills


def ptxas_report(architecture: str) -> str:
    """What ptxas says about every kernel."""
    number = architecture.removeprefix("sm_")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(find_nvcc() or "nvcc", *FLAGS, "-Xptxas", "-v", "-cubin", "-o", f"{folder}/kernels.cubin"),
            *("-gencode", f"arch=compute_{number},code={architecture}", str(SOURCE)),
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"nvcc failed for {architecture}:\n{result.stderr}")
    return result.stderr


def read_report(report: str) -> dict[str, tuple[int, int]]:
    """(registers, bytes of stack and spills) by mangled name."""
    pattern = (
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers"
    )
    found = {}
    for symbol, stack, stores, loads, registers in re.findall(pattern, report, re.DOTALL):
        found[symbol] = int(registers), max(int(stack), int(stores) + int(loads))
    return found
