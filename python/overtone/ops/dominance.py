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
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from overtone import _validate as validate
from overtone._precision import autocast_disabled, products_are_short
from overtone.backends import select
from overtone.reference.dominance import (
    Dominance,
    Verdict,
    attention_is_stochastic,
    causal_eigenvalues,
    certified,
    deviation,
    eigenvalue_dominance,
    gain,
    gain_rounding,
    invalidated,
    matrix_eigenvalues,
    other_eigenvalues,
    underflow,
)
from overtone.reference.enclosures import (
    EPS,
    Eigenvalues,
    Solver,
    frobenius,
    powers,
    reference_solver,
)

# How often D is squared: not at all is enough for smooth attention, such as that of untrained models; what is left gets
# a sharper disk, still far cheaper than eigenvectors.
SQUARINGS = (0, 2, 5)
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
        of `margin`, for every H that rounds to what was given, and every row-stochastic A whose entries are off by a
        relative ε/2 at most, as if rounded: or by more, where the sums of rows are, so that the matrix with each row
        divided by its sum is always one of them. It is decided if zero is not within the error. A case that bounds
        decide keeps their width as its error: ask `ot.linalg.eigvals` for sharper margins. Undecided cases say why:
        see `Verdict`; of invalid ones the margin is nan and the error infinite. One token: Perron, by an infinite
        margin. Not differentiable.
    """
    attention = _square("attention", attention)
    spectrum = weight if isinstance(weight, Eigenvalues) else eigenvalues(_square("weight", weight), backend=backend)
    is_causal = validate.flag("dominance", "is_causal", is_causal)
    if not attention.is_floating_point() or attention.device != spectrum.values.device:
        wanted = f"real numbers on {spectrum.values.device}, as weight"
        raise ValueError(f"dominance: attention: got {validate.describe(attention)}, wanted {wanted}")
    shape = torch.broadcast_shapes(attention.shape[:-2], spectrum.values.shape[:-1])
    cases = _Cases(attention, spectrum, shape, is_causal)
    with autocast_disabled(attention):
        if is_causal or attention.shape[-1] == 1:
            cases.decide(_from_diagonal)
        else:
            for squarings in SQUARINGS:
                cases.decide(partial(_from_disk, squarings=squarings))
            cases.decide(partial(_from_eigenvalues, backend=backend))
    return Dominance(*(field.reshape(shape) for field in cases.result))


@torch.no_grad()
def eigenvalues(matrix: Tensor, *, backend: str | None = None) -> Eigenvalues:
    """The eigenvalues of [..., n, n], computed in float64, and radii that hold for all matrices that round to it.

    Every eigenvalue is within `error` of one of the values, and within that of each value is one.
    """
    return matrix_eigenvalues(matrix, _solver(backend))


def _solver(backend: str | None) -> Solver:
    def solve(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if select("eig", backend, matrix) == "reference":
            return reference_solver(matrix)
        values, right, left, _ = torch.ops.overtone.eig_ex(matrix, False, True, True)
        return values, right, left

    return solve


class _Cases:
    """All pairs of A and spec(H), as one list, and what is known of them."""

    def __init__(self, attention: Tensor, weight: Eigenvalues, shape: torch.Size, is_causal: bool) -> None:
        self.is_causal = is_causal
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
            weight = Eigenvalues(*(field[self.spectrum_of[index]] for field in self.spectra))
            is_valid = attention_is_stochastic(attention, self.is_causal) & weight.values.isfinite().all(-1)
            for known, found in zip(self.result, invalidated(method(attention, weight), ~is_valid), strict=True):
                known[index] = found


def _square(name: str, matrix: Tensor) -> Tensor:
    matrix = validate.matrices("dominance", name, matrix, square=True)
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
    return eigenvalue_dominance(other_eigenvalues(attention, _solver(backend)), weight, radius=reach)


class Disk(NamedTuple):
    """Where all eigenvalues but the Perron one of all matrices within `deviation` of A lie; float64, one per matrix."""

    centre: Tensor  # of the disk, c
    radius: Tensor
    reach: Tensor  # none of them is further from zero
    variance: Tensor  # the mean of (z − c)², which may be negative: z is complex
    centre_error: Tensor  # how far their mean may be from c
    variance_error: Tensor


def enclosing_disk(attention: Tensor, squarings: int) -> Disk:
    """The disk of matrices [M, N, N], N ≥ 2, whose rows sum to one."""
    n = attention.shape[-1]
    # Half types are computed in float32, and float32 in float64 where torch may take shortcuts in its products.
    work = attention.to(torch.promote_types(attention.dtype, torch.float64 if products_are_short() else torch.float32))
    step, unknown, absolute = torch.finfo(work.dtype).eps, deviation(attention), n * underflow(attention.dtype)
    entries, rows = frobenius(work), work.abs().sum(-1, dtype=torch.float64).amax(-1) * (1 + n * EPS)
    diagonal = work.diagonal(dim1=-2, dim2=-1).double()
    centre = ((diagonal.sum(-1) - 1) / (n - 1)).to(work.dtype)
    # One more of the unknown: the Perron eigenvalue of A as it is given, where rows do not sum to one.
    centre_error = ((unknown + n * EPS) * (diagonal.abs().sum(-1) + 1) + absolute + 4 * EPS) / (n - 1)
    centre_error = centre_error + step * centre.abs().double()

    shifted = work - centre[:, None, None] * torch.eye(n, dtype=work.dtype, device=work.device)
    centre = centre.double()
    error = unknown * entries + (n + 4) * step * (entries + centre.abs() * math.sqrt(n)) + absolute
    first, *higher = islice(powers(shifted - shifted.mean(-2, keepdim=True), error), squarings + 1)
    radius = first.radius
    variance, variance_error = torch.zeros_like(radius), radius.square()
    if higher:
        square = higher[0].scale.square() / (n - 1)
        variance = higher[0].matrix.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64) * square
        sizes = higher[0].size + higher[0].error
        variance_error = math.sqrt(n) * (higher[0].error + (n + 8) * EPS * sizes) * square
    for power in higher:
        radius = torch.minimum(radius, power.radius)
    reach = torch.minimum(centre.abs() + radius, rows * (1 + unknown) + absolute)  # one, unless entries are negative
    return Disk(centre, radius, reach, variance, centre_error, variance_error)


def _from_disk(attention: Tensor, weight: Eigenvalues, squarings: int) -> Dominance:
    """PERRON or OTHER where the disk tells, otherwise CLOSE."""
    h, h_error = weight  # [M, d]
    disk = enclosing_disk(attention, squarings)
    lower, upper = _largest_gain(disk, h)
    perron, off = gain(h), h_error + gain_rounding(h, 1)
    spread = h_error * disk.reach[:, None] + gain_rounding(h, (disk.centre.abs() + disk.radius + disk.reach)[:, None])
    low = (perron - off).amax(-1) - (upper + spread).amax(-1)
    high = (perron + off).amax(-1) - (lower - spread).amax(-1)
    return certified(low, high, (low + high) / 2)


def _largest_gain(disk: Disk, h: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of max_i |1 + λ z_i| − 1 for each λ of h [M, d]."""
    centre, radius, reach, variance, centre_error, variance_error = (field[:, None] for field in disk)
    length, at_centre = h.abs(), gain(h * centre)
    upper = torch.minimum(at_centre + length * radius, length * reach)
    # The mean of (1 + λz)² is 1 + q, up to what is not known of the mean of z and of z².
    q = 2 * h * centre + h.square() * (centre.square() + variance)
    doubt = 2 * (1 + at_centre) * length * centre_error + length.square() * variance_error
    rounding = 32 * EPS * (length * centre.abs() + length.square() * (centre.square() + variance.abs()))
    mean_square = (gain(q) - doubt - rounding).clamp(min=-1)
    from_square = mean_square / (1 + (1 + mean_square).sqrt())
    from_square = from_square.masked_fill(~from_square.isfinite(), -math.inf)
    return torch.maximum(at_centre - length * centre_error, from_square), upper
