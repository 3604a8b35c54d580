"""Composed weights on the CPU kernels: Q Λ Qᵀ and V Λ V⁻¹ against float64, equal eigenvalues, contracts, levels."""

from __future__ import annotations

import math

import pytest
import torch
from support import accuracy, compiling, repeat, shapes
from torch.autograd import gradcheck, gradgradcheck

from overtone import reference
from overtone.ops.linalg import inverse as spectrum

pytestmark = pytest.mark.usefixtures("cpu_kernels")

DTYPES = (torch.float32, torch.float64)
KINDS = ("compose_symmetric", "compose_general")
EIGENVALUES = ("distinct", "equal", "zero")


def call(kind, backend="cpu"):
    return lambda matrix, eigenvalues: getattr(spectrum, kind)(matrix, eigenvalues, backend=backend)


def plain(kind):
    """The reference, on one thread: MKL's batched inverse can hang on more."""

    def compose(matrix, eigenvalues):
        with repeat.threads(1):
            return getattr(reference.spectrum, kind)(matrix, eigenvalues)

    return compose


def draw(batch, n, dtype=torch.float32, eigenvalues="distinct", seed=0):
    """A matrix far from singular: its condition number would be all that is compared."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(*batch, n, n, generator=generator, dtype=torch.float64) + 2 * math.sqrt(n) * torch.eye(n)
    values = torch.randn(*batch, n, generator=generator, dtype=torch.float64)
    values = {"distinct": values, "equal": values * 0 - 0.5, "zero": values * 0}[eigenvalues]
    return matrix.to(dtype).requires_grad_(), values.to(dtype).requires_grad_()


def check(kind, batch, n, dtype, eigenvalues="distinct"):
    draws = [draw(batch, n, dtype, eigenvalues, seed) for seed in range(3)]
    accuracy.check_against_truth(call(kind), plain(kind), draws[0], more_draws=draws[1:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("poisoned_empty")
class TestExactness:
    @pytest.mark.parametrize("n", [2, 3, 16, 31, 33, 48, 49, 65, 97, 192, 200])
    def test_sizes(self, kind, dtype, n):
        check(kind, (2,), n, dtype)

    @pytest.mark.parametrize("batch", [(), (5,), (2, 3), (2, 1, 2)])
    def test_batches(self, kind, dtype, batch):
        check(kind, batch, 17, dtype)

    @pytest.mark.parametrize("shape", [((0,), 3), ((2,), 0), ((2,), 1)])
    def test_empty_and_single(self, kind, dtype, shape):
        matrix, eigenvalues = draw(*shape, dtype)
        weight = call(kind)(matrix, eigenvalues)
        assert weight.shape == matrix.shape
        torch.testing.assert_close(weight, eigenvalues.diag_embed())  # up to 1 × 1 the basis cancels
        weight.sum().backward()
        assert (matrix.grad == 0).all()
        torch.testing.assert_close(eigenvalues.grad, torch.ones_like(eigenvalues))

    def test_every_level(self, isa_level, cpu_kernels, kind, dtype):
        for n in (9, 50):
            check(kind, (2,), n, dtype)
            assert cpu_kernels.last_kernel() == f"{kind}_backward/{isa_level}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [5, 50])
class TestEqualEigenvalues:
    """λ = c gives c·I whatever the basis is: the basis has no gradient, and λ's is that of the trace."""

    def test_weight_and_gradient(self, kind, n):
        matrix, eigenvalues = draw((2,), n, torch.float64, "equal")
        weight = call(kind)(matrix, eigenvalues)
        torch.testing.assert_close(weight, -0.5 * torch.eye(n, dtype=torch.float64).expand_as(weight))
        grad = torch.randn(2, n, n, dtype=torch.float64)
        weight.backward(grad)
        assert (matrix.grad == 0).all()
        torch.testing.assert_close(eigenvalues.grad.sum(-1), grad.diagonal(dim1=-2, dim2=-1).sum(-1))

    def test_one_pair(self, kind, n):
        matrix, eigenvalues = draw((), n, torch.float64)
        with torch.no_grad():
            eigenvalues[1] = eigenvalues[0]
        results = []
        for compose in (call(kind), plain(kind)):
            results.append(torch.autograd.grad(compose(matrix, eigenvalues).sin().sum(), (matrix, eigenvalues)))
        for ours, wanted in zip(*results, strict=True):
            torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eigenvalues", EIGENVALUES)
def test_gradcheck(kind, eigenvalues):
    args = draw((2,), 4, torch.float64, eigenvalues)
    assert gradcheck(call(kind), args)
    assert gradgradcheck(call(kind), args)
    assert gradcheck(call(kind), draw((1,), 50, torch.float64, eigenvalues), fast_mode=True)


def test_the_symmetric_weight_is_exactly_symmetric():
    for n in (3, 17, 49, 100):
        weight = call("compose_symmetric")(*draw((2,), n))
        assert torch.equal(weight, weight.mT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [6, 70])
