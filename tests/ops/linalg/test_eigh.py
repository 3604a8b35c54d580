"""eigh and eigvalsh on the CPU kernels: LAPACK's ratios for every member, bad neighbours, gradients, every level."""

from __future__ import annotations

import math

import pytest
import torch
from support import accuracy, compiling, gallery, repeat, shapes
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import overtone as ot

pytestmark = pytest.mark.usefixtures("cpu_kernels")

DTYPES = (torch.float32, torch.float64)
# Around the lanes, the pairs of groups and the change to LAPACK.
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100)
LARGE_SIZES = (128, 197, 256, 384)
RATIO = 10  # LAPACK's own test programs accept 20 to 50


def random_symmetric(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return gallery.symmetrized(torch.randn(*shape, shape[-1], generator=generator, dtype=torch.float64)).to(dtype)


def ratios(a: Tensor, values: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """LAPACK's residual ‖AV − VΛ‖/(n‖A‖ε) and orthogonality ‖VᵀV − I‖/(nε) of every member, in the 1-norm."""
    n, eps = a.shape[-1], torch.finfo(a.dtype).eps
    scale = a.abs().amax((-2, -1), keepdim=True).double()
    scale = torch.where(scale == 0, 1, scale)
    a, values, vectors = a.double() / scale, values.double() / scale[..., 0], vectors.double()
    size = torch.linalg.matrix_norm(a, 1)
    residual = torch.linalg.matrix_norm(a @ vectors - vectors * values[..., None, :], 1)
    residual = torch.where(size == 0, residual, residual / torch.where(size == 0, 1, size))
    orthogonality = torch.linalg.matrix_norm(vectors.mT @ vectors - torch.eye(n, dtype=torch.float64), 1)
    return residual / (n * eps), orthogonality / (n * eps)


def check_members(names: list[str], a: Tensor, result: tuple[Tensor, Tensor, Tensor]) -> None:
    """Every member is solved to LAPACK's standard, its eigenvalues in order."""
    values, vectors, info = result
    assert not info.any(), [name for name, code in zip(names, info.tolist(), strict=True) if code]
    assert (values.diff(dim=-1) >= 0).all()
    for kind, ratio in zip(("residual", "orthogonality"), ratios(a, values, vectors), strict=True):
        bad = {name: r for name, r in zip(names, ratio.tolist(), strict=True) if not r <= RATIO}
        assert not bad, f"{kind} at n = {a.shape[-1]}: {bad}"


def check_values(a: Tensor, values: Tensor, other: Tensor) -> None:
    """Eigenvalues alone agree with those of eigh to the same standard."""
    n, eps = a.shape[-1], torch.finfo(a.dtype).eps
    size = other.abs().amax(-1, keepdim=True)
    assert ((values - other).abs() <= RATIO * math.sqrt(n) * eps * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("poisoned_empty")
class TestGallery:
    @pytest.mark.parametrize("n", SIZES)
    def test_every_member(self, n, dtype):
        names, a = gallery.symmetric_batch(n, dtype)
        result = ot.linalg.eigh_ex(a, backend="cpu")
        check_members(names, a, result)
        check_values(a, ot.linalg.eigvalsh(a, backend="cpu"), result.eigenvalues)

    @pytest.mark.slow
    @pytest.mark.parametrize("n", LARGE_SIZES)
    def test_large_members(self, n, dtype):
        names, a = gallery.symmetric_batch(n, dtype)
        result = ot.linalg.eigh_ex(a, backend="cpu")
        check_members(names, a, result)
        check_values(a, ot.linalg.eigvalsh(a, backend="cpu"), result.eigenvalues)

    @pytest.mark.parametrize("n", [5, 16, 33])
    def test_every_level(self, isa_level, cpu_kernels, n, dtype):
        names, a = gallery.symmetric_batch(n, dtype)
        check_members(names, a, ot.linalg.eigh_ex(a, backend="cpu"))
        assert cpu_kernels.last_kernel() == f"eigh/{isa_level}"
        assert not ot.linalg.eigvalsh_ex(a, backend="cpu").info.any()

    @pytest.mark.parametrize("n", [4, 20, 70, 200])
    def test_few_matrices(self, n, dtype):
        """As few as one: the way through LAPACK where matrices are large."""
        for count in (1, 2, 3):
            a = random_symmetric(count, n, dtype=dtype)
            check_members([""] * count, a, ot.linalg.eigh_ex(a, backend="cpu"))

    def test_huge_batch(self, dtype):
        a = random_symmetric(100_003, 4, dtype=dtype)
        check_members([""] * len(a), a, ot.linalg.eigh_ex(a, backend="cpu"))


class TestClosedForms:
    def test_diagonal_matrices_are_exact(self):
        a = torch.diag(torch.tensor([3.0, -1.0, 2.0, 2.0]))
        result = ot.linalg.eigh(a, backend="cpu")
        assert result.eigenvalues.tolist() == [-1, 2, 2, 3]
        assert torch.equal((result.eigenvectors * result.eigenvalues) @ result.eigenvectors.T, a)

    def test_the_identity_has_itself(self):
        result = ot.linalg.eigh(torch.eye(9), backend="cpu")
        assert torch.equal(result.eigenvectors, torch.eye(9)) and torch.equal(result.eigenvalues, torch.ones(9))

    def test_second_difference(self):
        n = 24
        a = gallery.SYMMETRIC["second difference"](n, torch.float64, torch.Generator())
        wanted = torch.tensor([2 - 2 * math.cos(math.pi * k / (n + 1)) for k in range(1, n + 1)], dtype=torch.float64)
        torch.testing.assert_close(ot.linalg.eigvalsh(a, backend="cpu"), wanted)

    def test_clement(self):
        n = 13
        a = gallery.clement(n, torch.float64, torch.Generator())
        torch.testing.assert_close(ot.linalg.eigvalsh(a, backend="cpu"), torch.arange(1 - n, n, 2).double())


class TestConventions:
    def test_result_names(self):
        a = random_symmetric(2, 3)
        assert ot.linalg.eigh(a)._fields == ("eigenvalues", "eigenvectors")
        assert ot.linalg.eigh_ex(a)._fields == ("eigenvalues", "eigenvectors", "info")
        assert ot.linalg.eigvalsh_ex(a)._fields == ("eigenvalues", "info")

    @pytest.mark.parametrize("n", [5, 20, 40])
    @pytest.mark.parametrize("layout", shapes.LAYOUTS)
    def test_only_the_triangle_is_read_in_any_layout(self, n, layout):
        a = random_symmetric(2, 3, n)
        wanted = ot.linalg.eigvalsh(shapes.with_layout(a, layout).contiguous(), backend="cpu")
        upper = torch.ones(n, n).triu(1).bool()
        for uplo, hidden in (("L", upper), ("U", upper.T), ("l", upper), ("u", upper.T)):
            given = shapes.with_layout(a.masked_fill(hidden, math.nan), layout)
            values, vectors = ot.linalg.eigh(given, uplo, backend="cpu")
            torch.testing.assert_close(values, wanted, rtol=1e-12, atol=1e-12)
            assert vectors.isfinite().all()

    @pytest.mark.parametrize("shape", [(0, 0), (3, 0, 0), (0, 4, 4), (2, 0, 5, 5), (1, 1), (2, 3, 1, 1)])
    def test_empty_and_single(self, shape):
        a = torch.ones(shape).requires_grad_()
        values, vectors, info = ot.linalg.eigh_ex(a, backend="cpu")
        assert values.shape == shape[:-1] and vectors.shape == shape and info.shape == shape[:-2]
        assert info.dtype == torch.int32 and not info.any()
        assert torch.equal(values, torch.ones(shape[:-1])) and torch.equal(vectors, torch.ones(shape))
        assert torch.autograd.grad(values.sum() + vectors.square().sum(), a)[0].shape == shape

    def test_strides_of_the_result_are_torchs(self):
        a = random_symmetric(3, 6)
        assert ot.linalg.eigh(a).eigenvectors.stride() == torch.linalg.eigh(a).eigenvectors.stride()

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16])
    def test_other_types_go_to_the_reference(self, dtype, cpu_kernels):
        a = random_symmetric(2, 4, dtype=torch.float32).to(dtype)
        ot.frequency_norms(torch.ones(2, 2))
        assert torch.equal(ot.linalg.eigvalsh(a), ot.reference.linalg.eigvalsh(a))
        assert cpu_kernels.last_kernel().startswith("frequency_norms/")
        with pytest.raises(ot.BackendError, match="takes torch.float32, torch.float64"):
            ot.linalg.eigvalsh(a, backend="cpu")

    @pytest.mark.parametrize("function", [ot.linalg.eigh, ot.linalg.eigvalsh, ot.linalg.eigh_ex, ot.linalg.eigvalsh_ex])
    def test_errors(self, function):
        name = function.__name__
        with pytest.raises(ValueError, match=rf"{name}: A: got torch.float32 of shape \[3, 4\].*wanted.*\[..., n, n\]"):
            function(torch.ones(3, 4))
        with pytest.raises(ValueError, match=f"{name}: A: got torch.int64"):
            function(torch.ones(3, 3, dtype=torch.int64))
        with pytest.raises(TypeError, match=f"{name}: A: got list"):
            function([[1.0]])
        with pytest.raises(ValueError, match=f"{name}: UPLO: got 'X', wanted 'L' or 'U'"):
            function(torch.ones(3, 3), "X")


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int64 if x.dtype == torch.float64 else torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [3, 8, 20, 40, 150])
class TestNeighbours:
    """A matrix's results are the same bits wherever it stands and whatever stands beside it."""

    def test_position(self, n, dtype):
        names, a = gallery.symmetric_batch(n, dtype)
        order = torch.randperm(len(names), generator=torch.Generator().manual_seed(1))
        for one, other in zip(ot.linalg.eigh_ex(a), ot.linalg.eigh_ex(a[order]), strict=True):
            assert torch.equal(bits(one[order]) if one.is_floating_point() else one[order], bits(other))
        values = ot.linalg.eigvalsh(a)
        assert torch.equal(bits(values[order]), bits(ot.linalg.eigvalsh(a[order])))

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_bad_member_sets_its_own_info(self, n, dtype, bad):
        a = random_symmetric(7, 6, n, dtype=dtype)
        good = ot.linalg.eigh_ex(a)
        members = [(0, 0), (3, 5), (6, 1)]
        for member in members:
            a[(*member, n - 1, 0)] = bad
        values, vectors, info = ot.linalg.eigh_ex(a)
        assert [tuple(i) for i in info.nonzero().tolist()] == members
        assert values[info == 1].isnan().all() and vectors[info == 1].isnan().all()
        for now, before in zip((values, vectors), good[:2], strict=True):
            assert torch.equal(bits(now[info == 0]), bits(before[info == 0]))
        assert torch.equal(ot.linalg.eigvalsh_ex(a).info, info)
        wanted = r"eigh: A: matrix \(0, 0\), \(3, 5\), \(6, 1\) is not finite, did not converge or has results beyond"
        with pytest.raises(torch.linalg.LinAlgError, match=wanted):
            ot.linalg.eigh(a)
        with pytest.raises(torch.linalg.LinAlgError, match=wanted.replace("eigh", "eigvalsh")):
            ot.linalg.eigvalsh(a.requires_grad_())

    def test_threads_and_repeats(self, n, dtype):
        a = random_symmetric(37, n, dtype=dtype).requires_grad_()
        repeat.check_bit_equal(lambda a: tuple(ot.linalg.eigh(a)), (a,))
        repeat.check_bit_equal(lambda a: tuple(ot.linalg.eigh(a)), (a[:1].detach().requires_grad_(),))
        repeat.check_backward_twice(lambda a: tuple(ot.linalg.eigh(a)), (a,))


