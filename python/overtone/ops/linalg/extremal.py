"""The extremal eigenvalues of row-stochastic matrices by Arnoldi's method, for analysis: no gradient.

On vectors of mean zero, in an orthonormal basis of them, A is a matrix C that has all its eigenvalues but the Perron
one: the constant vector is not in that space. Arnoldi's Ritz pairs have a residual that costs nothing,
|h_{m+1,m}|·|last component|, but a pair may converge and not be extremal. So all converged pairs are taken off C, and
powers of what remains, R = (1 − QQᵀ) C (1 − QQᵀ) − c, c the mean of its eigenvalues, show that these are less extremal:
they are within ‖R^p‖^(1/p) of c. For a normal vector g |R^p g| < 0.01 ‖R^p‖ has a probability below 0.008, for eight of
them 2e-17. What is not shown after MOST_STEPS steps is solved whole.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from overtone import _transforms as transforms
from overtone import _validate as validate
from overtone._precision import autocast_disabled, products_are_short
from overtone.ops.linalg.eig import eig_ex, eigvals_ex
from overtone.ops.linalg.eigh import eigh_ex
from overtone.reference.enclosures import on_mean_zero
from overtone.reference.linalg import NOT_STOCHASTIC, raise_unsolved, rows_sum_to_one

__all__ = ["ExtremalExResult", "ExtremalResult", "extremal_eigvals", "extremal_eigvals_ex"]

# Matrices of fewer tokens are not worth the steps; many are solved whole, a matrix per lane, in the time of one.
LEAST_TOKENS, TOKENS_PER_MATRIX = 512, 32
STEPS_BETWEEN_CHECKS = 16
MOST_STEPS = 64
MOST_POWERS = 64
PROBES, PROBES_SEE = 8, 0.01
# Of the Gram matrix of Ritz vectors: directions below are not taken off.
LEAST_DIRECTION = 1e-4


class ExtremalResult(NamedTuple):
    """Each is [...], of the eigenvalues other than the Perron one."""

    smallest: Tensor  #: the eigenvalue with the smallest real part
    second: Tensor  #: the eigenvalue with the largest modulus
    residual: Tensor  #: ‖E‖, where they are extremal for A + E, up to rounding; zero where A was solved whole


class ExtremalExResult(NamedTuple):
    """An ExtremalResult, nan where info [...] is not zero."""

    smallest: Tensor
    second: Tensor
    residual: Tensor
    info: Tensor  #: 0: solved, 1: not finite or not converged, 2: the rows do not sum to one


def extremal_eigvals(A: Tensor, *, tolerance: float | None = None) -> ExtremalResult:
    """λ with the smallest real part and λ₂, the largest in modulus but for the Perron one, of attention [..., n, n].

    Args:
        A: float32 or float64, n ≥ 2, every row summing to one.
        tolerance: of the residuals, and of how far another eigenvalue may be beyond those returned; None is 100 √n ε.
            One Arnoldi step costs a product with A, so large matrices whose extremal eigenvalues stand apart, such as
            trained attention, take a part of the time of eigvals. The others are solved whole.
    """
    *results, info = _solve("extremal_eigvals", A, tolerance)
    raise_unsolved("extremal_eigvals", info)
    return ExtremalResult(*results)


def extremal_eigvals_ex(A: Tensor, *, tolerance: float | None = None) -> ExtremalExResult:
    """extremal_eigvals that returns an info per matrix instead of raising."""
    return ExtremalExResult(*_solve("extremal_eigvals_ex", A, tolerance))


@torch.no_grad()
def _solve(function: str, A: Tensor, tolerance: float | None) -> tuple[Tensor, ...]:
    A = validate.matrices(function, "A", A, square=True)
    if not transforms.is_plain(A):
        raise NotImplementedError(
            f"{function}: A: got a tensor of a torch.func transform or of forward-mode AD, wanted a plain one"
            " [..., n, n]: it has no derivative and no torch.vmap; eigvals has both"
        )
    n, batch = A.shape[-1], A.shape[:-2]
    if A.dtype not in (torch.float32, torch.float64) or n < 2:
        wanted = "float32 or float64 of shape [..., n, n] with n ≥ 2"
        raise ValueError(f"{function}: A: got {validate.describe(A)}, wanted {wanted}")
    tolerance = validate.optional_number(function, "tolerance", tolerance)
    tolerance = 100 * n**0.5 * torch.finfo(A.dtype).eps if tolerance is None else tolerance
    A = A.reshape(-1, n, n)
    info = torch.where(rows_sum_to_one(A), 0, NOT_STOCHASTIC).to(torch.int32)
    info = info.masked_fill(~A.isfinite().all(-1).all(-1), 1)
    found = A.new_full((2, A.shape[0]), torch.nan, dtype=torch.promote_types(A.dtype, torch.complex64))
    residual = A.new_full((A.shape[0],), torch.nan)

    # The eigenvalues of triangular matrices, such as causal attention, are their diagonal, exactly.
    lower, upper = (((part == 0).all(-1).all(-1) & (info == 0)) for part in (A.triu(1), A.tril(-1)))
    _keep(found, residual, lower, _of_diagonal(A[lower])[:, 1:])
    upper = upper & ~lower
    _keep(found, residual, upper, _of_diagonal(A[upper])[:, :-1])

    left = ((info == 0) & ~lower & ~upper).nonzero()[:, 0]
    if n <= TOKENS_PER_MATRIX * len(left):
        values, info[left] = eigvals_ex(A[left], row_stochastic=True)
        _keep(found, residual, left, values[:, 1:])
    elif left.numel():
        _solve_few(A[left], left, tolerance, found, residual, info)
    info = info.masked_fill((info == 0) & found.isnan().any(0), 1)
    return *(field.reshape(batch) for field in (*found, residual)), info.reshape(batch)


def _solve_few(A: Tensor, places: Tensor, tolerance: float, found: Tensor, residual: Tensor, info: Tensor) -> None:
    others = on_mean_zero(A)
    # A residual in float32 means nothing where torch multiplies in fewer bits.
    if A.shape[-1] >= LEAST_TOKENS and not products_are_short():
        with autocast_disabled(A):
            left = _arnoldi(others, places, tolerance, found, residual)
        others, places = others[left], places[left]
    if places.numel():
        values, info[places] = eigvals_ex(others)
        _keep(found, residual, places, values)


def _keep(found: Tensor, residual: Tensor, which: Tensor, values: Tensor) -> None:
    """What all eigenvalues but the Perron one, [B, n − 1], say of the matrices `which`."""
    if values.numel():
        found[:, which] = torch.stack(_extremes(values)[0]).to(found.dtype)
        residual[which] = 0 * found[0, which].abs()  # nan where it was not solved


def _of_diagonal(A: Tensor) -> Tensor:
    return A.diagonal(dim1=-2, dim2=-1)


def _extremes(values: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The extremal values [B], and their indices."""
    indices = [values.real.argmin(-1, keepdim=True), values.abs().argmax(-1, keepdim=True)]
    return [values.gather(-1, index)[:, 0] for index in indices], indices


