"""reference.linalg: LAPACK's error ratios, closed forms, bad members, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

from overtone.reference import linalg

REALS = (torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
HALVES = (torch.bfloat16, torch.float16)
RATIO = 10  # residuals in units of n·‖A‖·ε, as in LAPACK's own test programs, which accept 20 to 50


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def residual_ratio(residual: torch.Tensor, size: torch.Tensor | float, n: int) -> float:
    eps = torch.finfo(residual.dtype).eps
    return float((torch.linalg.matrix_norm(residual) / size).max()) / (n * eps)


@pytest.mark.parametrize("dtype", REALS + COMPLEX)
@pytest.mark.parametrize("uplo", ["L", "U"])
def test_eigh(dtype, uplo):
    a = randn(2, 3, 6, 6, dtype=dtype)
    hermitian = a + a.mH
    other_triangle = torch.full_like(hermitian, math.nan)
    read = hermitian.tril() + other_triangle.triu(1) if uplo == "L" else hermitian.triu() + other_triangle.tril(-1)
    result = linalg.eigh(read, uplo)
    values, vectors = result.eigenvalues, result.eigenvectors
    size = torch.linalg.matrix_norm(hermitian)
    assert residual_ratio(hermitian @ vectors - vectors * values[..., None, :], size, 6) <= RATIO
    assert residual_ratio(vectors.mH @ vectors - torch.eye(6, dtype=dtype), 1.0, 6) <= RATIO
    assert (values.diff(dim=-1) >= 0).all() and not values.is_complex()
    torch.testing.assert_close(linalg.eigvalsh(read, uplo), values)


def test_eigh_of_the_second_difference():
    """Eigenvalues 2 − 2 cos(πk/(n + 1))."""
    n = 12
    a = 2 * torch.eye(n) - torch.diag(torch.ones(n - 1), 1) - torch.diag(torch.ones(n - 1), -1)
    wanted = torch.tensor([2 - 2 * math.cos(math.pi * k / (n + 1)) for k in range(1, n + 1)])
    torch.testing.assert_close(linalg.eigh(a).eigenvalues, wanted)


@pytest.mark.parametrize("dtype", REALS + COMPLEX)
def test_eig(dtype):
    a = randn(2, 3, 6, 6, dtype=dtype)
    values, vectors = linalg.eig(a)
    residual = a.to(vectors.dtype) @ vectors - vectors * values[..., None, :]
    assert residual_ratio(residual, torch.linalg.matrix_norm(a), 6) <= RATIO
    torch.testing.assert_close(vectors.norm(dim=-2), torch.ones(2, 3, 6, dtype=values.real.dtype))
    assert_same_set(linalg.eigvals(a)[0, 0], values[0, 0], 1e-4 if values.dtype == torch.complex64 else 1e-12)


def assert_same_set(values: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    """Every wanted eigenvalue takes the nearest one left."""
    left = values.to(torch.complex128).tolist()
    for value in wanted.to(torch.complex128).tolist():
        nearest = min(left, key=lambda z: abs(z - value))
        assert abs(nearest - value) <= tolerance, f"{value} is missing among {left}"
        left.remove(nearest)
    assert not left


class TestAttentionSpectra:
    """MATH §7: matrices of attention whose eigenvalues are known."""

    # 64, 65 and 130: LAPACK's own solver gives up on many such sizes
    @pytest.mark.parametrize("n", [2, 3, 17, 64, 65, 130, 197])
    @pytest.mark.parametrize("dtype", REALS)
    def test_uniform(self, n, dtype):
        values = linalg.eigvals(torch.full((n, n), 1 / n, dtype=dtype))
        wanted = torch.tensor([1.0] + [0.0] * (n - 1))
        assert_same_set(values, wanted, n * torch.finfo(dtype).eps)

    @pytest.mark.parametrize("n", [3, 48, 64, 65])
    def test_every_row_the_same(self, n):
        row = randn(n).softmax(0)
        assert_same_set(linalg.eigvals(row.expand(n, n)), torch.tensor([1.0] + [0.0] * (n - 1)), 1e-12)

    def test_causal(self):
        a = randn(9, 9).masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf).softmax(-1)
        assert_same_set(linalg.eigvals(a), a.diagonal(), 1e-13)

    @pytest.mark.parametrize("n", [4, 7])
    def test_circulant(self, n):
        row = randn(n).softmax(0)
        a = torch.stack([row.roll(i) for i in range(n)])
        assert_same_set(linalg.eigvals(a), torch.fft.fft(row), 1e-13)

    def test_permutation(self):
        a = torch.eye(6, dtype=torch.float64)[[1, 2, 0, 4, 3, 5]]  # cycles of length 3, 2 and 1
        cube = torch.polar(torch.ones(3, dtype=torch.float64), torch.arange(3).double() * 2 * math.pi / 3)
        assert_same_set(linalg.eigvals(a), torch.cat([cube, torch.tensor([1.0, -1.0, 1.0])]), 1e-13)

    def test_mixture_of_identity_and_uniform(self):
        n, e = 8, 0.3
        a = (1 - e) * torch.eye(n, dtype=torch.float64) + e / n
        assert_same_set(linalg.eigvals(a), torch.tensor([1.0] + [1 - e] * (n - 1), dtype=torch.float64), 1e-13)

    def test_one_hot_rows_are_cycles_and_zeros(self):
        """0 ↔ 1, and a chain 4 → 3 → 2 → 0: a Jordan block of size three at zero, so its error is about ε^(1/3)."""
        a = torch.eye(5, dtype=torch.float64)[[1, 0, 0, 2, 3]]
        assert_same_set(linalg.eigvals(a), torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0]), 2.3e-16 ** (1 / 3))


@pytest.mark.parametrize("dtype", REALS + COMPLEX)
@pytest.mark.parametrize("rows, columns", [(5, 5), (8, 3), (3, 8), (1, 4), (4, 1)])
@pytest.mark.parametrize("mode", ["reduced", "complete"])
def test_qr(dtype, rows, columns, mode):
    a = randn(2, 3, rows, columns, dtype=dtype)
    q, r = linalg.qr(a, mode)
    inner = rows if mode == "complete" else min(rows, columns)
    assert q.shape == (2, 3, rows, inner) and r.shape == (2, 3, inner, columns)
    n = max(rows, columns)
    assert residual_ratio(q @ r - a, torch.linalg.matrix_norm(a), n) <= RATIO
    assert residual_ratio(q.mH @ q - torch.eye(inner, dtype=dtype), 1.0, n) <= RATIO
    assert (r.tril(-1) == 0).all()
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    assert (diagonal.real > 0).all() and (not diagonal.is_complex() or (diagonal.imag.abs() < 1e-6).all())


def test_qr_is_cholesky():
    """R is the Cholesky factor of AᵀA: unique because diag R > 0."""
    a = randn(7, 4)
    torch.testing.assert_close(linalg.qr(a).R, torch.linalg.cholesky(a.T @ a).T)


@pytest.mark.parametrize("a", [torch.zeros(4, 3), torch.ones(4, 3), torch.eye(4)[:, [0, 0, 2]], -torch.eye(3)])
def test_qr_of_any_rank_is_orthonormal(a):
    q, r = linalg.qr(a.double())
    torch.testing.assert_close(q.T @ q, torch.eye(q.shape[1], dtype=torch.float64))
    torch.testing.assert_close(q @ r, a.double())
    assert (r.diagonal() >= 0).all()


def test_qr_mode_is_checked():
    with pytest.raises(ValueError, match="qr: mode: got 'q', wanted 'reduced', 'complete' or 'r'"):
        linalg.qr(torch.eye(2), "q")


EX = [linalg.eigh_ex, linalg.eigvalsh_ex, linalg.eig_ex, linalg.eigvals_ex, linalg.qr_ex]
PLAIN = [linalg.eigh, linalg.eigvalsh, linalg.eig, linalg.eigvals, linalg.qr]


@pytest.mark.parametrize("ex, plain", list(zip(EX, PLAIN, strict=True)))
class TestMembers:
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_bad_member_hurts_nobody_else(self, ex, plain, bad):
        a = randn(2, 3, 4, 4)
        a = a + a.mT
        good = ex(a)
        a[1, 2, 3, 0] = a[1, 2, 0, 3] = bad
        *results, info = ex(a)
        assert info.dtype == torch.int32 and info.shape == (2, 3) and info.sum() == 1 and info[1, 2] == 1
        for result, wanted in zip(results, good[:-1], strict=True):
            assert result[1, 2].isnan().all()
            assert torch.equal(result[info == 0], wanted[info == 0])
        with pytest.raises(torch.linalg.LinAlgError, match=rf"{plain.__name__}: A: matrix \(1, 2\) is not finite"):
            plain(a)

    def test_a_member_that_does_not_converge_is_found(self, ex, plain, monkeypatch):
        """The solver refuses one matrix (and, as LAPACK does, every batch that holds it)."""
        name = plain.__name__
        solver, calls = getattr(torch.linalg, name), []

        def stubborn(a, *args):
            calls.append(a.shape)
            if (a.diagonal(dim1=-2, dim2=-1).sum(-1) > 1e3).any():
                raise torch.linalg.LinAlgError("does not converge")
            return solver(a, *args)

        monkeypatch.setattr(torch.linalg, name, stubborn)
        a = randn(3, 4, 4)
        good = ex(a)
        a[1] *= 1e6
        a[1].diagonal().abs_()
        calls.clear()
        *results, info = ex(a)
        assert info.tolist() == [0, 1, 0] and len(calls) > 1
        for result, wanted in zip(results, good[:-1], strict=True):
            assert result[1].isnan().all()
            torch.testing.assert_close(result[[0, 2]], wanted[[0, 2]])

    @pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 0), (1, 1), (5, 1, 1)])
    def test_empty_and_single(self, ex, plain, shape):
        *results, info = ex(randn(*shape))
        assert info.shape == shape[:-2] and not info.any()
        assert all(result.shape in (shape, shape[:-1]) for result in results)

    @pytest.mark.parametrize(
        "a", [torch.zeros(3, 3), torch.eye(3), torch.ones(3, 3), torch.full((3, 3), 1e-310, dtype=torch.float64)]
    )
    def test_degenerate_matrices(self, ex, plain, a):
        assert not ex(a).info.any()

    @pytest.mark.parametrize("dtype", HALVES)
    def test_half_types_are_solved_in_float32(self, ex, plain, dtype):
        a = randn(4, 4).to(dtype)
        for half, single in zip(ex(a), ex(a.float()), strict=True):
            assert half.dtype == single.dtype and torch.equal(half, single)

    def test_strides_do_not_matter(self, ex, plain):
        a = randn(4, 4, 3)
        for strided, packed in zip(ex(a.permute(2, 1, 0)), ex(a.permute(2, 1, 0).contiguous()), strict=True):
            torch.testing.assert_close(strided, packed)


class TestGradients:
    def test_eigh(self):
        a = randn(2, 4, 4).requires_grad_()
        assert gradcheck(lambda a: linalg.eigvalsh(a + a.mT), (a,))
        assert gradcheck(lambda a: linalg.eigh(a + a.mT).eigenvectors.square(), (a,))  # free of the vectors' signs

    def test_eigenvalues_need_no_gap(self):
        a = torch.eye(4, dtype=torch.float64, requires_grad=True)
        linalg.eigvalsh(a).sum().backward()
        assert torch.equal(a.grad, torch.eye(4, dtype=torch.float64))

    def test_eig(self):
        a = randn(2, 4, 4).requires_grad_()
        assert gradcheck(lambda a: linalg.eigvals(a).abs().sort(-1).values, (a,))
        assert gradcheck(lambda a: linalg.eig(a).eigenvectors.abs().square().sum(-1), (a,))

    @pytest.mark.parametrize("rows, columns", [(4, 4), (6, 3), (3, 5)])
    def test_qr(self, rows, columns):
        a = randn(2, rows, columns).requires_grad_()
        assert gradcheck(lambda a: tuple(linalg.qr(a)), (a,))

    @pytest.mark.parametrize("ex", EX)
    def test_a_bad_member_gets_no_gradient_and_spoils_none(self, ex):
        a = randn(2, 3, 3)
        a = (a + a.mT).detach()
        a[1] = math.nan
        a.requires_grad_()
        result = ex(a)[0][0]
        result.abs().square().sum().backward()
        assert a.grad.isfinite().all() and (a.grad[1] == 0).all()