def spectral_function(solver):
    """Eigenvalues, and a function of A: free of the signs of eigenvectors."""

    def call(a: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = solver(a)
        return values, (vectors * values.sin()[..., None, :]) @ vectors.mT

    return call


class TestGradients:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("n", [2, 3, 8, 13, 33])
    def test_against_truth(self, isa_level, n, dtype):
        accuracy.check_against_truth(
            spectral_function(lambda a: ot.linalg.eigh(a, backend="cpu")),
            spectral_function(torch.linalg.eigh),
            (self.well_separated(n, dtype),),
            more_draws=[(self.well_separated(n, dtype, seed),) for seed in range(1, 8)],
        )

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("n", [70, 130])
    def test_large_matrices(self, n, dtype):
        """QL's eigenvalues of large matrices have a few times the error of LAPACK's divide and conquer: by ratio."""
        a = self.well_separated(n, dtype)
        weight = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        results = []
        for solver, x in ((ot.linalg.eigh, a), (torch.linalg.eigh, accuracy.to_float64(a))):
            y = spectral_function(solver)(x)[1]
            results.append(torch.autograd.grad((y * weight.to(y)).sum(), x)[0].double())
        ratio = (results[0] - results[1]).abs().max() / results[1].abs().max() / (n * torch.finfo(dtype).eps)
        assert ratio <= RATIO

    def well_separated(self, n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
        """What is tested is the formula, not the condition of the problem."""
        generator = torch.Generator().manual_seed(seed)
        spectrum = torch.linspace(-2, 2, n, dtype=torch.float64)
        a = torch.stack([gallery.with_eigenvalues(spectrum, generator) for _ in range(5)])
        return a.to(dtype).requires_grad_()

    def test_gradcheck(self):
        a = random_symmetric(3, 5).requires_grad_()

        def symmetric(a):
            return (a + a.mT) / 2

        for check in (gradcheck, gradgradcheck):
            assert check(lambda a: ot.linalg.eigvalsh(symmetric(a), backend="cpu"), (a,))
            assert check(lambda a: ot.linalg.eigh(symmetric(a), backend="cpu").eigenvectors.square(), (a,))
            assert check(lambda a: spectral_function(ot.linalg.eigh)(symmetric(a)), (a,))

    def test_gradients_with_strides_of_their_own(self):
        a = random_symmetric(4, 6).requires_grad_()
        values, vectors = ot.linalg.eigh(a)
        g = torch.randn(4, 6, 6, dtype=torch.float64)
        wanted = torch.autograd.grad(vectors, a, g, retain_graph=True)[0]
        for layout in ("transposed", "channels_strided", "packed"):
            got = torch.autograd.grad(vectors, a, shapes.with_layout(g, layout), retain_graph=True)[0]
            torch.testing.assert_close(got, wanted)
        expanded = torch.autograd.grad(values, a, torch.ones(6, dtype=torch.float64).expand(4, 6))[0]
        torch.testing.assert_close(expanded, torch.eye(6, dtype=torch.float64).expand(4, 6, 6))

    @pytest.mark.parametrize("n", [4, 40])
    def test_eigenvalues_need_no_gap(self, n):
        a = torch.eye(n, dtype=torch.float64).requires_grad_()
        for values in (ot.linalg.eigvalsh(a), ot.linalg.eigh(a).eigenvalues):
            (gradient,) = torch.autograd.grad(values.square().sum(), a)
            torch.testing.assert_close(gradient, 2 * torch.eye(n, dtype=torch.float64))

    def test_a_bad_member_gets_no_gradient_and_spoils_none(self):
        a = random_symmetric(3, 5)
        clean = a.clone().requires_grad_()
        a[1] = math.nan
        a.requires_grad_()
        call = spectral_function(lambda a: ot.linalg.eigh_ex(a)[:2])
        gradients = [torch.autograd.grad(call(x)[1][[0, 2]].square().sum(), x)[0] for x in (clean, a)]
        assert torch.equal(gradients[1][[0, 2]], gradients[0][[0, 2]]) and (gradients[1][1] == 0).all()


# Spectra with equal eigenvalues, and the function whose derivative exists there all the same.
DEGENERATE = ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 2.0, 2.0], [-1.0, 0.0, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0, 1.0, 5.0, 5.0])