def _arnoldi(C: Tensor, places: Tensor, tolerance: float, found: Tensor, residual: Tensor) -> Tensor:
    """Fills `found` and `residual` at `places` for those of the matrices C whose extremes are certain; returns which
    are left."""
    count, n, _ = C.shape
    active = torch.arange(count, device=C.device)
    start = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(C)
    basis = C.new_zeros(count, MOST_STEPS + 1, n)  # rows are the Arnoldi vectors
    basis[:, 0] = start / start.norm()
    h = C.new_zeros(count, MOST_STEPS + 1, MOST_STEPS)
    for step in range(MOST_STEPS):
        if not active.numel():
            break
        _expand(C, basis, h, step)
        m = step + 1
        if m % STEPS_BETWEEN_CHECKS:
            continue
        values, vectors, _ = eig_ex(h[:, :m, :m])
        ritz, indices = _extremes(values)
        sizes = h[:, m, step, None] * vectors[:, -1].abs()
        # Together they are as far off as their residuals' root of squares: a quarter leaves room for that.
        converged = sizes <= tolerance / 4
        done = torch.cat([converged.gather(-1, index) for index in indices], -1).all(-1)
        extremes = torch.stack(ritz)
        done = done & _are_extremal(extremes, _expected_rest(C, values, converged), tolerance)
        candidates = done.nonzero()[:, 0]
        if candidates.numel():
            extremes, taken = extremes[:, candidates], vectors[candidates] * converged[candidates, None, :]
            q, size = _span(C[candidates], basis[candidates, :m], taken)
            certain = size <= tolerance
            certain[certain.clone()] = _nothing_is_beyond(
                extremes[:, certain], C[candidates[certain]], q[certain], tolerance
            )
            done[candidates] = certain
            found[:, places[active[done]]] = extremes[:, certain].to(found.dtype)
            residual[places[active[done]]] = size[certain].to(residual.dtype)
            active, C, basis, h = active[~done], C[~done], basis[~done], h[~done]
    return active


