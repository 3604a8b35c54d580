"""Which (1 + λ^H λ^A) dominates (MATH §5), fast: most attention is decided without one eigenvalue of it.

Let the eigenvalues of A other than the Perron one have the mean c and lie in the disk |z − c| ≤ r. Then for every λ^H
    max_i |1 + λ z_i| ≤ |1 + λc| + |λ|r             (an upper bound: PERRON if |1 + λ| is above it)
    max_i |1 + λ z_i| ≥ |mean_i (1 + λ z_i)ᵏ|^(1/k)  (a lower bound, k = 1, 2: OTHER if |1 + λ| is below it)
c is a trace; D = (I − Π)(A − cI) has the eigenvalues z_i − c, so r = ‖D^m‖^(1/m) for any power m, and squaring makes
it as sharp as wanted. Every rounding is bounded and added. What stays open is solved with eigenvectors, whose condition
numbers bound the error of each eigenvalue.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from overtone.backends import select
from overtone.ops import checks
from overtone.reference.analysis import (
    Dominance,
    Eigenvalues,
    Verdict,
    attention_is_stochastic,
    bounded_condition,
    causal_eigenvalues,
    eigenvalue_dominance,
    matrix_eigenvalues,
)

# How often D is squared: not at all is enough for smooth attention, such as that of untrained models; what is left gets
# a sharper disk, still far cheaper than eigenvectors.
SQUARINGS = (0, 2, 5)
# LAPACK's ratio of a backward error to n·ε‖A‖; ot.linalg's tests hold every matrix to it.
SOLVER_RATIO = 10
# Numbers worked on at once: what bounds the memory, and fits into the last-level cache.
CHUNK_ELEMENTS = 2**20


@torch.no_grad()
def dominance(
    attention: Tensor, weight: Tensor | Eigenvalues, *, is_causal: bool = False, backend: str | None = None
) -> Dominance:
    """Which (1 + λ^H λ^A) dominates, for every pair of attention [..., N, N] and weight [..., d, d].

    Leading dimensions broadcast. weight is H, or W_V W_proj = Hᵀ, which has the same eigenvalues; for one head take
    `head_weights`, since a weight of rank k < d has zeros, and zero is a tie. Where one weight meets many batches of
    attention, pass its `eigenvalues` instead. With is_causal A is lower triangular, and its eigenvalues its diagonal.

    Returns:
        Dominance(verdict, margin, error), each [...]. The true margin max|1 + λ^H| − max|1 + λ^H λ^A| is within `error`
        of `margin`, for every A and H that round to what was given (errors of eigenvalues are bounded to first order);
        it is decided if zero is not. A case that bounds decide keeps their width as its error: ask
        `ot.linalg.eigvals` for sharper margins. Undecided cases say why: see `Verdict`. One token: Perron, by an
        infinite margin. Not differentiable.
    """
    attention = _square("attention", attention)
    spectrum = weight if isinstance(weight, Eigenvalues) else eigenvalues(_square("weight", weight), backend=backend)
    is_causal = checks.flag("dominance", "is_causal", is_causal)
    if not attention.is_floating_point() or attention.device != spectrum.values.device:
        wanted = f"real numbers on {spectrum.values.device}, as weight"
        raise ValueError(f"dominance: attention: got {checks.describe(attention)}, wanted {wanted}")
    shape = torch.broadcast_shapes(attention.shape[:-2], spectrum.values.shape[:-1])
    cases = _Cases(attention, spectrum, shape)
    if is_causal or attention.shape[-1] == 1:
        cases.decide(_from_diagonal)
    else:
        for squarings in SQUARINGS:
            cases.decide(partial(_from_disk, squarings=squarings))
        cases.decide(partial(_from_eigenvalues, backend=backend))
    return Dominance(*(field.reshape(shape) for field in cases.result))


@torch.no_grad()
def eigenvalues(matrix: Tensor, *, backend: str | None = None) -> Eigenvalues:
    """The eigenvalues of [..., n, n], computed in float64, and a first-order bound on the error of each.

    The bound is the condition number, which the left eigenvectors give, times how far the matrix is off: the
    rounding of its entries to their dtype, and the solver's backward error.
    """
    wide = matrix if matrix.is_complex() else matrix.double()
    if select("eig", backend, wide) == "reference":
        return matrix_eigenvalues(matrix)
    values, _, left, _ = torch.ops.overtone.eig_ex(wide, False, True, True)  # wᴴv = 1 and ‖v‖ = 1
    condition = bounded_condition(torch.linalg.vector_norm(left, dim=-2))
    rounding = torch.finfo(matrix.dtype).eps + SOLVER_RATIO * matrix.shape[-1] * torch.finfo(wide.dtype).eps
    return Eigenvalues(values, condition * rounding * torch.linalg.matrix_norm(wide)[..., None])


class _Cases:
    """All pairs of A and spec(H), as one list, and what is known of them."""

    def __init__(self, attention: Tensor, weight: Eigenvalues, shape: torch.Size) -> None:
        self.matrices = attention.reshape(-1, *attention.shape[-2:])
        self.matrix_of = _indices(attention.shape[:-2], shape, attention.device)
        self.spectra = Eigenvalues(*(field.reshape(-1, field.shape[-1]) for field in weight))
        self.spectrum_of = _indices(weight.values.shape[:-1], shape, attention.device)
        # So many at once that no step has more than CHUNK_ELEMENTS numbers, of matrices or of pairs of eigenvalues.
        tokens, width = attention.shape[-1], weight.values.shape[-1]
        self.at_once = max(1, CHUNK_ELEMENTS // (tokens * max(tokens, width)))
        margin = torch.full(self.matrix_of.shape, math.nan, dtype=torch.float64, device=attention.device)
        self.result = Dominance(torch.full_like(margin, Verdict.CLOSE, dtype=torch.int8), margin, margin.clone())

    def decide(self, method: Callable[[Tensor, Eigenvalues], Dominance]) -> None:
        """Apply `method` to the attention and spec(H) of every case that is still open."""
        left = (self.result.verdict == Verdict.CLOSE).nonzero()[:, 0]
        for index in left.split(self.at_once) if len(left) else ():
            attention = self.matrices[self.matrix_of[index]]
            found = method(attention, Eigenvalues(*(field[self.spectrum_of[index]] for field in self.spectra)))
            is_invalid = ~attention_is_stochastic(attention)
            self.result.verdict[index] = found.verdict.masked_fill(is_invalid, Verdict.INVALID)
            self.result.margin[index], self.result.error[index] = found.margin, found.error


def _square(name: str, matrix: Tensor) -> Tensor:
    matrix = checks.matrices("dominance", name, matrix, square=True)
    if matrix.shape[-1] == 0:
        raise ValueError(f"dominance: {name}: got shape {list(matrix.shape)}, wanted at least one row")
    return matrix


def _indices(own: torch.Size, shape: torch.Size, device: torch.device) -> Tensor:
    """Which of the own matrices each case of the broadcast shape has."""
    return torch.arange(math.prod(own), device=device).reshape(own).expand(shape).flatten()


def _from_diagonal(attention: Tensor, weight: Eigenvalues) -> Dominance:
    return eigenvalue_dominance(causal_eigenvalues(attention), weight)


def _from_eigenvalues(attention: Tensor, weight: Eigenvalues, backend: str | None) -> Dominance:
    reach = enclosing_disk(attention, max(SQUARINGS)).reach
    return eigenvalue_dominance(eigenvalues(attention, backend=backend), weight, radius=reach)


class Disk(NamedTuple):
    """Where all eigenvalues of A but the Perron one lie; float64, one of each per matrix."""

    centre: Tensor  # their mean, c
    radius: Tensor
    reach: Tensor  # none of them is further from zero
    variance: Tensor  # the mean of (z − c)², which may be negative: z is complex
    centre_error: Tensor
    variance_error: Tensor


def enclosing_disk(attention: Tensor, squarings: int) -> Disk:
    """The disk of matrices [M, N, N], N ≥ 2, whose rows sum to one."""
    n, eps = attention.shape[-1], torch.finfo(attention.dtype).eps
    # Half types are computed in float32, and float32 in float64 where torch may take shortcuts in its products.
    is_exact = torch.get_float32_matmul_precision() == "highest"
    work = attention.to(torch.promote_types(attention.dtype, torch.float32 if is_exact else torch.float64))
    step = torch.finfo(work.dtype).eps
    trace = work.diagonal(dim1=-2, dim2=-1).double().sum(-1)
    centre = (trace - 1) / (n - 1)

    shifted = work - centre.to(work.dtype)[:, None, None] * torch.eye(n, dtype=work.dtype, device=work.device)
    power = shifted - shifted.mean(-2, keepdim=True)
    entries = _norm(work)
    error = eps * entries + (n + 4) * step * (entries + centre.abs() * math.sqrt(n))
    size = _norm(power)
    radius = size + error
    variance, variance_error = torch.zeros_like(radius), radius.square()
    for k in range(1, squarings + 1):
        # (P + E)² is off by PE + EP + E², and a product of n × n matrices by nε of its factors' norms.
        power, error = power @ power, error * (2 * size + error) + n * step * size.square()
        size = _norm(power)
        radius = torch.minimum(radius, (size + error) ** (0.5**k))
        if k == 1:
            variance = power.diagonal(dim1=-2, dim2=-1).double().sum(-1) / (n - 1)
            variance_error = math.sqrt(n) * error / (n - 1)
    centre_error = (eps + (n + 2) * torch.finfo(torch.float64).eps) * (trace + 1) / (n - 1)
    rows = work.abs().sum(-1).amax(-1).double() * (1 + n * step)  # one, unless entries are negative
    reach = torch.minimum(centre.abs() + radius, rows)
    return Disk(centre, radius, reach, variance, centre_error, variance_error)


def _norm(matrices: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrices, dim=(-2, -1), dtype=torch.float64)


def _from_disk(attention: Tensor, weight: Eigenvalues, squarings: int) -> Dominance:
    """PERRON or OTHER where the disk tells, otherwise CLOSE."""
    h, h_error = weight  # [M, d]
    disk = enclosing_disk(attention, squarings)
    lower, upper = _largest_gain(disk, h)
    spread = h_error * disk.reach[:, None] + _rounding(h)
    perron = (1 + h).abs()
    low = (perron - h_error).amax(-1) - (upper + spread).amax(-1)
    high = (perron + h_error).amax(-1) - (lower - spread).amax(-1)
    verdict = torch.full_like(low, Verdict.CLOSE, dtype=torch.int8)
    verdict = verdict.masked_fill(low > 0, Verdict.PERRON).masked_fill(high < 0, Verdict.OTHER)
    return Dominance(verdict, (low + high) / 2, (high - low) / 2)


def _largest_gain(disk: Disk, h: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of max_i |1 + λ z_i| for each λ of h [M, d]."""
    centre, radius, reach, variance, centre_error, variance_error = (field[:, None] for field in disk)
    length, at_centre = h.abs(), 1 + h * centre
    upper = torch.minimum(at_centre.abs() + length * radius, 1 + length * reach)
    mean_square = (at_centre.square() + h.square() * variance).abs()
    doubt = 2 * at_centre.abs() * length * centre_error + length.square() * variance_error
    from_square = (mean_square - doubt).clamp(min=0).sqrt()
    return torch.maximum(at_centre.abs() - length * centre_error, from_square), upper


def _rounding(h: Tensor) -> Tensor:
    """Of the bounds' own arithmetic in float64."""
    return 8 * torch.finfo(torch.float64).eps * (1 + h.abs())
