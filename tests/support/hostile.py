"""Matrices of hostile scales, by name: graded, near overflow, subnormal. Makers take (shape, dtype, generator).

The decompositions exist and are representable, or overflow and must say so; nothing in between is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

Maker = Callable[[tuple[int, int], torch.dtype, Generator], Tensor]
F64 = torch.float64


def batch(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> tuple[list[str], Tensor]:
    """Every matrix of these scales: names, and the batch [names, rows, columns]."""
    generator = Generator().manual_seed(seed)
    made = [make((rows, columns), dtype, generator).to(dtype) for make in MATRICES.values()]
    return list(MATRICES), torch.stack(made)


def _randn(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=F64)


def _range(dtype: torch.dtype) -> int:
    """Decimal orders that numbers may be scaled by, up and down."""
    return 150 if dtype == F64 else 30


def _grades(size: int, orders: float) -> Tensor:
    return torch.logspace(0.0, float(orders), size, dtype=F64)


def _rows_graded(sign: int, share: float = 1.0) -> Maker:
    return lambda shape, dtype, generator: (
        _randn(shape, generator) * _grades(shape[0], sign * share * _range(dtype))[:, None]
    )


def _columns_graded(sign: int, share: float = 1.0) -> Maker:
    return lambda shape, dtype, generator: _randn(shape, generator) * _grades(shape[1], sign * share * _range(dtype))


def _graded_both(sign: int) -> Maker:
    def make(shape: tuple[int, int], dtype: torch.dtype, generator: Generator) -> Tensor:
        rows, columns = (_grades(size, sign * _range(dtype) / 2) for size in shape)
        return _randn(shape, generator) * rows[:, None] * columns

    return make


def _similar(shape: tuple[int, int], dtype: torch.dtype, generator: Generator) -> Tensor:
    """D⁻¹ A D: rows and columns graded against each other."""
    rows, columns = (_grades(size, _range(dtype) / 2) for size in shape)
    return _randn(shape, generator) / rows[:, None] * columns


def _row_blocks(shape: tuple[int, int], dtype: torch.dtype, generator: Generator) -> Tensor:
    size = torch.full((shape[0], 1), 10.0 ** -_range(dtype), dtype=F64)
    size[: shape[0] // 2] = 10.0 ** _range(dtype)
    return size * (1 + _randn(shape, generator))


def _scattered(shape: tuple[int, int], dtype: torch.dtype, generator: Generator) -> Tensor:
    """Every element of a size of its own."""
    exponents = (2 * torch.rand(shape, generator=generator, dtype=F64) - 1) * 1.2 * _range(dtype)
    return _randn(shape, generator) * 10**exponents


def _filled(shape: tuple[int, int], dtype: torch.dtype, generator: Generator) -> Tensor:
    return torch.full(shape, torch.finfo(dtype).max, dtype=F64)


def _near_overflow(divisor: Callable[[int], float]) -> Maker:
    def make(shape: tuple[int, int], dtype: torch.dtype, generator: Generator) -> Tensor:
        unit = 2 * torch.rand(shape, generator=generator, dtype=F64) - 1
        return unit * (torch.finfo(dtype).max / divisor(max(1, *shape)))

    return make


def _diagonal_near_overflow(shape: tuple[int, int], dtype: torch.dtype, generator: Generator) -> Tensor:
    return torch.eye(*shape, dtype=F64) * torch.finfo(dtype).max


def _subnormal(shape: tuple[int, int], dtype: torch.dtype, generator: Generator) -> Tensor:
    return _randn(shape, generator) * (torch.finfo(dtype).tiny / 8)


def _smallest(shape: tuple[int, int], dtype: torch.dtype, generator: Generator) -> Tensor:
    """A few times the smallest number there is."""
    info = torch.finfo(dtype)
    return torch.randint(-2, 3, shape, generator=generator).double() * (info.tiny * info.eps)


def _tiny(shape: tuple[int, int], dtype: torch.dtype, generator: Generator) -> Tensor:
    return _randn(shape, generator) * (torch.finfo(dtype).tiny * 8)


def _ones_and_subnormals(shape: tuple[int, int], dtype: torch.dtype, generator: Generator) -> Tensor:
    choices = torch.tensor([0.0, 0.0, 1.0, -1.0, 1.6 * torch.finfo(dtype).tiny / 8, torch.finfo(dtype).tiny / 500]).to(
        F64
    )
    return choices[torch.randint(0, len(choices), shape, generator=generator)]


def _sharp_softmax(shape: tuple[int, int], dtype: torch.dtype, generator: Generator) -> Tensor:
    """Of the dtype: its small elements are subnormal, or zero."""
    return (300 * _randn(shape, generator)).to(dtype).softmax(-1).to(F64)


def _one_element(value: Callable[[torch.dtype], float]) -> Maker:
    def make(shape: tuple[int, int], dtype: torch.dtype, generator: Generator) -> Tensor:
        a = _randn(shape, generator)
        if a.numel():
            a.view(-1)[a.numel() // 3] = value(dtype)
        return a

    return make


MATRICES: dict[str, Maker] = {
    "ordinary": lambda shape, dtype, generator: _randn(shape, generator),
    "zero": lambda shape, dtype, generator: torch.zeros(shape),
    "rows graded up": _rows_graded(1),
    "rows graded down": _rows_graded(-1),
    "rows graded up less": _rows_graded(1, 0.6),
    "columns graded up": _columns_graded(1),
    "columns graded down": _columns_graded(-1),
    "columns graded down less": _columns_graded(-1, 0.6),
    "graded up": _graded_both(1),
    "graded down": _graded_both(-1),
    "similar to ordinary": _similar,
    "row blocks": _row_blocks,
    "column blocks": lambda shape, dtype, generator: _row_blocks(shape[::-1], dtype, generator).T,
    "scattered": _scattered,
    "the largest number": _filled,
    "at overflow": _near_overflow(lambda n: 1),
    "below overflow": _near_overflow(lambda n: 4 * n),
    "square root below overflow": _near_overflow(lambda n: 4 * math.sqrt(n + 1)),
    "diagonal at overflow": _diagonal_near_overflow,
    "subnormal": _subnormal,
    "smallest": _smallest,
    "tiny": _tiny,
    "ones and subnormals": _ones_and_subnormals,
    "sharp softmax": _sharp_softmax,
    "one huge element": _one_element(lambda dtype: torch.finfo(dtype).max / 2),
    "one subnormal element": _one_element(lambda dtype: torch.finfo(dtype).tiny / 4),
}
