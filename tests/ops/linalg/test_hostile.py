"""The solvers on matrices of hostile scales: solved to LAPACK's standard or told by info, nothing in between."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from support import gallery, hostile
from torch import Tensor

import overtone as ot
from overtone import linalg

pytestmark = pytest.mark.usefixtures("cpu_kernels")

DTYPES = (torch.float32, torch.float64)
BACKENDS = ("cpu", "reference")
RATIO = 10  # errors in units of n·‖A‖·ε, as in LAPACK's own test programs, which accept 20 to 50
SIZES = (0, 1, 2, 3, 5, 8, 16, 17, 33)
# Sizes at which a matrix alone goes to LAPACK, at any level, with eigenvectors or without.
LARGE_SIZES = (46, 71, 113)

Solver = Callable[..., tuple[Tensor, ...]]


def times_power_of_two(x: Tensor, exponent: Tensor) -> Tensor:
    """x 2^exponent in float64 (complex128), in steps that neither overflow nor vanish before the whole does."""
    x = x.to(torch.complex128) if x.is_complex() else x.double()
    half = exponent // 2
    for part in (half // 2, half - half // 2, (exponent - half) // 2, (exponent - half) - (exponent - half) // 2):
        x = x * torch.tensor([2.0**k for k in part.flatten().tolist()], dtype=torch.float64).reshape(part.shape)
    return x


class AtSizeOne:
    """Matrices in float64, scaled (or their columns) by powers of two to about one, so that no check overflows."""

    def __init__(self, a: Tensor, dims: tuple[int, ...] = (-2, -1)):
        self.dtype, self.rows, self.columns = a.dtype, *a.shape[-2:]
        largest = a.double().abs().amax(dims, keepdim=True)
        self.exponent = torch.where(largest > 0, torch.frexp(largest).exponent, 0)
        self.a = times_power_of_two(a, -self.exponent)
        info = torch.finfo(a.dtype)
        smallest = torch.tensor(info.tiny * info.eps, dtype=torch.float64)
        # What rounding to a multiple of the smallest number there is makes of a complex number, at most.
        self.floor = times_power_of_two(smallest.expand(self.exponent.shape), -self.exponent)
        largest = torch.tensor(info.max, dtype=torch.float64)
        self.largest = times_power_of_two(largest.expand(self.exponent.shape), -self.exponent)

    def scaled(self, result: Tensor) -> Tensor:
        exponent = self.exponent if result.dim() == self.a.dim() else self.exponent[..., 0]
        return times_power_of_two(result, -exponent)

    def unit(self) -> float:
        return max(self.rows, self.columns) * torch.finfo(self.dtype).eps


def norms(a: Tensor) -> Tensor:
    size = torch.linalg.matrix_norm(a, 1)
    return torch.where(size > 0, size, 1)


def parts(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def assert_told(names: list[str], results: tuple[Tensor, ...], overflows: Tensor) -> Tensor:
    """Finite where info is 0; elsewhere NaN, and only where the true result is beyond the largest number."""
    *outputs, info = results
    for name, code, *members, excuse in zip(names, info.tolist(), *outputs, overflows.tolist(), strict=True):
        if code == 0:
            assert all(parts(member).isfinite().all() for member in members), f"{name}: info 0, but not finite"
        else:
            assert all(member.isnan().all() for member in members), f"{name}: info {code}, but not NaN"
            assert excuse, f"{name}: info {code}, though the result is representable"
    return info == 0


def assert_ratio(names: list[str], ratio: Tensor, solved: Tensor, what: str) -> None:
    bad = {name: r for name, r, ok in zip(names, ratio.tolist(), solved.tolist(), strict=True) if ok and not r <= RATIO}
    assert not bad, f"{what}: {bad}"


def check_eigh(names: list[str], a: Tensor, solve: Solver, solve_values: Solver) -> None:
    scale, results = AtSizeOne(a), solve(a)
    truth = torch.linalg.eigvalsh(scale.a).abs().amax(-1)
    solved = assert_told(names, results, truth >= 0.99 * scale.largest[:, 0, 0])
    values, vectors = scale.scaled(results[0]), results[1].double()
    floor = scale.a.shape[-1] * scale.floor[:, 0, 0]
    residual = torch.linalg.matrix_norm(scale.a @ vectors - vectors * values[:, None, :], 1) - floor
    assert_ratio(names, residual / (norms(scale.a) * scale.unit()), solved, "eigh, residual")
    loss = torch.linalg.matrix_norm(vectors.mT @ vectors - torch.eye(a.shape[-1]), 1)
    assert_ratio(names, loss / scale.unit(), solved, "eigh, orthogonality")
    alone = solve_values(a)
    assert_told(names, alone, ~solved)
    difference = (scale.scaled(alone[0]) - values).abs().amax(-1) - floor
    assert_ratio(names, difference / (norms(scale.a) * scale.unit()), solved, "eigvalsh")


def eigenvalues_overflow(scale: AtSizeOne) -> Tensor:
    """Those of matrices that are not normal are only as near to the truth as their conditions allow."""
    truth = torch.view_as_real(linalg.eigvals(scale.a, backend="reference")).abs().amax((-2, -1))
    return truth >= 0.5 * scale.largest[:, 0, 0]


def check_eig(names: list[str], a: Tensor, solve: Solver) -> None:
    scale, results = AtSizeOne(a), solve(a)
    solved = assert_told(names, results, eigenvalues_overflow(scale))
    values, vectors = scale.scaled(results[0]), results[1].to(torch.complex128)
    error = scale.a.to(vectors.dtype) @ vectors - vectors * values[:, None, :]
    residual = torch.linalg.vector_norm(error, dim=-2).amax(-1) - 2 * scale.floor[:, 0, 0]
    assert_ratio(names, residual / (norms(scale.a) * scale.unit()), solved, "eig, residual")
    length = (torch.linalg.vector_norm(vectors, dim=-2) - 1).abs().amax(-1)
    assert_ratio(names, length / scale.unit(), solved, "eig, length")


def check_eigvals(names: list[str], a: Tensor, solve: Solver) -> None:
    scale, results = AtSizeOne(a), solve(a)
    solved = assert_told(names, results, eigenvalues_overflow(scale))
    values = torch.where(solved[:, None], scale.scaled(results[0]), 0)
    shifted = scale.a[:, None] - values[:, :, None, None] * torch.eye(a.shape[-1])
    backward = torch.linalg.svdvals(shifted)[..., -1].amax(-1) - 2 * scale.floor[:, 0, 0]
    assert_ratio(names, backward / (norms(scale.a) * scale.unit()), solved, "eigvals, backward error")


def check_qr(names: list[str], a: Tensor, solve: Solver) -> None:
    """Column by column: Householder's QR keeps the digits of small columns beside large ones."""
    scale, results = AtSizeOne(a, (-2,)), solve(a)
    truth = torch.linalg.qr(scale.a).R.abs()
    solved = assert_told(names, results, (truth >= 0.99 * scale.largest).flatten(1).any(-1))
    q, r = results[0].double(), scale.scaled(results[1])
    size = torch.linalg.vector_norm(scale.a, dim=-2)
    residual = torch.linalg.vector_norm(scale.a - q @ r, dim=-2) - a.shape[-2] * scale.floor[:, 0]
    ratio = (residual / (torch.where(size > 0, size, 1) * scale.unit())).amax(-1)
    assert_ratio(names, ratio, solved, "qr, residual of a column")
    loss = torch.linalg.matrix_norm(q.mT @ q - torch.eye(q.shape[-1], dtype=torch.float64))
    assert_ratio(names, loss / scale.unit(), solved, "qr, orthogonality")
    assert (results[1][solved].diagonal(dim1=-2, dim2=-1) >= 0).all()


