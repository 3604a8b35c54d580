"""Matrices that break eigen-solvers, by name. Each maker takes (n, dtype, generator) and is exact to that dtype.

The first of the symmetric ones are LAPACK's own list (its test program DCHKST, types 1 to 21).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

Maker = Callable[[int, torch.dtype, Generator], Tensor]


def symmetric_batch(n: int, dtype: torch.dtype, seed: int = 0) -> tuple[list[str], Tensor]:
    """Every symmetric matrix of the gallery at size n: names, and the batch [names, n, n]."""
    generator = Generator().manual_seed(seed)
    made = [make(n, dtype, generator).to(dtype) for make in SYMMETRIC.values()]
    return list(SYMMETRIC), torch.stack(made)


def _large(dtype: torch.dtype) -> float:
    return math.sqrt(torch.finfo(dtype).max)


def _small(dtype: torch.dtype) -> float:
    return math.sqrt(torch.finfo(dtype).tiny)


def _signs(n: int, generator: Generator) -> Tensor:
    return torch.randint(0, 2, (n,), generator=generator).double() * 2 - 1


def _arithmetic(n: int, dtype: torch.dtype) -> Tensor:
    return torch.linspace(1, torch.finfo(dtype).eps, n, dtype=torch.float64)


def _geometric(n: int, dtype: torch.dtype) -> Tensor:
    return torch.logspace(0, math.log10(torch.finfo(dtype).eps), n, dtype=torch.float64)


def _one_large(n: int, dtype: torch.dtype) -> Tensor:
    values = torch.full((n,), torch.finfo(dtype).eps, dtype=torch.float64)
    values[:1] = 1
    return values


def symmetrized(a: Tensor) -> Tensor:
    return a.tril() + a.tril(-1).mT


def orthogonal(n: int, generator: Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q


def with_eigenvalues(values: Tensor, generator: Generator) -> Tensor:
    q = orthogonal(len(values), generator)
    return symmetrized((q * values) @ q.mT)


def _diagonal(spectrum: Callable, scale: Callable = lambda dtype: 1.0) -> Maker:
    return lambda n, dtype, generator: torch.diag(spectrum(n, dtype) * _signs(n, generator)) * scale(dtype)


def _dense(spectrum: Callable, scale: Callable = lambda dtype: 1.0, *, positive: bool = False) -> Maker:
    def make(n: int, dtype: torch.dtype, generator: Generator) -> Tensor:
        signs = 1 if positive else _signs(n, generator)
        return with_eigenvalues(spectrum(n, dtype) * signs, generator) * scale(dtype)

    return make


def _random(scale: Callable = lambda dtype: 1.0) -> Maker:
    def make(n: int, dtype: torch.dtype, generator: Generator) -> Tensor:
        return symmetrized(2 * torch.rand(n, n, generator=generator, dtype=torch.float64) - 1) * scale(dtype)

    return make


def _dominant_tridiagonal(n: int, dtype: torch.dtype, generator: Generator) -> Tensor:
    diagonal = _geometric(n, dtype)
    off = (2 * torch.rand(max(n - 1, 0), generator=generator, dtype=torch.float64) - 1) / 4
    return tridiagonal(diagonal, off * (diagonal[1:] * diagonal[:-1]).sqrt())


def tridiagonal(diagonal: Tensor, off: Tensor) -> Tensor:
    a = torch.diag(diagonal.double())
    if len(off):
        a += torch.diag(off.double(), 1) + torch.diag(off.double(), -1)
    return a


def wilkinson(n: int, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Pairs of eigenvalues that agree to many digits."""
    return tridiagonal((torch.arange(n) - (n - 1) / 2).abs(), torch.ones(max(n - 1, 0)))


def _glued_wilkinson(n: int, dtype: torch.dtype, generator: Generator) -> Tensor:
    diagonal = (torch.arange(n) % 21 - 10).abs()
    off = torch.ones(max(n - 1, 0))
    off[20::21] = math.sqrt(torch.finfo(dtype).eps)
    return tridiagonal(diagonal, off)


def clement(n: int, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Zero diagonal; eigenvalues ±(n − 1), ±(n − 3), …"""
    i = torch.arange(1, max(n, 1), dtype=torch.float64)
    return tridiagonal(torch.zeros(n), (i * (n - i)).sqrt())


def _graded(n: int, dtype: torch.dtype, generator: Generator) -> Tensor:
    scale = torch.logspace(0, -8, n, dtype=torch.float64)
    return _random()(n, dtype, generator) * scale[:, None] * scale


def _clustered(n: int, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Two clusters whose members differ by less than rounding."""
    values = torch.where(torch.arange(n) < n // 2, 1.0, -2.0).double()
    return with_eigenvalues(values * (1 + torch.finfo(dtype).eps * torch.arange(n)), generator)


def _hilbert(n: int, dtype: torch.dtype, generator: Generator) -> Tensor:
    i = torch.arange(n, dtype=torch.float64)
    return 1 / (i[:, None] + i + 1)


def _rank_one(n: int, dtype: torch.dtype, generator: Generator) -> Tensor:
    v = torch.randn(n, generator=generator, dtype=torch.float64)
    return symmetrized(v[:, None] * v)


def _one_near_overflow(n: int, dtype: torch.dtype, generator: Generator) -> Tensor:
    diagonal = torch.ones(n, dtype=torch.float64)
    diagonal[n // 2] = torch.finfo(dtype).max
    return torch.diag(diagonal)


# 1 to 21 are LAPACK's types, in its order.
SYMMETRIC: dict[str, Maker] = {
    "zero": lambda n, dtype, generator: torch.zeros(n, n),
    "identity": lambda n, dtype, generator: torch.eye(n),
    "diagonal, even": _diagonal(_arithmetic),
    "diagonal, geometric": _diagonal(_geometric),
    "diagonal, one large": _diagonal(_one_large),
    "diagonal, geometric, large": _diagonal(_geometric, _large),
    "diagonal, geometric, small": _diagonal(_geometric, _small),
    "even": _dense(_arithmetic),
    "geometric": _dense(_geometric),
    "one large": _dense(_one_large),
    "even, large": _dense(_arithmetic, _large),
    "even, small": _dense(_arithmetic, _small),
    "random": _random(),
    "random, large": _random(_large),
    "random, small": _random(_small),
    "positive, even": _dense(_arithmetic, positive=True),
    "positive, geometric": _dense(_geometric, positive=True),
    "positive, one large": _dense(_one_large, positive=True),
    "positive, even, large": _dense(_arithmetic, _large, positive=True),
    "positive, even, small": _dense(_arithmetic, _small, positive=True),
    "dominant tridiagonal": _dominant_tridiagonal,
    "wilkinson": wilkinson,
    "glued wilkinson": _glued_wilkinson,
    "clement": clement,
    "graded": _graded,
    "graded, reversed": lambda *args: _graded(*args).flip(0, 1),
    "clustered": _clustered,
    "hilbert": _hilbert,
    "rank one": _rank_one,
    "ones": lambda n, dtype, generator: torch.ones(n, n),
    "exchange": lambda n, dtype, generator: torch.eye(n).flip(0),
    "second difference": lambda n, dtype, generator: tridiagonal(torch.full((n,), 2.0), -torch.ones(max(n - 1, 0))),
    "subnormal": _random(lambda dtype: torch.finfo(dtype).tiny / 64),
    "near overflow": lambda n, dtype, generator: _random()(n, dtype, generator) * (torch.finfo(dtype).max / max(n, 1)),
    "one entry near overflow": _one_near_overflow,
}