def test_the_general_weight_has_the_eigenvectors(dtype, n):
    """W V = V Λ, to rounding times the condition number of V."""
    v = torch.randn(3, n, n, dtype=torch.float64).to(dtype)
    eigenvalues = torch.randn(3, n, dtype=torch.float64).to(dtype)
    weight = call("compose_general")(v, eigenvalues).double()
    v, eigenvalues = v.double(), eigenvalues.double()
    residual = torch.linalg.matrix_norm(weight @ v - v * eigenvalues[:, None, :])
    size = torch.linalg.matrix_norm(v) * eigenvalues.abs().amax(-1) * torch.linalg.cond(v)
    assert (residual <= 10 * torch.finfo(dtype).eps * size).all()


def test_rows_in_any_order_are_pivoted():
    """Zeros on the diagonal, and a matrix that is no more than a permutation."""
    n = 50
    v = torch.eye(n)[torch.randperm(n, generator=torch.Generator().manual_seed(0))]
    eigenvalues = torch.arange(n).float()
    wanted = v @ eigenvalues.diag() @ v.T
    assert torch.equal(call("compose_general")(v, eigenvalues), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
class TestMemory:
    @pytest.mark.parametrize("layout", shapes.LAYOUTS)
    def test_strides(self, kind, dtype, layout):
        matrix, eigenvalues = draw((2, 3), 20, dtype)
        strided = shapes.with_layout(matrix.detach(), layout)
        values = eigenvalues.detach().mT.contiguous().mT
        assert torch.equal(call(kind)(strided, values), call(kind)(strided.contiguous(), eigenvalues))

    def test_strided_gradients(self, kind, dtype):
        args = draw((2,), 33, dtype)
        grad = torch.randn(2, 33, 33, dtype=torch.float64).to(dtype)
        weight = call(kind)(*args)
        strided = torch.autograd.grad(weight, args, grad.mT, retain_graph=True)
        for ours, wanted in zip(strided, torch.autograd.grad(weight, args, grad.mT.contiguous()), strict=True):
            assert torch.equal(ours, wanted)

    @pytest.mark.parametrize("n", [9, 60])
    def test_threads(self, kind, dtype, n):
        repeat.check_bit_equal(call(kind), draw((7,), n, dtype))

    def test_the_place_in_the_batch_does_not_matter(self, kind, dtype):
        matrix, eigenvalues = draw((5,), 40, dtype)
        together = call(kind)(matrix, eigenvalues)
        assert all(torch.equal(call(kind)(matrix[i], eigenvalues[i]), together[i]) for i in range(5))


@pytest.mark.parametrize("kind", KINDS)
class TestContract:
    def test_opcheck(self, kind):
        for batch, n in (((2,), 4), ((), 50), ((0,), 3)):
            torch.library.opcheck(getattr(torch.ops.overtone, kind), draw(batch, n))

    def test_compiles(self, kind):
        compiling.check_compiles(call(kind), [draw((2,), 4), draw((3,), 6), draw((4,), 50)])

    def test_backward_twice(self, kind):
        repeat.check_backward_twice(call(kind), draw((2,), 9))

    def test_wrong_arguments(self, kind):
        name = "theta" if kind == "compose_symmetric" else "v"
        with pytest.raises(ValueError, match=rf"{kind}: {name}: got .*, wanted a floating-point or complex tensor"):
            call(kind)(torch.ones(2, 3), torch.ones(2))
        with pytest.raises(ValueError, match=rf"{kind}: eigenvalues: got .*\[3\] .*, wanted torch.float32 of shape"):
            call(kind)(torch.eye(2), torch.ones(3))
        with pytest.raises(ValueError, match=f"{kind}: eigenvalues: got torch.float64"):
            call(kind)(torch.eye(2), torch.ones(2).double())

    def test_not_finite(self, kind):
        matrix, eigenvalues = draw((2, 2), 5)
        matrix = matrix.detach()
        matrix[1, 0, 2, 2] = math.nan
        with pytest.raises(RuntimeError, match=rf"{kind}: matrix \(1, 0\) of .* not finite"):
            call(kind)(matrix, eigenvalues)

    def test_reference_backend(self, kind):
        args = draw((2,), 4)
        assert torch.equal(call(kind, "reference")(*args), plain(kind)(*args))


def test_a_singular_basis_is_named():
    v = torch.eye(4).repeat(3, 1, 1)
    v[1, :, 2] = 0
    with pytest.raises(RuntimeError, match=r"compose_general: matrix \(1,\) of v has no inverse: it is singular"):
        call("compose_general")(v, torch.ones(3, 4))


def test_dependent_columns_have_a_weight_and_no_gradient():
    theta = torch.eye(4).repeat(3, 1, 1)
    theta[1, :, 2] = 0
    weight = call("compose_symmetric")(theta.requires_grad_(), torch.ones(3, 4))
    torch.testing.assert_close(weight, torch.eye(4).expand(3, 4, 4))
    with pytest.raises(RuntimeError, match=r"matrix \(1,\) of theta has no gradient: its columns are linearly dep"):
        weight.sum().backward()