def one_by_one(solve: Solver) -> Solver:
    """Each matrix in a call of its own: the way through LAPACK, where it is large."""
    return lambda a: tuple(torch.cat(part) for part in zip(*(solve(matrix[None]) for matrix in a), strict=True))


def check_all(n: int, dtype: torch.dtype, backend: str, alone: bool = False, seed: int = 0) -> None:
    def solver(function: Callable) -> Solver:
        solve = lambda a: tuple(function(a, backend=backend))  # noqa: E731
        return one_by_one(solve) if alone else solve

    names, a = hostile.batch(n, n, dtype, seed)
    if n > 0:
        check_eigh(names, gallery.symmetrized(a), solver(linalg.eigh_ex), solver(linalg.eigvalsh_ex))
        check_eig(names, a, solver(linalg.eig_ex))
        check_eigvals(names, a, solver(linalg.eigvals_ex))
    for rows, columns in ((n, n), (n + 5, n), (n, n + 3)):
        if rows > 0 and columns > 0:
            check_qr(*hostile.batch(rows, columns, dtype, seed), solver(linalg.qr_ex))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
class TestEveryMemberIsSolvedOrTold:
    @pytest.mark.parametrize("n", SIZES)
    def test_batch(self, n, dtype, backend):
        check_all(n, dtype, backend)

    @pytest.mark.parametrize("n", [LARGE_SIZES[0]])
    def test_alone(self, n, dtype, backend):
        check_all(n, dtype, backend, alone=True)

    @pytest.mark.slow
    @pytest.mark.parametrize("n", LARGE_SIZES[1:])
    def test_larger_alone(self, n, dtype, backend):
        check_all(n, dtype, backend, alone=True, seed=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [3, 18])
