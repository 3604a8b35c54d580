"""eig and eigvals on the CPU kernels: LAPACK's error ratios over its matrix types, bad members, bits, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from support import compiling, general_gallery, repeat, shapes
from torch.autograd import gradcheck, gradgradcheck

import overtone as ot
from overtone import linalg

pytestmark = pytest.mark.usefixtures("cpu_kernels")

DTYPES = (torch.float32, torch.float64)
RATIO = 10  # errors in units of n·‖A‖·ε, as in LAPACK's own test programs, which accept 20 to 50


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def softmax(*shape, dtype=torch.float64, seed=0):
    return (2 * randn(*shape, seed=seed)).softmax(-1).to(dtype)


def in_float64(a, *results):
    """A and its eigenvalues in float64, scaled so that A's largest element is one."""
    size = a.double().abs().amax((-2, -1), keepdim=True)
    scale = torch.where(size > 0, size, 1)
    # By parts: complex division multiplies by the inverse, which of subnormal numbers is infinite.
    scaled = (torch.complex(x.real.double() / scale[..., 0], x.imag.double() / scale[..., 0]) for x in results)
    return a.double() / scale, *scaled


def backward_errors(a, values):
    """How far A must be changed to have that eigenvalue, [..., n]: σ_min(A − λ) in units of n·‖A‖·ε."""
    n, eps = a.shape[-1], torch.finfo(a.dtype).eps
    a, values = in_float64(a, values)
    shifted = a[..., None, :, :] - values[..., :, None, None] * torch.eye(n)
    size = torch.linalg.matrix_norm(a, 2)[..., None]
    return torch.linalg.svdvals(shifted)[..., -1] / (n * eps * torch.where(size > 0, size, 1))


def residuals(a, values, vectors):
    """‖A v − λ v‖ in units of n·‖A‖·ε, [..., n]."""
    n, eps = a.shape[-1], torch.finfo(a.dtype).eps
    a, values = in_float64(a, values)
    vectors = vectors.to(torch.complex128)
    error = torch.linalg.vector_norm(a.to(vectors.dtype) @ vectors - vectors * values[..., None, :], dim=-2)
    size = torch.linalg.matrix_norm(a, 1)[..., None]
    return error / (n * eps * torch.where(size > 0, size, 1))


def assert_ratios(ratios, names=None):
    worst = ratios.flatten(1).amax(1) if ratios.dim() > 1 else ratios
    failed = (~(worst <= RATIO)).nonzero().flatten().tolist()
    assert not failed, [(names[i] if names else i, float(worst[i])) for i in failed]


def assert_lengths(vectors):
    n = vectors.shape[-1]
    length = torch.linalg.vector_norm(vectors.to(torch.complex128), dim=-2)
    assert ((length - 1).abs() <= RATIO * n * torch.finfo(vectors.dtype).eps).all()


