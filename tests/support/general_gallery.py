"""Nonsymmetric matrices that break eigen-solvers, by name. Each maker takes (n, dtype, generator); n ≥ 1.

The first 21 are LAPACK's own list (its test programs DDRVEV and DCHKHS).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

Maker = Callable[[int, torch.dtype, Generator], Tensor]
F64 = torch.float64


def batch(n: int, dtype: torch.dtype, seed: int = 0) -> tuple[list[str], Tensor]:
    """Every matrix of the gallery at size n: names, and the batch [names, n, n]."""
    generator = Generator().manual_seed(seed)
    return list(GALLERY), torch.stack([make(n, dtype, generator).to(dtype) for make in GALLERY.values()])


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _large(dtype: torch.dtype) -> float:
    return math.sqrt(torch.finfo(dtype).max)


def _small(dtype: torch.dtype) -> float:
    return math.sqrt(torch.finfo(dtype).tiny)


def _randn(n: int, generator: Generator) -> Tensor:
    return torch.randn(n, n, generator=generator, dtype=F64)


def _arithmetic(n: int, dtype: torch.dtype) -> Tensor:
    return torch.linspace(1, _eps(dtype), n, dtype=F64)


def _geometric(n: int, dtype: torch.dtype) -> Tensor:
    return torch.logspace(0, math.log10(_eps(dtype)), n, dtype=F64)


def _clustered(n: int, dtype: torch.dtype) -> Tensor:
    values = torch.full((n,), _eps(dtype), dtype=F64)
    values[0] = 1
    return values


def _signs(n: int, generator: Generator) -> Tensor:
    return torch.randint(0, 2, (n,), generator=generator).double() * 2 - 1


def _basis(n: int, generator: Generator, condition: float) -> Tensor:
    """A matrix of that condition number; 1 is orthogonal."""
    q, p = (torch.linalg.qr(_randn(n, generator)).Q for _ in range(2))
    return q * torch.logspace(0, -math.log10(condition), n, dtype=F64) @ p


def _diagonal(spectrum: Callable, scale: Callable = lambda dtype: 1.0) -> Maker:
    return lambda n, dtype, generator: torch.diag(spectrum(n, dtype) * _signs(n, generator)) * scale(dtype)


def _similar(spectrum: Callable | None, condition: Callable, scale: Callable = lambda dtype: 1.0) -> Maker:
    """X⁻¹ T X with T triangular; without a spectrum T has blocks of complex pairs as well."""

    def make(n: int, dtype: torch.dtype, generator: Generator) -> Tensor:
        values = torch.randn(n, generator=generator, dtype=F64) if spectrum is None else spectrum(n, dtype)
        t = _randn(n, generator).triu(1) + torch.diag(values * _signs(n, generator))
        if spectrum is None:
            for i in range(0, n - 2, 3):  # [a, b; −c, a]: a complex pair
                t[i + 1, i + 1] = t[i, i]
                t[i + 1, i] = -t[i, i + 1]
        x = _basis(n, generator, condition(dtype))
        return torch.linalg.solve(x, t @ x) * scale(dtype)

    return make


def _uniform(scale: Callable = lambda dtype: 1.0) -> Maker:
    def make(n: int, dtype: torch.dtype, generator: Generator) -> Tensor:
        return (2 * torch.rand(n, n, generator=generator, dtype=F64) - 1) * scale(dtype)

    return make


def _jordan(n: int, diagonal: float) -> Tensor:
    return torch.eye(n, dtype=F64) * diagonal + torch.diag(torch.ones(n - 1, dtype=F64), -1)


def _grcar(n: int) -> Tensor:
    ones = torch.ones(n, n, dtype=F64)
    return ones.triu() - ones.triu(4) - torch.diag(torch.ones(n - 1, dtype=F64), -1)


def _frank(n: int) -> Tensor:
    i = torch.arange(n, dtype=F64)
    return torch.where(i[None, :] >= i[:, None] - 1, n - torch.maximum(i[:, None], i[None, :]), 0.0)


def _kahan(n: int) -> Tensor:
    sine, cosine = math.sin(1.2), math.cos(1.2)
    upper = torch.eye(n, dtype=F64) - cosine * torch.ones(n, n, dtype=F64).triu(1)
    return torch.tensor([sine**i for i in range(n)], dtype=F64)[:, None] * upper


def _clement(n: int) -> Tensor:
    k = torch.arange(1, n, dtype=F64)
    return torch.diag(k, -1) + torch.diag(k.flip(0), 1)


def _companion(n: int, generator: Generator) -> Tensor:
    a = torch.diag(torch.ones(n - 1, dtype=F64), -1)
    a[0] = torch.randn(n, generator=generator, dtype=F64)
    return a


def _attention(n: int, generator: Generator, temperature: float) -> Tensor:
    return (temperature * _randn(n, generator)).softmax(-1)


def _causal(n: int, generator: Generator) -> Tensor:
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    return (2 * _randn(n, generator)).masked_fill(hidden, -math.inf).softmax(-1)


def _one_hot(n: int, generator: Generator) -> Tensor:
    return torch.eye(n, dtype=F64)[torch.randint(0, n, (n,), generator=generator)]


def _rank_one(n: int, generator: Generator) -> Tensor:
    u, v = torch.randn(2, n, generator=generator, dtype=F64)
    return u[:, None] * v


def _graded(n: int, dtype: torch.dtype, generator: Generator) -> Tensor:
    grades = torch.logspace(0, math.log10(_eps(dtype)), n, dtype=F64)
    return _randn(n, generator) * grades[:, None] * grades


def _badly_scaled(n: int, dtype: torch.dtype, generator: Generator) -> Tensor:
    scale = torch.logspace(0, -math.log10(_eps(dtype)) / 2, n, dtype=F64)[torch.randperm(n, generator=generator)]
    return _randn(n, generator) * scale[:, None] / scale


def _hard(dtype: torch.dtype) -> float:
    return 1 / math.sqrt(_eps(dtype))


def _orthogonal(dtype: torch.dtype) -> float:
    return 1.0


GALLERY: dict[str, Maker] = {
    "1 zero": lambda n, dtype, generator: torch.zeros(n, n, dtype=F64),
    "2 identity": lambda n, dtype, generator: torch.eye(n, dtype=F64),
    "3 Jordan": lambda n, dtype, generator: _jordan(n, 1.0),
    "4 diagonal, arithmetic": _diagonal(_arithmetic),
    "5 diagonal, geometric": _diagonal(_geometric),
    "6 diagonal, clustered": _diagonal(_clustered),
    "7 diagonal, large": _diagonal(_arithmetic, _large),
    "8 diagonal, small": _diagonal(_arithmetic, _small),
    "9 orthogonal basis, arithmetic": _similar(_arithmetic, _orthogonal),
    "10 orthogonal basis, geometric": _similar(_geometric, _orthogonal),
    "11 orthogonal basis, clustered": _similar(_clustered, _orthogonal),
    "12 orthogonal basis, complex": _similar(None, _orthogonal),
    "13 hard basis, arithmetic": _similar(_arithmetic, _hard),
    "14 hard basis, geometric": _similar(_geometric, _hard),
    "15 hard basis, clustered": _similar(_clustered, _hard),
    "16 hard basis, complex": _similar(None, _hard),
    "17 hard basis, complex, large": _similar(None, _hard, lambda dtype: _large(dtype) * _eps(dtype)),
    "18 hard basis, complex, small": _similar(None, _hard, _small),
    "19 random": _uniform(),
    "20 random, large": _uniform(_large),
    "21 random, small": _uniform(_small),
    "near overflow": _uniform(lambda dtype: torch.finfo(dtype).max / 1e4),
    "subnormal": _uniform(lambda dtype: torch.finfo(dtype).tiny / 8),
    "nilpotent Jordan": lambda n, dtype, generator: _jordan(n, 0.0),
    "Grcar": lambda n, dtype, generator: _grcar(n),
    "Frank": lambda n, dtype, generator: _frank(n),
    "Kahan": lambda n, dtype, generator: _kahan(n),
    "Clement": lambda n, dtype, generator: _clement(n),
    "companion": lambda n, dtype, generator: _companion(n, generator),
    "cycle": lambda n, dtype, generator: torch.eye(n, dtype=F64).roll(1, 0),
    "permutation": lambda n, dtype, generator: torch.eye(n, dtype=F64)[torch.randperm(n, generator=generator)],
    "skew": lambda n, dtype, generator: _randn(n, generator).tril(-1) - _randn(n, generator).tril(-1).mT,
    "rank one": lambda n, dtype, generator: _rank_one(n, generator),
    "graded": _graded,
    "badly scaled": _badly_scaled,
    "uniform attention": lambda n, dtype, generator: torch.full((n, n), 1 / n, dtype=F64),
    "equal rows": lambda n, dtype, generator: _attention(n, generator, 1.0)[:1].expand(n, n),
    "attention": lambda n, dtype, generator: _attention(n, generator, 1.0),
    "sharp attention": lambda n, dtype, generator: _attention(n, generator, 20.0),
    "causal attention": lambda n, dtype, generator: _causal(n, generator),
    "one-hot rows": lambda n, dtype, generator: _one_hot(n, generator),
}
