"""Where the eigenvalues of a matrix are, for certain: radii around computed ones, with every rounding in them.

Let V and W be computed eigenvectors, W V close to 1, and R = M V − V Λ. For every E with ‖E‖ ≤ e
    V⁻¹ (M + E) V = Λ + F,     F = (W V)⁻¹ W (R + E V).
If every entry of row i of F is at most a_i, z is an eigenvalue only where Σ_i a_i / |z − λ_i| ≥ 1: of an eigenvector v
each |v_i| is at most a_i ‖v‖₁ / |z − λ_i|. The same holds of Λ + tF for 0 ≤ t ≤ 1, so a circle around λ_i on which that
sum is less than one has as many eigenvalues inside as there are λ inside, at least one; and none is outside of all
such circles. To first order the radius is a_i, the condition number times the error; here nothing is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from overtone.reference.linalg import eig_ex, inverse_ex

EPS = torch.finfo(torch.float64).eps
TINY = torch.finfo(torch.float64).tiny

# Eigenvalues, right and left eigenvectors (columns, of length one on the right, with products one) of float64 or
# complex128 matrices.
Solver = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class Eigenvalues(NamedTuple):
    """Complex eigenvalues [..., n], and radii.

    Within `error` of each value is an eigenvalue, and every eigenvalue is within `error` of one of the values.
    """

    values: Tensor
    error: Tensor


def enclosed_eigenvalues(matrix: Tensor, deviation: Tensor, solver: Solver) -> Eigenvalues:
    """Of all matrices within `deviation` [...] of `matrix` [..., n, n], in the 2-norm. Infinite where not finite."""
    if matrix.shape[-1] == 0:
        values = matrix.new_empty(matrix.shape[:-1], dtype=torch.complex128)
        return Eigenvalues(values, values.real)
    # Entries of one keep squares from overflow and underflow.
    size = matrix.abs().amax((-2, -1))
    size = torch.where((size > 0) & size.isfinite(), size, 1)
    scaled = matrix / size[..., None, None]
    rounding = EPS * frobenius(scaled) + matrix.shape[-1] * TINY
    values, right, left = solver(scaled)
    radii = enclosing_radii(scaled, values, right, left, deviation / size + rounding)
    size = size[..., None]
    return Eigenvalues(values * size, (radii + 2 * EPS * values.abs()) * size * (1 + 4 * EPS) + TINY)


def enclosing_radii(matrix: Tensor, values: Tensor, right: Tensor, left: Tensor, deviation: Tensor) -> Tensor:
    """One radius per eigenvalue, [..., n]; entries of `matrix` are at most one."""
    n = matrix.shape[-1]
    left, off = _inverse_to_rounding(right, left)
    length, condition = _lengths(right), _lengths(left)
    norm = frobenius(matrix)[..., None]
    error = _product_rounding(n) * (norm + values.abs()) + deviation[..., None]
    residual = _lengths(_product(matrix, right) - right * values[..., None, :]) + error * length
    direct = condition * residual.amax(-1, keepdim=True)
    worst = off.amax(-1, keepdim=True)
    indirect = off * direct.amax(-1, keepdim=True) / (1 - worst)  # of (W V)⁻¹ = 1 + (1 − W V)(W V)⁻¹
    known = (worst < 1) & (direct + indirect).isfinite()
    # All of this is sums of at most n² numbers that are not negative.
    a = torch.where(known, (direct + indirect) * _summation(n * n) + TINY, torch.inf)
    largest = (values.abs() + norm + deviation[..., None]) * _summation(n)  # no two eigenvalues are further apart
    return _radii(values, a, largest)


class Power(NamedTuple):
    """scale^m (P + E) of a matrix's power m, ‖P‖_F ≤ size and ‖E‖_F ≤ error; one of each per matrix, but P."""

    matrix: Tensor
    size: Tensor
    error: Tensor
    scale: Tensor
    exponent: int

    @property
    def radius(self) -> Tensor:
        """No eigenvalue of the matrix is larger in modulus."""
        return self.scale * (self.size + self.error) ** (1 / self.exponent) * (1 + 64 * EPS)


def powers(matrix: Tensor, error: Tensor) -> Iterator[Power]:
    """The powers 1, 2, 4, 8 … of matrices [M, n, n], float32 or float64, that are off by `error` [M] at most.

    Factors close to one norm keep powers from underflow and overflow. Every rounding is in the error.
    """
    n, step = matrix.shape[-1], torch.finfo(matrix.dtype).eps
    tiny = n * n * torch.finfo(matrix.dtype).tiny
    size, exponent = frobenius(matrix), 1
    error = error + tiny
    scale = torch.ones_like(size)
    while True:
        yield Power(matrix, size, error, scale, exponent)
        factor = (1 / (size + error)).to(matrix.dtype)
        matrix = matrix * factor[:, None, None]
        factor = factor.double()
        scale = scale * factor ** (-1 / exponent)
        size, error = size * factor * (1 + step), (error + step * size) * factor + tiny
        # (P + E)² is off by PE + EP + E², and a product of n × n matrices by nε of its factors' norms.
        matrix, error = matrix @ matrix, error * (2 * size + error) + n * step * size.square() + tiny
        size, exponent = frobenius(matrix), 2 * exponent