class TestRatios:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 50])
    def test_gallery(self, dtype, n):
        names, a = general_gallery.batch(n, dtype)
        assert_ratios(backward_errors(a, linalg.eigvals(a, backend="cpu")), names)
        values, vectors = linalg.eig(a, backend="cpu")
        assert_ratios(residuals(a, values, vectors), names)
        assert_lengths(vectors)

    @pytest.mark.parametrize("n", [6, 21])
    def test_gallery_at_every_level(self, n, isa_level, cpu_kernels):
        for dtype in DTYPES:
            names, a = general_gallery.batch(n, dtype)
            values, vectors = linalg.eig(a, backend="cpu")
            assert cpu_kernels.last_kernel() == f"eig/{isa_level}"
            assert_ratios(residuals(a, values, vectors), names)
            assert_ratios(backward_errors(a, linalg.eigvals(a, backend="cpu")), names)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("n", [64, 81])
    def test_large(self, dtype, n):
        """Eigenvectors prove the eigenvalues of eig; those of eigvals are judged by a sample."""
        names, a = general_gallery.batch(n, dtype)
        values, vectors = linalg.eig(a, backend="cpu")
        assert_ratios(residuals(a, values, vectors), names)
        assert_lengths(vectors)
        sample = linalg.eigvals(a, backend="cpu")[:, torch.linspace(0, n - 1, 3).long()]
        assert_ratios(backward_errors(a, sample), names)

    @pytest.mark.parametrize("n", [197, 384])
    def test_larger(self, n, cpu_kernels):
        generator = torch.Generator().manual_seed(0)
        names = [
            "19 random",
            "attention",
            "12 orthogonal basis, complex",
            "uniform attention",
            "causal attention",
            "skew",
        ]
        a = torch.stack([general_gallery.GALLERY[name](n, torch.float32, generator).float() for name in names])
        a = a.repeat(2, 1, 1)  # enough of them for a matrix per lane
        values, vectors = linalg.eig(a, backend="cpu")
        assert cpu_kernels.last_kernel() != "eig/lapack"
        assert_ratios(residuals(a, values, vectors))
        sample = linalg.eigvals(a, backend="cpu")[:5, torch.linspace(0, n - 1, 2).long()]
        assert_ratios(backward_errors(a[:5], sample), names)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_few_large_matrices_go_to_lapack(self, dtype, cpu_kernels):
        """On uniform attention LAPACK gives up; the kernels do not."""
        for a in (softmax(2, 240, 240, dtype=dtype), torch.full((1, 128, 128), 1 / 128, dtype=dtype)):
            values, vectors = linalg.eig(a, backend="cpu")
            assert cpu_kernels.last_kernel() == "eig/lapack"
            assert_ratios(residuals(a, values, vectors))
            assert_ratios(backward_errors(a[:1], linalg.eigvals(a, backend="cpu")[:1, :4]))
        a = softmax(2, 240, 240, dtype=dtype)
        a[1, 5, 6] = math.nan
        result = linalg.eigvals_ex(a, backend="cpu")
        assert result.info.tolist() == [0, 1] and result.eigenvalues[1].isnan().all()

    def test_gradient_through_lapack(self):
        a = softmax(1, 120, 120)
        mine, theirs = a.clone().requires_grad_(), a.clone().requires_grad_()
        for solver, leaf in ((linalg.eigvals, mine), (torch.linalg.eigvals, theirs)):
            solver(leaf).abs().square().sum().backward()
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-7, atol=1e-7)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_no_size_stalls_on_uniform_attention(self, dtype):
        """LAPACK gives up on one size in four."""
        for n in range(1, 140):
            values = linalg.eigvals(torch.full((n, n), 1 / n, dtype=dtype), backend="cpu")
            bound = RATIO * n * torch.finfo(dtype).eps
            assert (values[values.abs() < 0.5].abs() <= bound).all()
            assert (values - 1).abs().min() <= bound and (values.abs() > 0.5).sum() == 1

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_traces(self, dtype):
        """Σλ and Σλ² are tr A and tr A²: no eigenvalue is missing or twice there."""
        for n in (3, 9, 31, 64):
            a = softmax(20, n, n, dtype=dtype)
            values = linalg.eigvals(a, backend="cpu").to(torch.complex128)
            for power in (1, 2, 3):
                trace = torch.linalg.matrix_power(a.double(), power).diagonal(dim1=-2, dim2=-1).sum(-1)
                assert ((values**power).sum(-1) - trace).abs().max() <= power * RATIO * n * torch.finfo(dtype).eps

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_triangular_matrices_give_their_diagonal(self, dtype):
        a = softmax(5, 40, 40, dtype=dtype)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
        for triangle in (a.tril(), a.triu(), a.tril()[:, order][:, :, order]):
            values = linalg.eigvals(triangle, backend="cpu")
            assert (values.imag == 0).all()
            assert torch.equal(values.real.sort().values, triangle.diagonal(dim1=-2, dim2=-1).sort().values)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_pairs_are_conjugate_neighbours(self, dtype):
        values, vectors = linalg.eig(randn(30, 11, 11, dtype=dtype), backend="cpu")
        for row, matrix in zip(values, vectors, strict=True):
            k = 0
            while k < 11:
                if row[k].imag == 0:
                    assert (matrix[:, k].imag == 0).all()
                    k += 1
                    continue
                assert row[k].imag > 0 and row[k + 1] == row[k].conj()
                assert torch.equal(matrix[:, k + 1], matrix[:, k].conj().resolve_conj())
                k += 2


