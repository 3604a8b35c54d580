"""How the kernels of csrc/cuda are launched, as csrc/cuda/linalg/launch.h has it; a test compares the two."""

from __future__ import annotations

from typing import NamedTuple

import torch

WARPS_PER_BLOCK = 4  # that have a matrix each
SHARED_EVERYWHERE = 99 * 1024  # bytes that every architecture from sm_80 on gives a block
MOST_ROWS = {"eigh": 256, "eig": 240, "qr": 32}
FAR_WORK = {torch.float32: 50, torch.float64: 47}  # numbers of the chief's message to the block


class Launch(NamedTuple):
    """A kernel at a size: `path` is "warp", "block" or "packed"."""

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
        flag = {"block": "Lb1E", "packed": "Lb0E"}.get(self.path, "") if self.op == "eig" else ""
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
            "eig": scratch + FAR_WORK[self.dtype] + (2 * n + packed if self.path == "packed" else 4 * n + dense),
            "qr": 2 * dense + 64,
        }[self.op]
        return numbers * self.dtype.itemsize * self.matrices_per_block


def path(op: str, n: int, dtype: torch.dtype, shared_limit: int) -> str | None:
    """Who works on a matrix where a block may have `shared_limit` bytes; None if it is too large for the kernels."""
    if n <= 32 or op == "qr":
        return "warp" if n <= 32 else None
    if n > MOST_ROWS[op]:
        return None
    paths = ("block",) if op == "eigh" else ("block", "packed")
    return next((name for name in paths if Launch(op, name, n, dtype).shared_bytes <= shared_limit), None)


def largest(op: str, dtype: torch.dtype, shared_limit: int) -> int:
    """The most rows or columns of matrices that the kernels take."""
    return next(n for n in range(MOST_ROWS[op], 0, -1) if path(op, n, dtype, shared_limit) is not None)


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
        Launch("eig", "packed", 150 if is_double else 197, dtype),
        Launch("qr", "warp", 32, dtype),
    ]
