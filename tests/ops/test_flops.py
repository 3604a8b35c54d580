"""torch.utils.flop_counter.FlopCounterMode counts our ops as it counts their plain formulation."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from support import calls
from torch.utils.flop_counter import FlopCounterMode

import overtone as ot
from overtone import reference
from overtone.ops import attention, flops, linear
from overtone.ops.linalg.inverse import inverse


def counted(function, args: tuple) -> tuple[int, int]:
    """Forward's count, and backward's."""
    with FlopCounterMode(display=False) as forward:
        result = function(*args)
    results = [y for y in (result if isinstance(result, tuple) else (result,)) if y.requires_grad]
    with FlopCounterMode(display=False) as backward:
        if results:
            torch.autograd.backward(results, [torch.ones_like(y) for y in results])
    return forward.get_total_flops(), backward.get_total_flops()


def leaves(shapes: tuple, needs: tuple) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape).requires_grad_(need) for shape, need in zip(shapes, needs, strict=True))


def packed_reference(qkv, *rest):
    return reference.spectral_attention(*attention.unpack_qkv(qkv), *rest)


ATTENTION = ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4), (12,), (12, 6))
CASES = {
    "attention": (ot.spectral_attention, reference.spectral_attention, ATTENTION),
    "packed": (attention.spectral_attention_qkvpacked, packed_reference, ((2, 5, 3, 3, 4), (12,), (12, 6))),
    "linear": (linear.linear, reference.linear, ((2, 5, 4), (7, 4))),
}


class TestProducts:
    @pytest.mark.parametrize("name", CASES)
    def test_as_the_reference(self, name, cpu_kernels):
        """Forward and backward, for every set of arguments that may need a gradient."""
        ours, plain, shapes = CASES[name]
        for needs in itertools.product((False, True), repeat=len(shapes)):
            args = leaves(shapes, needs)
            assert counted(ours, args) == counted(plain, args), needs

    @pytest.mark.parametrize("need_x, need_weights", [(False, False), (True, False), (False, True), (True, True)])
    def test_mlp(self, need_x, need_weights, cpu_kernels):
        """Its backward makes the weights' gradients together."""
        args = leaves(((2, 5, 4), (6, 4), (6,), (3, 6), (3,)), (need_x, *(need_weights,) * 4))
        assert counted(linear.mlp, args) == counted(reference.mlp, args)

    @pytest.mark.parametrize("regime", ["free", "sharpen"])
    def test_a_model(self, regime, cpu_kernels):
        """A step counts what the reference's does, and the factorisations."""
        model = ot.models.vit_tiny(16, 8, num_classes=3, depth=2, regime=regime)
        images = torch.randn(2, 3, 16, 16, requires_grad=True)
        ours = counted(model, (images,))
        with ot.use_backend("reference"):
            plain = counted(model, (images,))
        if regime == "free":
            assert ours == plain
        else:  # backward of a basis is made of other products
            assert ours[0] == plain[0] > 0
            assert ours[1] > 0


class TestSolvers:
    @pytest.mark.parametrize("vectors", [False, True])
    def test_decompositions_as_lapack(self, vectors, cpu_kernels):
        A = torch.randn(5, 12, 12, requires_grad=vectors)
        A = A + A.mT
        cubes = 5 * 12**3
        expected = {ot.linalg.eigh: 9, ot.linalg.eigvalsh: 9 if vectors else 4 / 3, ot.linalg.eig: 25}
        expected[ot.linalg.eigvals] = 25 if vectors else 10
        for function, count in expected.items():
            assert counted(function, (A,))[0] == round(count * cubes), function

    @pytest.mark.parametrize("rows, columns", [(12, 12), (30, 12), (12, 30)])
    def test_qr(self, rows, columns, cpu_kernels):
        """LAPACK's working note 41: geqrf, and orgqr of the same size."""
        k = min(rows, columns)
        long = max(rows, columns)
        geqrf = 2 * long * k**2 - 2 / 3 * k**3
        orgqr = 4 * rows * k * k - 2 * (rows + k) * k**2 + 4 / 3 * k**3
        A = torch.randn(3, rows, columns)
        assert counted(ot.linalg.qr, (A,))[0] == round(3 * (geqrf + orgqr))
        assert counted(lambda A: ot.linalg.qr(A, "r"), (A,))[0] == round(3 * geqrf)

    @pytest.mark.parametrize("function", [ot.linalg.eigh, ot.linalg.eigvalsh, ot.linalg.eig])
    def test_gradients_as_their_formula(self, function, cpu_kernels):
        """The products of ∂A's formula: those of PyTorch, which for eig solves with V where we have W at hand."""
        A = torch.randn(2, 5, 5).requires_grad_()
        symmetric = function is not ot.linalg.eig

        def loss(function):
            def of(A):
                result = function(A + A.mT if symmetric else A)
                return sum(y.abs().sum() for y in (result if isinstance(result, tuple) else (result,)))

            return of

        plain = getattr(torch.linalg, function.__name__)
        product = 2 * A.numel() * A.shape[-1]
        expected = counted(loss(plain), (A,))[1] + (0 if symmetric else product)
        assert counted(loss(function), (A,))[1] == expected

    def test_inverse(self, cpu_kernels):
        """As LAPACK's getrf and getri: 2n³, and two products backward."""
        matrix = (torch.randn(3, 6, 6) + 4 * torch.eye(6)).requires_grad_()
        assert counted(inverse, (matrix,)) == (3 * 2 * 6**3, 3 * 4 * 6**3)


class TestRegistration:
    def test_every_op_is_counted_or_has_no_products(self):
        assert set(flops.FORMULAS) | set(flops.WITHOUT_PRODUCTS) == calls.registered_ops()

    def test_formulas_take_every_call(self, cpu_kernels):
        """Of the whole table, forward and backward."""
        for call in calls.CALLS.values():
            args = tuple(x.requires_grad_() for x in call.args())
            with FlopCounterMode(display=False):
                torch.autograd.grad([y.sum() for y in call.function(*args)], args)

    @pytest.mark.parametrize("first", ["overtone", "torch.utils.flop_counter"])
    def test_in_either_order_of_imports(self, first):
        """Importing overtone does not import the counter, which imports Triton."""
        script = f"""
            import sys, torch, {first}
            assert "triton" not in sys.modules or {first!r} != "overtone"
            import overtone, torch.utils.flop_counter as counter
            assert torch.ops.overtone.linear in counter.flop_registry
        """
        lines = "\n".join(line.strip() for line in script.splitlines())
        subprocess.run([sys.executable, "-c", lines], check=True, timeout=120)