class _Rest(NamedTuple):
    """Of what remains of C: eigenvalues within `radius` of `centre`."""

    centre: Tensor
    radius: Tensor


def _expected_rest(C: Tensor, values: Tensor, converged: Tensor) -> _Rest:
    """What powers would find if the other Ritz values were the extremes of what remains: a guess, to save products."""
    trace = _of_diagonal(C).sum(-1) - (values.real * converged).sum(-1)
    centre = trace / (C.shape[-1] - converged.sum(-1))
    furthest = ((values - centre[:, None]).abs() * ~converged).amax(-1)
    return _Rest(centre.double(), furthest.double() * PROBES_SEE ** (-1 / MOST_POWERS))


def _span(C: Tensor, basis: Tensor, ritz_vectors: Tensor) -> tuple[Tensor, Tensor]:
    """An orthonormal basis Q [B, n, k], some columns zero, of Ritz vectors [B, m, m] that are given in the basis
    [B, m, n]; and ‖E‖_F of the E that makes it invariant under C + E."""
    weight, directions, _ = eigh_ex((ritz_vectors @ ritz_vectors.mH).real)  # ascending
    is_taken = weight > LEAST_DIRECTION
    directions = (directions * is_taken[:, None, :])[..., -max(1, int(is_taken.sum(-1).amax())) :]
    q = basis.mT @ directions
    image = C @ q
    return q, torch.linalg.vector_norm(image - q @ (q.mT @ image), dim=(-2, -1))


def _nothing_is_beyond(extremes: Tensor, C: Tensor, q: Tensor, tolerance: float) -> Tensor:
    """Whether no eigenvalue of C without the span of q is beyond the extremes [2, B], but for the tolerance."""
    n = C.shape[-1]
    size = q.square().sum((-2, -1)).round()  # dimensions of the span
    centre = (_of_diagonal(C).sum(-1) - ((C @ q) * q).sum((-2, -1))) / (n - size)
    probes = torch.randn(n, PROBES, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(C)
    image = probes - q @ (q.mT @ probes)
    log_size = torch.zeros_like(centre, dtype=torch.float64)
    certain = torch.zeros_like(centre, dtype=torch.bool)
    for power in range(1, MOST_POWERS + 1):
        image = C @ image - centre[:, None, None] * image
        image = image - q @ (q.mT @ image)
        length = torch.linalg.vector_norm(image, dim=-2).amax(-1).clamp(min=torch.finfo(C.dtype).tiny)
        image, log_size = image / length[:, None, None], log_size + length.double().log()
        if power % 8 == 0:
            radius = ((log_size - math.log(PROBES_SEE)) / power).exp()
            certain |= _are_extremal(extremes, _Rest(centre.double(), radius), tolerance)
            if certain.all():
                break
    return certain


def _are_extremal(extremes: Tensor, rest: _Rest, tolerance: float) -> Tensor:
    """Whether nothing in the rest is beyond the smallest real part and the largest modulus, [2, B]."""
    smallest, second = extremes[0].real.double(), extremes[1].abs().double()
    is_least = rest.centre - rest.radius >= smallest - tolerance
    return is_least & (rest.centre.abs() + rest.radius <= second + tolerance)


def _expand(C: Tensor, basis: Tensor, h: Tensor, step: int) -> None:
    """One more Arnoldi vector, orthogonalised twice."""
    new = torch.bmm(C, basis[:, step, :, None])
    size = torch.linalg.vector_norm(new[..., 0], dim=-1)
    known = basis[:, : step + 1]
    for _ in range(2):
        part = torch.bmm(known, new)
        h[:, : step + 1, step] += part[..., 0]
        new = new - torch.bmm(known.mT, part)
    length = torch.linalg.vector_norm(new[..., 0], dim=-1)
    h[:, step + 1, step] = length
    # An invariant subspace: what follows is rounding, and such a matrix is solved whole.
    is_new = length > 10 * C.shape[-1] ** 0.5 * torch.finfo(C.dtype).eps * size
    basis[:, step + 1] = torch.where(is_new, 1 / length, torch.nan)[:, None] * new[..., 0]