class TestRowStochastic:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("n", [1, 2, 3, 16, 65, 197])
    def test_perron_first(self, dtype, n):
        a = softmax(5, n, n, dtype=dtype)
        values = linalg.eigvals(a, row_stochastic=True, backend="cpu")
        assert ((values[:, 0] - 1).abs() <= RATIO * n * torch.finfo(dtype).eps).all()
        assert_ratios(backward_errors(a[:2], values[:2, :: max(1, n // 4)]))
        trace = a.double().diagonal(dim1=-2, dim2=-1).sum(-1)
        assert (values.to(torch.complex128).sum(-1) - trace).abs().max() <= RATIO * n * torch.finfo(dtype).eps

    @pytest.mark.parametrize("name", ["uniform attention", "causal attention", "one-hot rows", "permutation", "cycle"])
    def test_special(self, name):
        for n in (2, 5, 24):
            a = general_gallery.GALLERY[name](n, torch.float64, torch.Generator().manual_seed(0))
            values = linalg.eigvals(a, row_stochastic=True, backend="cpu")
            assert abs(values[0] - 1) <= RATIO * n * torch.finfo(torch.float64).eps
            assert_ratios(backward_errors(a, values)[None])

    def test_a_matrix_that_is_not(self):
        a = softmax(3, 6, 6)
        a[1, 2, 3] += 1e-6
        result = linalg.eigvals_ex(a, row_stochastic=True, backend="cpu")
        assert result.info.tolist() == [0, 2, 0] and result.eigenvalues[1].isnan().all()
        with pytest.raises(
            torch.linalg.LinAlgError, match=r"eigvals: A: matrix \(1,\) has rows that do not sum to one"
        ):
            linalg.eigvals(a, row_stochastic=True, backend="cpu")

    def test_as_the_reference(self):
        a = softmax(4, 9, 9)
        ours = linalg.eigvals(a, row_stochastic=True, backend="cpu")
        plain = linalg.eigvals(a, row_stochastic=True, backend="reference")
        for values, wanted in zip(ours, plain, strict=True):
            assert abs(values[0] - wanted[0]) < 1e-13
            assert (values[:, None] - wanted).abs().amin(0).max() < 1e-12

    def test_gradient(self):
        a = softmax(2, 5, 5).requires_grad_()
        linalg.eigvals(a, row_stochastic=True)[:, 0].real.sum().backward()
        # ∂λ/∂A = w vᵀ with v = 1 and w the stationary distribution: every column of the gradient is w.
        stationary = torch.linalg.matrix_power(a.detach(), 2000)[:, 0]
        torch.testing.assert_close(a.grad, stationary[..., None].expand(2, 5, 5))


class TestContract:
    @pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 0), (0, 0), (1, 1), (5, 1, 1), (2, 3, 4, 4), (3, 3)])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.usefixtures("poisoned_empty")
    def test_shapes(self, shape, dtype):
        a = randn(*shape, dtype=dtype)
        wanted = linalg.eig_ex(a, backend="reference")
        for mine, theirs in zip(linalg.eig_ex(a, backend="cpu"), wanted, strict=True):
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype and mine.isfinite().all()
        values = linalg.eigvals(a, backend="cpu")
        assert values.shape == wanted.eigenvalues.shape and values.dtype == wanted.eigenvalues.dtype

    @pytest.mark.parametrize("layout", shapes.LAYOUTS)
    def test_layouts(self, layout):
        a = randn(2, 9, 7, 7)
        strided = shapes.with_layout(a, layout)
        for mine, wanted in zip(linalg.eig(strided), linalg.eig(strided.contiguous()), strict=True):
            assert torch.equal(mine, wanted)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.complex128])
    def test_other_types_go_to_the_reference(self, dtype):
        a = randn(2, 4, 4).to(dtype)
        assert linalg.eigvals(a).shape == (2, 4)
        with pytest.raises(ot.BackendError, match="eigvals: backend 'cpu' cannot run this call"):
            linalg.eigvals(a, backend="cpu")

    @pytest.mark.parametrize("function", [linalg.eig, linalg.eigvals, linalg.eig_ex, linalg.eigvals_ex])
    def test_errors(self, function):
        name = function.__name__
        with pytest.raises(ValueError, match=rf"{name}: A: got torch.float32 of shape \[2, 3\]"):
            function(torch.zeros(2, 3))
        with pytest.raises(ValueError, match=f"{name}: A: got torch.int64"):
            function(torch.zeros(2, 2, dtype=torch.int64))
        with pytest.raises(TypeError, match=f"{name}: A: got list"):
            function([[1.0]])

    def test_row_stochastic_is_a_flag(self):
        with pytest.raises(TypeError, match="eigvals: row_stochastic: got int 1, wanted True or False"):
            linalg.eigvals(torch.eye(2), row_stochastic=1)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_bad_member_hurts_nobody_else(self, bad, dtype):
        a = randn(40, 9, 9, dtype=dtype)
        good = linalg.eig_ex(a, backend="cpu")
        a[17, 3, 4] = bad
        values, vectors, info = linalg.eig_ex(a, backend="cpu")
        assert info.dtype == torch.int32 and info[17] == 1 and info.sum() == 1
        assert values[17].isnan().all() and vectors[17].isnan().all()
        others = info == 0
        assert torch.equal(values[others], good.eigenvalues[others])
        assert torch.equal(vectors[others], good.eigenvectors[others])
        with pytest.raises(torch.linalg.LinAlgError, match=r"eigvals: A: matrix \(17,\) is not finite"):
            linalg.eigvals(a, backend="cpu")
        with pytest.raises(torch.linalg.LinAlgError, match=r"eig: A: matrix \(17,\) is not finite"):
            linalg.eig(a, backend="cpu")