class TestEqualEigenvalues:
    def gradient(self, a: Tensor, loss) -> Tensor:
        a = a.detach().requires_grad_()
        return torch.autograd.grad(loss(*ot.linalg.eigh(a, backend="cpu")), a)[0]

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("spectrum", DEGENERATE)
    @pytest.mark.parametrize("basis", ["standard", *range(16)])
    def test_exponential(self, dtype, spectrum, basis):
        """d⟨G, exp(A)⟩, whose truth is torch.matrix_exp's. A random basis splits the eigenvalues by rounding."""
        generator = torch.Generator().manual_seed(0 if basis == "standard" else basis)
        values = torch.tensor(spectrum, dtype=torch.float64)
        a = torch.diag(values) if basis == "standard" else gallery.with_eigenvalues(values, generator)
        g = torch.randn(a.shape, generator=generator, dtype=torch.float64)
        truth = a.to(dtype).double().requires_grad_()
        symmetric = (truth + truth.mT) / 2
        (wanted,) = torch.autograd.grad((torch.matrix_exp(symmetric) * g).sum(), truth)
        got = self.gradient(a.to(dtype), lambda w, v: (((v * w.exp()) @ v.mT) * g.to(dtype)).sum())
        # Entries of K come from differences over gaps of 1 and more, and exp's derivative is at most e⁵.
        tolerance = 20 * len(spectrum) * torch.finfo(dtype).eps * wanted.abs().max().item()
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=tolerance)

    def test_a_small_gap_counts_where_eigenvalues_are_detached(self):
        """⟨G, V f Vᵀ⟩ with f constant: the limit at equal eigenvalues is zero, but these are 80 roundings apart."""
        generator = torch.Generator().manual_seed(0)
        values = torch.tensor([1.0, 1.00001, 2.0, 3.0], dtype=torch.float64)
        a = gallery.with_eigenvalues(values, generator).float()
        f, g = values.exp(), torch.randn(4, 4, generator=generator, dtype=torch.float64)
        got, wanted = (
            self.gradient(x, lambda w, v: ((v * f.to(v.dtype)) @ v.mT * g.to(v.dtype)).sum()) for x in (a, a.double())
        )
        assert (got - wanted).abs().max() <= 0.3 * wanted.abs().max()

    def test_exponential_at_the_identity(self):
        got = self.gradient(torch.eye(5, dtype=torch.float64), lambda w, v: ((v * w.exp()) @ v.mT).sum())
        torch.testing.assert_close(got, torch.full((5, 5), math.e, dtype=torch.float64))

    def test_projector_of_a_whole_eigenspace(self):
        generator = torch.Generator().manual_seed(0)
        a = gallery.with_eigenvalues(torch.tensor([1.0, 1.0, 1.0, 3.0, 4.0], dtype=torch.float64), generator)
        g = gallery.symmetrized(torch.randn(5, 5, generator=generator, dtype=torch.float64))

        def projection(a: Tensor) -> Tensor:
            v = torch.linalg.eigh(a).eigenvectors[:, :3]
            return (v @ v.mT * g).sum()

        got = self.gradient(a, lambda w, v: (v[:, :3] @ v[:, :3].mT * g).sum())
        step = 1e-6 * gallery.symmetrized(torch.randn(5, 5, generator=generator, dtype=torch.float64))
        difference = (projection(a + step) - projection(a - step)) / 2
        torch.testing.assert_close((got * step).sum(), difference, rtol=1e-6, atol=0)

    @pytest.mark.parametrize("spectrum, pair", [([1.0, 2.0, 2.0, 3.0], (1, 2)), ([0.0, 5.0, 7.0, 7.0], (2, 3))])
    def test_a_loss_that_depends_on_the_basis_names_the_pair(self, spectrum, pair):
        values = torch.tensor(spectrum, dtype=torch.float64)
        a = random_symmetric(2, 3, 4)
        a[1, 2] = gallery.with_eigenvalues(values, torch.Generator().manual_seed(0))
        weight = torch.randn(4, 4, dtype=torch.float64)
        wanted = rf"eigh: eigenvalues {pair[0]} and {pair[1]} of matrix \(1, 2\) are numerically equal"
        with pytest.raises(torch.linalg.LinAlgError, match=wanted):
            self.gradient(a, lambda w, v: (v * weight).sum())

    def test_two_functions_of_a_are_not_guessed(self):
        """⟨G, exp A⟩ + ⟨H, A⟩ has a gradient at A = 2I, but the gradients by λ and V do not determine it."""
        a, g, h = 2 * torch.eye(3, dtype=torch.float64), *torch.randn(2, 3, 3, dtype=torch.float64)
        with pytest.raises(torch.linalg.LinAlgError, match="more than one function of A"):
            self.gradient(a, lambda w, v: ((v * w.exp()) @ v.mT * g).sum() + ((v * w) @ v.mT * h).sum())

    def test_second_derivatives_raise(self):
        a = torch.eye(3, dtype=torch.float64).requires_grad_()
        values, vectors = ot.linalg.eigh(a)
        with pytest.raises(torch.linalg.LinAlgError, match="eigenvalues 0 and 1 are numerically equal: a gradient of"):
            torch.autograd.grad(((vectors * values.exp()) @ vectors.mT).sum(), a, create_graph=True)


