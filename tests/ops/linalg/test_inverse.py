"""Inverses on the CPU kernels: against float64, what has none, gradients, contracts, every instruction set."""

from __future__ import annotations

import math

import pytest
import torch
from support import accuracy, compiling, repeat, shapes
from torch.autograd import gradcheck, gradgradcheck

import overtone as ot
from overtone import reference
from overtone.ops.linalg.inverse import inverse, inverse_ex

pytestmark = pytest.mark.usefixtures("cpu_kernels")

DTYPES = (torch.float32, torch.float64)


def by_kernels(A):
    return inverse(A, backend="cpu")


def draw(batch, n, dtype=torch.float32, seed=0):
    """A matrix far from singular: its condition number would be all that is compared."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(*batch, n, n, generator=generator, dtype=torch.float64) + 2 * math.sqrt(n) * torch.eye(n)
    return matrix.to(dtype).requires_grad_()


def check(batch, n, dtype):
    draws = [(draw(batch, n, dtype, seed),) for seed in range(3)]
    accuracy.check_against_truth(by_kernels, reference.linalg.inverse, draws[0], more_draws=draws[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("poisoned_empty")
class TestExactness:
    @pytest.mark.parametrize("n", [2, 3, 16, 31, 33, 48, 49, 65, 97, 192, 200])
    def test_sizes(self, dtype, n):
        check((2,), n, dtype)

    @pytest.mark.parametrize("batch", [(), (5,), (2, 3), (2, 1, 2)])
    def test_batches(self, dtype, batch):
        check(batch, 17, dtype)

    @pytest.mark.parametrize("shape", [((0,), 3), ((2,), 0), ((2,), 1)])
    def test_empty_and_single(self, dtype, shape):
        A = draw(*shape, dtype)
        x = by_kernels(A)
        assert x.shape == A.shape
        torch.testing.assert_close(x, 1 / A)
        x.sum().backward()
        torch.testing.assert_close(A.grad, -1 / A.detach().square())

    def test_every_isa(self, isa_level, cpu_kernels, dtype):
        for n in (9, 50):
            check((2,), n, dtype)
            assert cpu_kernels.last_kernel() == f"inverse/{isa_level}"


def test_gradcheck():
    for batch, n, fast in (((2,), 4, False), ((1,), 50, True)):
        assert gradcheck(by_kernels, (draw(batch, n, torch.float64),), fast_mode=fast)
    assert gradgradcheck(by_kernels, (draw((2,), 4, torch.float64),))


def test_rows_in_any_order_are_pivoted():
    """Zeros on the diagonal, and a matrix that is no more than a permutation."""
    permutation = torch.eye(50)[torch.randperm(50, generator=torch.Generator().manual_seed(0))]
    assert torch.equal(by_kernels(permutation), permutation.mT)


@pytest.mark.parametrize("dtype", DTYPES)
class TestMemory:
    @pytest.mark.parametrize("layout", shapes.LAYOUTS)
    def test_strides(self, dtype, layout):
        A = draw((2, 3), 20, dtype).detach()
        strided = shapes.with_layout(A, layout)
        assert torch.equal(by_kernels(strided), by_kernels(strided.contiguous()))

    @pytest.mark.parametrize("n", [9, 60])
    def test_threads(self, dtype, n):
        repeat.check_bit_equal(by_kernels, (draw((7,), n, dtype),))

    def test_the_place_in_the_batch_does_not_matter(self, dtype):
        A = draw((5,), 40, dtype)
        together = by_kernels(A)
        assert all(torch.equal(by_kernels(A[i]), together[i]) for i in range(5))


class TestContract:
    def test_opcheck(self):
        for batch, n in (((2,), 4), ((), 50), ((0,), 3)):
            torch.library.opcheck(torch.ops.overtone.inverse_ex, (draw(batch, n),))
            torch.library.opcheck(torch.ops.overtone.inverse, (draw(batch, n), "inverse"))

    def test_compiles(self):
        compiling.check_compiles(by_kernels, [(draw((2,), 4),), (draw((3,), 6),), (draw((4,), 50),)])

    def test_backward_twice(self):
        repeat.check_backward_twice(by_kernels, (draw((2,), 9),))

    def test_autocast_has_no_say(self):
        grads = []
        for enabled in (False, True):
            A = draw((2,), 9)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                by_kernels(A).square().sum().backward()
            grads.append(A.grad)
        assert grads[0].dtype == torch.float32 and torch.equal(*grads)

    def test_wrong_arguments(self):
        with pytest.raises(ValueError, match=r"inverse: A: got .*, wanted a floating-point or complex tensor"):
            by_kernels(torch.ones(2, 3))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
class TestWhatHasNone:
    def bad(self):
        A = draw((2, 2), 5).detach()
        A[0, 1, 2, 2] = math.nan
        A[1, 0, :, 3] = 0
        return A.requires_grad_()

    def test_it_has_an_info_and_spoils_no_other(self, backend):
        A = self.bad()
        x, info = inverse_ex(A, backend=backend)
        assert info.tolist() == [[0, 1], [1, 0]] and info.dtype == torch.int32
        assert x[info == 1].isnan().all()
        good = inverse(A[info == 0], backend=backend)
        torch.testing.assert_close(x[info == 0], good)
        x[info == 0].sum().backward()
        assert A.grad[info == 0].isfinite().all()

    def test_the_strict_form_names_it(self, backend):
        with pytest.raises(torch.linalg.LinAlgError, match=r"inverse: A: matrix \(0, 1\), \(1, 0\) is singular or not"):
            inverse(self.bad(), backend=backend)

    def test_complex_matrices_are_the_references(self, backend):
        A = draw((2,), 4, torch.float64).detach() + 1j * draw((2,), 4, torch.float64, 1).detach()
        if backend == "cpu":
            with pytest.raises(ot.BackendError, match="complex128"):
                inverse(A, backend="cpu")
        torch.testing.assert_close(inverse(A) @ A, torch.eye(4).to(A).expand(2, 4, 4))