def test_every_level(n, dtype, isa_level):
    check_all(n, dtype, "cpu", seed=2)


SOLVERS = {
    "eigh": lambda a: linalg.eigh_ex(gallery.symmetrized(a), backend="cpu"),
    "eigvalsh": lambda a: linalg.eigvalsh_ex(gallery.symmetrized(a), backend="cpu"),
    "eig": lambda a: linalg.eig_ex(a, backend="cpu"),
    "eigvals": lambda a: linalg.eigvals_ex(a, backend="cpu"),
    "qr": lambda a: linalg.qr_ex(a, backend="cpu"),
}


def bits(x: Tensor) -> Tensor:
    return parts(x).contiguous().view(torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [4, 21, 46])
@pytest.mark.parametrize("solver", SOLVERS)
def test_neighbours_of_any_scale_change_no_bit(solver, n, dtype):
    """Neither do bad ones: every member beside the others is what it is beside NaN, the ordinary one beside itself."""
    solve = SOLVERS[solver]
    names, a = hostile.batch(n, n, dtype)
    together = solve(a)
    for first in (0, 1):
        spoiled = a.clone()
        spoiled[first::2] = math.nan
        for now, before in zip(solve(spoiled), together, strict=True):
            assert torch.equal(bits(now[1 - first :: 2]), bits(before[1 - first :: 2]))
    ordinary = names.index("ordinary")
    for now, before in zip(solve(a[ordinary].expand_as(a)), together, strict=True):
        assert torch.equal(bits(now[0]), bits(before[ordinary]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("n", [2, 9, 30, 64, 120])
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_power_of_two_is_undone_exactly(solver, n, count, dtype):
    """Far up and down: vectors have the same bits, and values (or R) are those times the power."""
    a = torch.randn(count, n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(dtype)
    a = (a * 2**16).round() * 2**-16  # no digit is lost at the lower end
    first, *rest = SOLVERS[solver](a)
    for exponent in (-100, 110) if dtype == torch.float32 else (-960, 1000):
        now, *others = SOLVERS[solver](a * 2.0**exponent)
        if solver == "qr":  # the scaled result is the second
            assert torch.equal(now, first) and torch.equal(others[0], rest[0] * 2.0**exponent)
            continue
        assert torch.equal(parts(now), parts(first) * 2.0**exponent)
        assert all(torch.equal(mine, wanted) for mine, wanted in zip(others, rest, strict=True))


LOSSES = {
    "eigvalsh": (linalg.eigvalsh_ex, lambda r, w: (r.eigenvalues * w[0]).sum()),
    "eigh": (linalg.eigh_ex, lambda r, w: (r.eigenvectors.square() * w).sum()),
    "eigvals": (linalg.eigvals_ex, lambda r, w: (r.eigenvalues.real * 2 + r.eigenvalues.imag.abs()).sum()),
    "eig": (linalg.eig_ex, lambda r, w: (torch.view_as_real(r.eigenvectors).square().sum(-1) * w).sum()),
    "qr": (linalg.qr_ex, lambda r, w: (r.R * w).sum() + (r.Q * w).sum()),
    "R": (linalg.qr_ex, lambda r, w: (r.R * w).sum()),
}


@pytest.mark.parametrize("n", [1, 2, 6, 17, 45])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_finite_where_the_truth_is(name, n):
    """The truth is float64's, where these numbers are ordinary. A gradient that is refused is not compared."""
    function, loss = LOSSES[name]
    names, a = hostile.batch(n, n, torch.float32)
    a = gallery.symmetrized(a) if "h" in name else a
    weight = torch.randn(n, n, generator=torch.Generator().manual_seed(0))

    def gradient(matrix: Tensor) -> Tensor | None:
        leaf = matrix.clone().requires_grad_()
        result = function(leaf, backend="cpu")
        if result.info.any():
            return None
        try:
            return torch.autograd.grad(loss(result, weight.to(matrix.dtype)), leaf)[0]
        except (torch.linalg.LinAlgError, RuntimeError) as refusal:
            assert any(word in str(refusal) for word in ("numerically equal", "defective", "linearly dependent"))
            return None

    compared = 0
    for member, matrix in zip(names, a, strict=True):
        ours, truth = gradient(matrix), gradient(matrix.double())
        # Partial sums of n terms may be that much larger than their sum.
        if ours is not None and truth is not None and truth.abs().max() < torch.finfo(torch.float32).max / (8 * n):
            compared += 1
            assert ours.isfinite().all(), member
    assert compared > 5


def run_alone(code: str, **environment: str) -> str:
    """In a process of its own, which may die."""
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, (result.returncode, result.stderr[-2000:])
    return result.stdout


def test_what_lapack_gives_up_on_corrupts_no_memory():
    """Memory that is handed out again is full of a pattern, which LAPACK leaves where it found no eigenvalues."""
    code = """
import torch, overtone as ot
for backend in ("cpu", "reference"):
    for n in 5 * (64, 65, 67):  # with an odd number of eigenvalues the last seems to begin a pair
        blocks = torch.full((n, n), 1e-150, dtype=torch.float64)
        blocks[: n // 2] = 1e150
        d = torch.logspace(0, -100, n, dtype=torch.float64)
        uniform = torch.full((n, n), 1 / n, dtype=torch.float64)
        noise = torch.randn(n, n, dtype=torch.float64)
        for a in (blocks * (1 + noise), noise * d[:, None] * d, uniform):
            values, vectors, info = ot.linalg.eig_ex(a, backend=backend)
            assert info == 0 and vectors.isfinite().all()
print("solved")
"""
    assert run_alone(code, MALLOC_PERTURB_="165").endswith("solved\n")


@pytest.mark.parametrize("n", [1 << 24, 1 << 31])
def test_absurd_sizes_are_out_of_memory(n):
    """The numbers of elements, of operations and of bytes are beyond all integers, or one of them is."""
    a = torch.ones(1).expand(n, n)
    for op, solve in (
        ("eig", lambda: linalg.eigvals(a, row_stochastic=True)), ("eig", lambda: linalg.eigvals(a)),
        ("eig", lambda: linalg.eig(a)), ("eigh", lambda: linalg.eigh(a)), ("eigh", lambda: linalg.eigvalsh(a)),
        ("qr", lambda: linalg.qr(a)), ("qr", lambda: linalg.qr(a, "r")),
        ("qr", lambda: linalg.qr(a[:, :1], "complete")),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"^{op}: out of memory: could not allocate "):
            solve()


def test_no_memory_is_no_info():
    """Whatever allocation fails, LAPACK's own too: an error or the result, never a matrix that could not be solved."""
    code = """
import resource, torch, overtone as ot
torch.set_num_threads(1)
a = torch.randn(1, 700, 700)
a = a + a.mT
for solve in (ot.linalg.eigh_ex, ot.linalg.eigvalsh_ex, ot.linalg.eigvals_ex):
    solve(a[:, :90, :90])
    for limit in range(0, 20, 2):
        used = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize"))) << 10
        resource.setrlimit(resource.RLIMIT_AS, (used + limit * 700 * 700 * 4, resource.RLIM_INFINITY))
        try:
            outcome = int(solve(a).info)
        except RuntimeError as error:
            assert ": out of memory" in str(error), error
            outcome = "no memory"
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(outcome)
"""
    outcomes = run_alone(code, OMP_NUM_THREADS="1").split("\n")[:-1]
    assert set(outcomes) <= {"0", "no memory"} and "no memory" in outcomes


def test_a_gradient_of_scalars_is_refused():
    one = torch.tensor(1.0)
    with pytest.raises(RuntimeError, match=r"eigh_backward: eigenvectors: got \[\], wanted 2 dimensions or more"):
        torch.ops.overtone.eigh_backward(None, None, one, one, torch.tensor(0, dtype=torch.int32))


def test_small_columns_beside_large_ones():
    q, r = ot.linalg.qr(torch.tensor([[1e30, 1e-20]]), backend="cpu")
    assert q.tolist() == [[1.0]] and torch.equal(r, torch.tensor([[1e30, 1e-20]]))