class TestBits:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("n", [5, 16, 40])
    def test_place_in_the_batch(self, dtype, n, isa_level):
        """Whatever its neighbours are, and in whichever lane, a matrix gives the same bits."""
        _, hard = general_gallery.batch(n, dtype)
        a = randn(7, n, n, dtype=dtype)
        alone = [linalg.eig(matrix, backend="cpu") for matrix in a]
        values_alone = [linalg.eigvals(matrix, backend="cpu") for matrix in a]
        mixed = torch.stack([x for pair in zip(hard[: 4 * 7].split(4), a, strict=True) for x in (*pair[0], pair[1])])
        values, vectors = linalg.eig(mixed, backend="cpu")
        only_values = linalg.eigvals(mixed, backend="cpu")
        for k in range(7):
            assert torch.equal(values[5 * k + 4], alone[k].eigenvalues)
            assert torch.equal(vectors[5 * k + 4], alone[k].eigenvectors)
            assert torch.equal(only_values[5 * k + 4], values_alone[k])

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_threads(self, dtype):
        a = randn(70, 12, 12, dtype=dtype).requires_grad_()
        repeat.check_bit_equal(lambda a: linalg.eigvals(a, backend="cpu").abs(), (a,))
        repeat.check_bit_equal(lambda a: linalg.eig(a, backend="cpu").eigenvectors.abs(), (a,))

    def test_a_large_batch(self):
        a = randn(100_000, 3, 3, dtype=torch.float32)
        values = linalg.eigvals(a, backend="cpu")
        assert torch.equal(values[-7:], linalg.eigvals(a[-7:], backend="cpu"))