class TestContract:
    @pytest.mark.parametrize("upper", [False, True])
    def test_opcheck(self, upper):
        ops, a = torch.ops.overtone, random_symmetric(2, 3, 5).requires_grad_()
        torch.library.opcheck(ops.eigh_ex.default, (a, upper, True))
        torch.library.opcheck(ops.eigh.default, (a, upper, True, "eigh"))
        torch.library.opcheck(ops.eigh_ex.default, (a.detach(), upper, False))
        values, vectors, info = ops.eigh_ex(a.detach(), upper, True)
        grads = torch.randn_like(values), torch.randn_like(vectors)
        for given in (grads, (None, grads[1]), (grads[0], None)):
            torch.library.opcheck(ops.eigh_backward.default, (*given, values, vectors, info))
            torch.library.opcheck(ops.eigh_gradient.default, (*given, values, vectors, info))

    def test_compile(self):
        calls = [(random_symmetric(b, n, dtype=torch.float32).requires_grad_(),) for b, n in ((3, 6), (5, 9), (40, 17))]
        compiling.check_compiles(lambda a: tuple(ot.linalg.eigh(a)), calls)
        compiling.check_compiles(lambda a: ot.linalg.eigvalsh(a), calls)
        compiling.check_compiles(lambda a: tuple(ot.linalg.eigh_ex(a))[:2], calls)

    def test_compiled_it_raises_too(self):
        torch._dynamo.reset()
        solve = torch.compile(lambda a: ot.linalg.eigh(a).eigenvectors * 2, fullgraph=True)
        a = random_symmetric(3, 4)
        solve(a)
        a[2] = math.nan
        with pytest.raises(torch.linalg.LinAlgError, match=r"eigh: A: matrix \(2,\)"):
            solve(a)

    def test_compiled_it_names_the_pair(self):
        torch._dynamo.reset()
        weight = torch.randn(3, 3)
        loss = torch.compile(lambda a: (ot.linalg.eigh(a).eigenvectors * weight).sum(), fullgraph=True)
        a = torch.ones(3, 3).requires_grad_()
        with pytest.raises(torch.linalg.LinAlgError, match="eigenvalues 0 and 1 are numerically equal"):
            loss(a).backward()