def on_mean_zero(matrix: Tensor) -> Tensor:
    """QᵀMQ, [..., n − 1, n − 1], Q an orthonormal basis of vectors of mean zero; off by (n + 8) ε ‖M‖_F at most.

    Q is the reflection that swaps 1/√n and −e_n, without its last column. Of M with M 1 = 1 it has all the eigenvalues
    but one.
    """
    root = matrix.shape[-1] ** 0.5
    matrix = matrix[..., :-1] - ((matrix.sum(-1) / root + matrix[..., -1]) / (1 + root))[..., None]
    return matrix[..., :-1, :] - ((matrix.sum(-2) / root + matrix[..., -1, :]) / (1 + root))[..., None, :]


def frobenius(matrix: Tensor) -> Tensor:
    """‖M‖_F in float64, rounded up."""
    n = matrix.shape[-1]
    return torch.linalg.vector_norm(matrix, dim=(-2, -1), dtype=_wide(matrix)) * _summation(n * n) + n * TINY**0.5


def size_of_moduli(matrix: Tensor) -> Tensor:
    """A bound on ‖|M|‖₂, and so of E with |e_ij| ≤ |m_ij|: the smaller of Frobenius' norm and √(‖M‖₁ ‖M‖_∞)."""
    moduli, n = matrix.abs(), matrix.shape[-1]
    rows, columns = (moduli.sum(dim, dtype=torch.float64).amax(-1) for dim in (-1, -2))
    return torch.minimum(frobenius(matrix), rows.sqrt() * columns.sqrt() * _summation(n))


def reference_solver(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, vectors, _ = eig_ex(matrix + _noise(matrix))
    return values, vectors, inverse_ex(vectors).inverse.mH


def _noise(matrix: Tensor) -> Tensor:
    """Rounding, in size: LAPACK's solver stalls where many eigenvalues are exactly equal, and MKL's then writes where
    it must not. Radii count it with the residual. None for multiples of 1, which have any eigenvectors."""
    n = matrix.shape[-1]
    unit = torch.eye(n, dtype=matrix.dtype, device=matrix.device)
    centre = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    size = EPS * torch.linalg.matrix_norm(matrix - centre * unit)[..., None, None] / n
    return size * torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(matrix)


def _wide(matrix: Tensor) -> torch.dtype:
    return torch.complex128 if matrix.is_complex() else torch.float64


def _summation(terms: int) -> float:
    """What a sum of that many positive float64 numbers may be too small by, as a factor."""
    return 1 + (terms + 8) * EPS


def _product_rounding(n: int) -> float:
    """Of products of complex n × n matrices, in units of the factors' moduli."""
    return (2 * n + 8) * EPS


def _inverse_to_rounding(right: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """W, and a bound on the row sums of |1 − W V|. Left vectors found one by one need not fit equal eigenvalues."""
    off = _distance_from_inverse(right, left)
    suspect = ~(off.amax(-1) < 0.5)
    if suspect.any():
        left, off = left.clone(), off.clone()
        left[suspect] = inverse_ex(right[suspect]).inverse.mH
        off[suspect] = _distance_from_inverse(right[suspect], left[suspect])
    return left, off


def _distance_from_inverse(right: Tensor, left: Tensor) -> Tensor:
    unit = torch.eye(right.shape[-1], dtype=right.dtype, device=right.device)
    rounding = _product_rounding(right.shape[-1]) * _lengths(left) * _lengths(right).sum(-1, keepdim=True)
    lacking = left.mH @ right - unit
    return lacking.real.abs().sum(-1) + lacking.imag.abs().sum(-1) + rounding


def _lengths(vectors: Tensor) -> Tensor:
    """Of columns; much faster than torch.linalg.vector_norm of complex numbers."""
    return (vectors.real.square().sum(-2) + vectors.imag.square().sum(-2)).sqrt()


def _product(matrix: Tensor, right: Tensor) -> Tensor:
    if matrix.is_complex():
        return matrix @ right
    return torch.complex(matrix @ right.real, matrix @ right.imag)


def _radii(values: Tensor, a: Tensor, largest: Tensor) -> Tensor:
    """The smallest of the radii a_i·17/16·2ᵏ that isolates; `largest` where none below it does."""
    shape, n = values.shape, values.shape[-1]
    a, gaps = a.reshape(-1, n), (values[..., :, None] - values[..., None, :]).abs().reshape(-1, n)
    radius, trial = largest.flatten(), a.flatten() * (1 + 1 / 16)
    left = (trial < radius).nonzero()[:, 0]
    while left.numel():
        r, gap = trial[left][:, None], gaps[left]
        distance = (gap - r).abs() - 8 * EPS * (gap + r)
        isolates = (a[left // n] / distance.clamp(min=0)).sum(-1) < 1 - (n + 8) * EPS
        radius[left[isolates]] = trial[left[isolates]]
        left = left[~isolates]
        trial[left] *= 2
        left = left[trial[left] < radius[left]]
    return radius.reshape(shape)