def assert_refused(a):
    a = a.requires_grad_()
    with pytest.raises(torch.linalg.LinAlgError, match="eig: A is numerically defective"):
        linalg.eigvals(a, backend="cpu").abs().sum().backward()


def assert_trace_gradient(a, tolerance):
    a = a.requires_grad_()
    linalg.eigvals(a, backend="cpu").real.sum().backward()
    torch.testing.assert_close(a.grad, torch.eye(a.shape[-1]).to(a).expand_as(a), rtol=0, atol=tolerance)


# From a random batch and ε. Each but the first three comes close to one of the marks of a defective matrix.
HONEST = {
    "random": lambda x, eps: x,
    "softmax": lambda x, eps: x.softmax(-1),
    "nearly symmetric": lambda x, eps: x + x.mT + 1e-3 * x,
    "sharp softmax": lambda x, eps: (3 * x).softmax(-1),
    "near the identity": lambda x, eps: torch.eye(x.shape[-1]) + 1e-2 * x,
    "the identity and noise": lambda x, eps: torch.eye(x.shape[-1]) + 10 * eps * x,
    "projections": lambda x, eps: _projections(x),
    "orthogonal": lambda x, eps: torch.linalg.qr(x).Q,
    "permutations": lambda x, eps: torch.eye(x.shape[-1], dtype=x.dtype)[x[..., 0].argsort(-1)],
}


