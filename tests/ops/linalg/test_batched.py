"""The CUDA implementations made of torch's batched products, on CPU tensors: ratios, gradients, and no host waits."""

from __future__ import annotations

import math

import pytest
import torch
from ops.linalg.test_inverse import draw
from ops.linalg.test_qr import assert_is_qr, conditioned, randn
from support import accuracy
from support import gallery as symmetric
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overtone import reference
from overtone.ops.linalg.batched import eigh_backward, inverse_ex, orthonormal, qr_backward

DTYPES = (torch.float32, torch.float64)
EPS = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}


def layers(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Those of a ViT, from orthogonal to a condition number of 10⁶."""
    count = 12 if dtype == torch.float32 else 3  # float64 is no training's
    left, right = (torch.linalg.qr(randn(n, n, seed=seed)).Q for seed in (1, 2))
    values = torch.logspace(0, -6, count, dtype=torch.float64)[:, None] ** torch.linspace(0, 1, n, dtype=torch.float64)
    return ((left * values[:, None, :]) @ right).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
class TestOrthonormal:
    @pytest.mark.parametrize("n", [1, 2, 3, 16, 33, 65, 197])
    def test_sizes(self, dtype, n):
        a = randn(3, n, n, dtype=dtype)
        assert_is_qr(a, *orthonormal(a))
        assert_is_qr(randn(2, n + 5, n, dtype=dtype), *orthonormal(randn(2, n + 5, n, dtype=dtype)))

    @pytest.mark.parametrize("n", [8, 64, 192])
    def test_ill_conditioned(self, dtype, n):
        """Condition numbers up to what the dtype can express, and columns of very different size."""
        conditions = (1e3, 1e6, 1 / EPS[dtype] / 10)
        grades = torch.logspace(0, -30, n, dtype=torch.float64)
        members = [conditioned(n, condition) for condition in conditions]
        a = torch.stack([*members, members[0] * grades, members[1] * grades.flip(0)]).to(dtype)
        q, r = orthonormal(a)
        assert_is_qr(a, q, r)
        assert (r.diagonal(dim1=-2, dim2=-1) > 0).all()

    @pytest.mark.slow
    @pytest.mark.parametrize("n", [192, 384, 768])
    def test_a_models_layers(self, dtype, n):
        """At LAPACK's ratios."""
        a = layers(n, dtype)
        q, r = orthonormal(a)
        assert_is_qr(a, q, r)
        assert (r.diagonal(dim1=-2, dim2=-1) > 0).all()

    @pytest.mark.slow
    @pytest.mark.parametrize("n", [192, 384, 768])
    def test_inverses_of_a_models_layers(self, dtype, n):
        """‖AX − 1‖ and ‖XA − 1‖ are rounding times the condition number, the better of which LAPACK promises."""
        a = layers(n, dtype)
        x, info = inverse_ex(a)
        assert (info == 0).all()
        a, x, unit = a.double(), x.double(), torch.eye(n, dtype=torch.float64)
        size = n * EPS[dtype] * torch.linalg.matrix_norm(a, 1) * torch.linalg.matrix_norm(x, 1)
        assert (torch.linalg.matrix_norm(a @ x - unit, 1) <= size).all()
        assert (torch.linalg.matrix_norm(x @ a - unit, 1) <= size).all()

    def test_nothing_is_wider_than_the_matrices(self, dtype):
        """Consumer GPUs multiply float64 at 1/64 of float32's rate."""

        class Dtypes(TorchDispatchMode):
            found: set[torch.dtype] = set()

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                self.found |= {x.dtype for x in tree_leaves(result) if isinstance(x, torch.Tensor)}
                return result

        a = randn(2, 8, 8, dtype=dtype)
        with Dtypes() as dtypes:
            q, r = orthonormal(a)
            inverse_ex(a)
            qr_backward(q, None, q, r)
        assert {found for found in dtypes.found if found.is_floating_point} == {dtype}

    def test_extreme_sizes(self, dtype):
        info = torch.finfo(dtype)
        a = randn(9, 9)
        a = torch.stack([a * info.tiny * 1e3, a / a.abs().max() * info.max / 100]).to(dtype)
        q, r = orthonormal(a)
        assert_is_qr(a, q, r)

    def test_empty(self, dtype):
        for shape in ((0, 3, 3), (2, 0, 0), (2, 3, 0)):
            q, r = orthonormal(torch.empty(shape, dtype=dtype))
            assert q.shape == shape and r.shape == (*shape[:-2], shape[-1], shape[-1])

    def test_a_bad_member_spoils_no_other(self, dtype):
        a = randn(3, 20, 20, dtype=dtype)
        good = orthonormal(a)
        a[1, 3, 4] = math.nan
        for now, before in zip(orthonormal(a), good, strict=True):
            assert torch.equal(now[[0, 2]], before[[0, 2]])
            assert now[1].isnan().any()

    def test_it_is_the_kernels_r(self, dtype, cpu_kernels):
        """Unique, so that every backend has the same up to the condition number."""
        a = randn(4, 40, 40, dtype=dtype) + 8 * torch.eye(40, dtype=dtype)
        for ours, theirs in zip(orthonormal(a), torch.ops.overtone.qr_ex(a, False, True), strict=False):
            assert (ours - theirs).abs().max() <= 40 * EPS[dtype] * theirs.abs().max() * torch.linalg.cond(a).max()


@pytest.mark.parametrize("dtype", DTYPES)
class TestInverse:
    @pytest.mark.parametrize("n", [2, 3, 16, 33, 96])
    def test_against_truth(self, dtype, n):
        draws = [(draw((2,), n, dtype, seed).detach(),) for seed in range(3)]
        accuracy.check_against_truth(
            lambda A: inverse_ex(A)[0], reference.linalg.inverse, draws[0], more_draws=draws[1:]
        )

    @pytest.mark.parametrize("shape", [((0,), 3), ((2,), 0), ((2, 3), 1)])
    def test_empty_and_single(self, dtype, shape):
        A = draw(*shape, dtype).detach()
        torch.testing.assert_close(inverse_ex(A)[0], 1 / A)

    def test_a_bad_member_spoils_no_other(self, dtype):
        A = draw((4,), 12, dtype).detach()
        good, _ = inverse_ex(A)
        A[1, 0, 0], A[2, :, 3] = math.nan, 0
        x, info = inverse_ex(A)
        assert info.tolist() == [0, 1, 1, 0]
        assert x[1:3].isnan().all() and torch.equal(x[[0, 3]], good[[0, 3]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_host_wait(dtype):
    """On fake tensors nothing has a value: whatever asked for one, a branch or .item(), would raise."""
    with FakeTensorMode():
        A = torch.empty(12, 192, 192, dtype=dtype)
        assert inverse_ex(A)[0].shape == A.shape and orthonormal(A)[0].shape == A.shape


class TestPrecision:
    """Products are in full precision, whatever torch's switches say, and these are as before afterwards."""

    def switch_off(self):
        torch.set_float32_matmul_precision("highest")
        for switch in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends):
            switch.fp32_precision = "none"

    @pytest.mark.parametrize("how", ["medium", "cuda", "mkldnn", "both", "all"])
    def test_switches(self, how):
        A = draw((2,), 64).detach()
        wanted = inverse_ex(A)[0]
        try:
            if how in ("cuda", "both"):
                torch.backends.cuda.matmul.fp32_precision = "tf32"
            if how in ("mkldnn", "both"):
                torch.backends.mkldnn.matmul.fp32_precision = "bf16"
            if how == "all":
                torch.backends.fp32_precision = "tf32"
            if how == "medium":
                torch.set_float32_matmul_precision("medium")
            before = self.state()
            assert torch.equal(inverse_ex(A)[0], wanted)
            assert self.state() == before
        finally:
            self.switch_off()

    def state(self):
        found = [s.fp32_precision for s in (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)]
        try:
            found.append(torch.get_float32_matmul_precision())
        except RuntimeError:
            found.append("mixed")
        return found

    def test_autocast(self):
        A = draw((2,), 64).detach()
        with torch.autocast("cpu", torch.bfloat16):
            narrow = inverse_ex(A)[0], *orthonormal(A)
        assert all(map(torch.equal, narrow, (inverse_ex(A)[0], *orthonormal(A))))


@pytest.mark.parametrize("dtype", DTYPES)
class TestGradientsOfSolvers:
    """The same as the CPU kernels', which have tests of their own."""

    def check(self, ours, theirs, dtype, scale=1.0):
        size = theirs.abs().max().clamp(min=1)
        assert (ours - theirs).abs().max() <= 100 * scale * EPS[dtype] * size

    @pytest.mark.parametrize("n", [1, 2, 7, 40])
    def test_eigh(self, cpu_kernels, dtype, n):
        generator = torch.Generator().manual_seed(0)
        spectrum_of = torch.linspace(-2, 2, n, dtype=torch.float64)
        a = torch.stack([symmetric.with_eigenvalues(spectrum_of, generator) for _ in range(3)]).to(dtype)
        a[1] = math.nan
        values, vectors, info = torch.ops.overtone.eigh_ex(a, False, True)
        grad_values, grad_vectors = randn(3, n, dtype=dtype), randn(3, n, n, dtype=dtype)
        for grads in ((grad_values, grad_vectors), (grad_values, None), (None, grad_vectors)):
            ours, pair = eigh_backward(*grads, values, vectors, info)
            theirs, their_pair = torch.ops.overtone.eigh_backward(*grads, values, vectors, info)
            self.check(ours, theirs, dtype, n)
            assert torch.equal(pair, their_pair) and (ours[1] == 0).all()

    def test_eigh_at_equal_eigenvalues(self, cpu_kernels, dtype):
        """A function of A has a gradient there, a choice of basis has none, and eigenvalues alone always do."""
        generator = torch.Generator().manual_seed(0)
        a = symmetric.with_eigenvalues(torch.tensor([1.0, 1, 1, 2, 2, 3]), generator).to(dtype)[None].repeat(3, 1, 1)
        values, vectors, info = torch.ops.overtone.eigh_ex(a, False, True)
        weight = symmetric.symmetrized(randn(3, 6, 6)).to(dtype)
        grad_vectors = 2 * weight @ vectors * values.exp()[..., None, :]
        grad_values = (vectors * (weight @ vectors)).sum(-2) * values.exp()
        grad_vectors[1] = randn(6, 6, dtype=dtype, seed=5)
        grad_vectors[2] = 0
        ours, pair = eigh_backward(grad_values, grad_vectors, values, vectors, info)
        theirs, their_pair = torch.ops.overtone.eigh_backward(grad_values, grad_vectors, values, vectors, info)
        assert torch.equal(pair >= 0, their_pair >= 0) and pair[:, 0].ge(0).tolist() == [False, True, False]
        self.check(ours[[0, 2]], theirs[[0, 2]], dtype, 6)

    @pytest.mark.parametrize(("rows", "columns"), [(1, 1), (6, 6), (9, 4), (40, 40)])
    def test_qr(self, cpu_kernels, dtype, rows, columns):
        a = randn(3, rows, columns, dtype=dtype) + 4 * torch.eye(rows, columns, dtype=dtype)
        a[1] = math.nan
        q, r, _ = torch.ops.overtone.qr_ex(a, False, True)
        grad_q, grad_r = randn(3, rows, columns, dtype=dtype), randn(3, columns, columns, dtype=dtype)
        for grads in ((grad_q, grad_r), (grad_q, None), (None, grad_r)):
            theirs = torch.ops.overtone.qr_backward(*grads, q, r)
            self.check(qr_backward(*grads, q, r), theirs, dtype, columns)

    def test_no_host_wait(self, dtype):
        with FakeTensorMode():
            a, v, info = torch.empty(2, 5, 5, dtype=dtype), torch.empty(2, 5, dtype=dtype), torch.empty(2).int()
            grad, pair = eigh_backward(v, a, v, a, info)
            assert grad.shape == a.shape and pair.shape == (2, 2)
            assert qr_backward(a, a, a, a).shape == a.shape