def _projections(x):
    half = torch.linalg.qr(x).Q[..., : x.shape[-1] // 2]
    return half @ half.mT


class TestGradients:
    @pytest.mark.parametrize("n", [1, 2, 5])
    def test_eigvals(self, n):
        a = randn(2, n, n).requires_grad_()
        assert gradcheck(lambda a: (linalg.eigvals(a, backend="cpu") ** 3).sum(-1), (a,))
        assert gradcheck(lambda a: linalg.eigvals(a, backend="cpu").abs().square().sum(-1), (a,))

    def test_eigvals_twice(self):
        a = randn(1, 3, 3).requires_grad_()
        assert gradgradcheck(lambda a: linalg.eigvals(a, backend="cpu").abs().square().sum(-1), (a,))

    def test_eig(self):
        a = randn(1, 3, 3).requires_grad_()
        assert gradcheck(lambda a: linalg.eig(a, backend="cpu").eigenvectors.abs().square().sum(-1), (a,))
        assert gradcheck(lambda a: _rebuilt(*linalg.eig(a, backend="cpu")), (a,))
        fourth = lambda a: linalg.eig(a, backend="cpu").eigenvectors.abs().pow(4).sum((-2, -1))  # noqa: E731
        assert gradgradcheck(fourth, (a,))

    @pytest.mark.parametrize("n", [3, 16, 33])
    def test_agrees_with_torch(self, n):
        a = randn(3, n, n)
        mine, theirs = a.clone().requires_grad_(), a.clone().requires_grad_()
        for solver, leaf in ((linalg.eig, mine), (torch.linalg.eig, theirs)):
            values, vectors = solver(leaf)
            (values.exp().abs().sum() + (vectors.abs() ** 4 * values.abs()[..., None, :]).sum()).backward()
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-8, atol=1e-8)

    @pytest.mark.parametrize("a", [torch.eye(5), torch.zeros(4, 4), torch.diag(torch.tensor([2.0, 2.0, 1.0]))])
    def test_eigenvalues_need_no_gap(self, a):
        a = a.double().requires_grad_()
        linalg.eigvals(a, backend="cpu").real.pow(2).sum().backward()  # tr A², as the eigenvalues are real
        torch.testing.assert_close(a.grad, 2 * a.detach().mT)

    def test_trace_of_nearly_equal_eigenvalues(self):
        a = (torch.eye(6, dtype=torch.float64) + 1e-9 * randn(6, 6)).requires_grad_()
        linalg.eigvals(a, backend="cpu").real.sum().backward()
        torch.testing.assert_close(a.grad, torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-6)

    def test_a_defective_matrix_is_refused(self):
        rotation = torch.linalg.qr(randn(4, 4)).Q
        for matrix in (torch.tensor([[1.0, 1.0], [0.0, 1.0]]).double(), rotation @ _jordan(4) @ rotation.mT):
            a = torch.stack([randn(*matrix.shape), matrix]).requires_grad_()
            with pytest.raises(torch.linalg.LinAlgError, match=r"eig: A of matrix \(1,\) is numerically defective"):
                linalg.eigvals(a, backend="cpu").abs().sum().backward()
            with pytest.raises(torch.linalg.LinAlgError, match=r"eig: A of matrix \(1,\) is numerically defective"):
                linalg.eig(a, backend="cpu").eigenvectors.abs().sum().backward()
            a.grad = None
            linalg.eigvals(a, backend="cpu")[0].abs().sum().backward()  # the other matrix has its gradient
            assert a.grad.isfinite().all() and (a.grad[1] == 0).all()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("n", [2, 3, 4, 8])
    def test_rounding_does_not_hide_a_jordan_block(self, n, dtype):
        """In float32 from a coupling of a hundredth of A's size on, less what the basis takes away."""
        bases = torch.linalg.qr(randn(50, n, n)).Q
        for eigenvalue in (0, 1, -30 if dtype == torch.float32 else -100):
            for matrix in bases @ _jordan(n, eigenvalue) @ bases.mT:
                assert_refused(matrix.to(dtype))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_nor_does_the_rest_of_a_matrix(self, dtype):
        eigenvalue = 30 if dtype == torch.float32 else 100
        block = torch.block_diag(_jordan(3, eigenvalue), torch.diag(eigenvalue + 2 + torch.arange(21.0).double()))
        for basis in torch.linalg.qr(randn(30, 24, 24)).Q:
            assert_refused((basis @ block @ basis.mT).to(dtype))

    @pytest.mark.parametrize("scale", [1e-30, 1e30])
    def test_a_jordan_block_of_any_size(self, scale):
        basis = torch.linalg.qr(randn(3, 3)).Q
        assert_refused((scale * basis @ _jordan(3, 1) @ basis.mT).float())
        linalg.eigvals((scale * randn(3, 3)).float().requires_grad_()).abs().sum().backward()

    def test_a_small_coupling_is_refused_until_it_is_rounding(self):
        a = torch.eye(2, dtype=torch.float64)
        for coupling in (1.0, 1e-4, 1e-6):
            assert_refused(a + coupling * torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
        for coupling in (1e-8, 1e-12, 1e-16):
            assert_trace_gradient(a + coupling * torch.tensor([[0.0, 1.0], [0.0, 0.0]]), 1e-6)

    def test_in_float32_a_condition_number_below_a_hundred_is_not_refused(self):
        """[[1, c], [e, 1]] has the condition number √(c/e)/2: 50 and 158."""
        linalg.eigvals(torch.tensor([[1, 1e-2], [1e-6, 1]]).requires_grad_()).abs().sum().backward()
        assert_refused(torch.tensor([[1, 1e-1], [1e-6, 1]]))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("name", HONEST)
    def test_other_matrices_are_not_refused(self, name, dtype):
        """Though eigenvalues of some are equal, close or ill-conditioned."""
        for n in (2, 16, 65):
            a = HONEST[name](randn(50, n, n, seed=n), torch.finfo(dtype).eps).to(dtype).requires_grad_()
            linalg.eigvals(a, backend="cpu").abs().sum().backward()
            assert a.grad.isfinite().all()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_trace_of_equal_eigenvalues(self, dtype):
        """Left and right eigenvectors that do not belong together would give a gradient that is wrong by hundreds."""
        eps = torch.finfo(dtype).eps
        for n in (8, 33, 65):
            basis = torch.linalg.qr(randn(10, n, n)).Q
            values = 1 + 2 * (torch.arange(n) < n // 2).double()
            for a in ((basis * values) @ basis.mT, torch.eye(n) + 10 * eps * randn(10, n, n)):
                assert_trace_gradient(a.to(dtype), 1e3 * n * eps)  # condition numbers are up to a thousand

    def test_a_defective_matrix_is_refused_in_a_second_derivative_and_by_eig_ex(self):
        basis = torch.linalg.qr(randn(3, 3)).Q
        a = (basis @ _jordan(3, 100) @ basis.mT).requires_grad_()
        for solver in (linalg.eig, linalg.eig_ex, linalg.eigvals_ex):
            loss = solver(a, backend="cpu").eigenvalues.abs().sum()
            for again in (False, True):
                with pytest.raises(torch.linalg.LinAlgError, match="eig: A is numerically defective"):
                    torch.autograd.grad(loss, a, create_graph=again, retain_graph=True)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_defective_pair_leaves_other_eigenvalues_their_gradient(self, dtype):
        a = torch.tensor([[1, 0, 0], [1, 1, 0], [0.3, 0.7, 5]], dtype=dtype).requires_grad_()
        values = linalg.eigvals(a, backend="cpu")
        values.real[values.detach().real.argmax()].backward()
        wanted = torch.tensor([[0, 0, 0.11875], [0, 0, 0.175], [0, 0, 1]], dtype=dtype)  # w vᵀ
        torch.testing.assert_close(a.grad, wanted)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_so_does_a_block_of_zeros(self, dtype):
        """Its left eigenvectors overflow."""
        for n in (4, 8):
            a = torch.block_diag(_jordan(n, 0), torch.tensor([[5.0]])).to(dtype).requires_grad_()
            values = linalg.eigvals(a, backend="cpu")
            values.real[values.detach().real.argmax()].backward()
            assert a.grad[n, n] == 1 and a.grad.abs().sum() == 1

    def test_equal_eigenvalues_have_no_eigenvector_gradient(self):
        a = torch.eye(3, dtype=torch.float64, requires_grad=True)
        with pytest.raises(torch.linalg.LinAlgError, match="eig: eigenvalues 0 and 1 are numerically equal"):
            linalg.eig(a, backend="cpu").eigenvectors.real.sum().backward()

    def test_a_function_of_a_matrix_with_equal_eigenvalues_is_refused_or_right(self):
        """V Λ V⁻¹ is A, so its gradient is that of the loss; equal eigenvalues do not tell it, but zero is not it."""

        def gradient(values, weights):
            a = torch.tensor(values, dtype=torch.float64).diag().requires_grad_()
            found, vectors = linalg.eig(a, backend="cpu")
            again = (vectors * found) @ torch.linalg.inv(vectors)
            return torch.autograd.grad((again.real * weights).sum(), a)[0]

        weights = torch.arange(1.0, 10.0, dtype=torch.float64).reshape(3, 3)
        torch.testing.assert_close(gradient([1.0, 3.0, 2.0], weights), weights)
        for values in ([1.0, 1.0, 2.0], [1.0, 1.0, 1.0]):
            with pytest.raises(torch.linalg.LinAlgError, match="eigenvalues 0 and 1 are numerically equal: a function"):
                gradient(values, weights)
        alike = weights.clone().fill_diagonal_(1.0)  # the equal eigenvalues have equal derivatives
        with pytest.raises(torch.linalg.LinAlgError, match="eigenvalues 0 and 1 are numerically equal: a function"):
            gradient([1.0, 1.0, 2.0], alike)
        unit = torch.eye(3, dtype=torch.float64)  # the trace
        torch.testing.assert_close(gradient([1.0, 1.0, 1.0], unit), unit)

    def test_other_eigenvectors_beside_equal_eigenvalues(self):
        """A loss of the eigenvector of another eigenvalue, and of all eigenvalues alike."""
        a = torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64).diag().requires_grad_()
        values, vectors = linalg.eig(a, backend="cpu")
        loss = values.real.square().sum() + vectors[0, 2].abs().square() * values[2].real
        torch.testing.assert_close(torch.autograd.grad(loss, a)[0], 2 * a.detach())

    def test_eigenvalues_equal_to_rounding_count_as_equal(self):
        eps = torch.finfo(torch.float64).eps
        a = torch.diag(torch.tensor([1, 1 + eps, 2], dtype=torch.float64)).requires_grad_()
        with pytest.raises(torch.linalg.LinAlgError, match="eig: eigenvalues . and . are numerically equal"):
            linalg.eig(a, backend="cpu").eigenvectors.real.sum().backward()

    def test_a_loss_of_the_phase_is_refused(self):
        a = randn(4, 4, seed=3).requires_grad_()
        assert (linalg.eigvals(a).imag != 0).any()
        with pytest.raises(RuntimeError, match="phase"):
            linalg.eig(a, backend="cpu").eigenvectors.imag.pow(3).sum().backward()

    def test_a_bad_member_gets_no_gradient_and_spoils_none(self):
        a = randn(2, 3, 3)
        a[1] = math.nan
        a.requires_grad_()
        values = linalg.eigvals_ex(a, backend="cpu").eigenvalues.abs()
        for loss in (values[0].sum(), values.sum()):
            (grad,) = torch.autograd.grad(loss, a, retain_graph=True)
            assert grad.isfinite().all() and (grad[0] != 0).any() and (grad[1] == 0).all()

    def test_backward_twice(self):
        repeat.check_backward_twice(lambda a: linalg.eigvals(a).abs(), (randn(3, 5, 5).requires_grad_(),))

    def test_only_eigenvalues_are_computed_without_a_gradient(self):
        a = randn(3, 3).requires_grad_()
        with torch.no_grad():
            assert torch.ops.overtone.eig_ex(a, False, False, False)[1].numel() == 0
            assert not linalg.eigvals(a).requires_grad


def _jordan(n, eigenvalue=1):
    return eigenvalue * torch.eye(n, dtype=torch.float64) + torch.diag(torch.ones(n - 1, dtype=torch.float64), 1)


def _rebuilt(values, vectors):
    """A again, whatever the eigenvectors' phase: the gradient is the identity."""
    return (vectors @ torch.diag_embed(values) @ torch.linalg.inv(vectors)).real


class TestTorch:
    def test_opcheck(self):
        a = randn(2, 3, 3)
        a = (a + a.mT).requires_grad_()  # real eigenvalues: opcheck's loss would depend on the phase of other vectors
        torch.library.opcheck(torch.ops.overtone.eig_ex, (a, False, True, True))
        torch.library.opcheck(torch.ops.overtone.eig_ex, (softmax(2, 3, 3), True, False, False))
        torch.library.opcheck(torch.ops.overtone.eig, (a, False, True, True, "eig"))
        values, right, left, info = torch.ops.overtone.eig_ex(a.detach(), False, True, True)
        norm = torch.linalg.matrix_norm(a.detach())
        torch.library.opcheck(torch.ops.overtone.eig_gradient, (values, None, norm, values, right, left, info))

    def test_compiles(self):
        calls = [(randn(b, n, n).requires_grad_(),) for b, n in ((3, 4), (5, 6), (2, 7))]
        compiling.check_compiles(lambda a: linalg.eigvals(a).abs().square().sum(-1), calls, exact=False)
        compiling.check_compiles(lambda a: linalg.eig(a).eigenvectors.abs().square().sum(-1), calls, exact=False)

    def test_compiled_still_raises(self):
        compiled = torch.compile(lambda a: linalg.eigvals(a).abs(), fullgraph=True)
        with pytest.raises(torch.linalg.LinAlgError, match=r"eigvals: A: matrix \(0,\) is not finite"):
            compiled(torch.full((1, 2, 2), math.nan))
