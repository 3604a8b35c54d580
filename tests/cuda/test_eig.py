"""The CUDA kernels of eigvals, run on the host: the CPU solver's gallery and ratios, neighbours, orders of warps."""

from __future__ import annotations

import math

import pytest
import torch
from ops.linalg.test_eig import RATIO, assert_ratios, backward_errors, randn, softmax
from ops.linalg.test_eigh import bits
from support import general_gallery

DTYPES = (torch.float32, torch.float64)
# n, and who works on a matrix; the block kernels at small sizes too, around the warp and the eight reflectors.
PATHS = ((1, "warp"), (2, "warp"), (3, "warp"), (5, "warp"), (16, "warp"), (32, "warp"))
PATHS += ((2, "block"), (5, "block"), (17, "block"), (33, None))
PATHS += ((4, "block_global"), (13, "block_global"), (36, "block_global"))
ORDERS = ("reverse", 1)


def values_of(result):
    assert not result.info.any(), result.info.nonzero().flatten().tolist()
    return result.results[0]


@pytest.mark.parametrize("dtype", DTYPES)
class TestGallery:
    @pytest.mark.parametrize(("n", "path"), PATHS)
    def test_every_member(self, host_cuda, n, path, dtype):
        names, a = general_gallery.batch(n, dtype)
        assert_ratios(backward_errors(a, values_of(host_cuda.eigvals(a, path))), names)

    def test_a_size_that_needs_packing(self, host_cuda, dtype):
        """n = 197 in float32 fits into every architecture's shared memory, but only packed."""
        n = 197 if dtype == torch.float32 else 130
        assert host_cuda._path("eig", torch.empty(1, n, n, dtype=dtype), None).name == "block_global"
        a = softmax(1, n, n, dtype=dtype)
        values = values_of(host_cuda.eigvals(a))
        assert_ratios(backward_errors(a, values[:, :: n // 3]))
        trace = a.double().diagonal(dim1=-2, dim2=-1).sum(-1)
        assert (values.to(torch.complex128).sum(-1) - trace).abs().max() <= RATIO * n * torch.finfo(dtype).eps

    @pytest.mark.parametrize(("n", "path"), [(9, "warp"), (11, "block"), (40, "block_global")])
    def test_orders_of_warps_change_no_bit(self, host_cuda, n, path, dtype):
        a = torch.cat((randn(3, n, n), softmax(2, n, n))).to(dtype)
        first = torch.view_as_real(values_of(host_cuda.eigvals(a, path)))
        for order in ORDERS:
            assert torch.equal(bits(torch.view_as_real(values_of(host_cuda.eigvals(a, path, order)))), bits(first))

    @pytest.mark.parametrize(("n", "path"), [(7, "warp"), (7, "block"), (34, "block_global")])
    def test_a_bad_member_sets_its_own_info(self, host_cuda, n, path, dtype):
        a = randn(6, n, n, dtype=dtype)
        good = torch.view_as_real(values_of(host_cuda.eigvals(a, path)))
        a[0, 0, 1], a[3, n - 1, n - 1], a[4, 1, 0] = math.nan, math.inf, -math.inf
        (values,), info = host_cuda.eigvals(a, path)
        assert info.tolist() == [1, 0, 0, 1, 1, 0] and values[info == 1].isnan().all()
        assert torch.equal(bits(torch.view_as_real(values)[info == 0]), bits(good[info == 0]))

    @pytest.mark.parametrize("path", ["warp", "block", "block_global"])
    def test_strides(self, host_cuda, path, dtype):
        a = randn(3, 6, 6, dtype=dtype)
        strided = torch.full((6, 3, 12), math.nan, dtype=dtype)[..., ::2].permute(1, 0, 2)
        strided.copy_(a)
        assert torch.equal(values_of(host_cuda.eigvals(strided, path)), values_of(host_cuda.eigvals(a, path)))

    def test_empty_batch(self, host_cuda, dtype):
        for n in (3, 40):
            assert host_cuda.eigvals(torch.empty(0, n, n, dtype=dtype)).info.shape == (0,)

    @pytest.mark.parametrize("path", ["warp", "block", "block_global"])
    def test_row_stochastic(self, host_cuda, path, dtype):
        for n in (1, 2, 9, 24):
            a = softmax(3, n, n, dtype=dtype)
            generator = torch.Generator().manual_seed(0)
            special = ("uniform attention", "causal attention", "one-hot rows", "permutation")
            a = torch.cat(
                (a, *(general_gallery.GALLERY[name](n, dtype, generator).to(dtype)[None] for name in special))
            )
            values = values_of(host_cuda.eigvals(a, path, row_stochastic=True))
            assert ((values[:, 0] - 1).abs() <= RATIO * n * torch.finfo(dtype).eps).all()
            assert_ratios(backward_errors(a, values))
        a[1, 2, 3] += 1e-3
        (values,), info = host_cuda.eigvals(a, path, row_stochastic=True)
        assert info.tolist() == [0, 2, 0, 0, 0, 0, 0] and values[1].isnan().all()

    @pytest.mark.parametrize("path", ["warp", "block", "block_global"])
    def test_triangular_matrices_give_their_diagonal(self, host_cuda, path, dtype):
        a = softmax(2, 12, 12, dtype=dtype)
        order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
        a = torch.cat((a.tril(), a.triu(), a.tril()[:, order][:, :, order]))
        values = values_of(host_cuda.eigvals(a, path))
        assert (values.imag == 0).all()
        assert torch.equal(values.real.sort().values, a.diagonal(dim1=-2, dim2=-1).sort().values)

    def test_no_size_stalls_on_uniform_attention(self, host_cuda, dtype):
        for n in range(1, 33, 3):
            values = values_of(host_cuda.eigvals(torch.full((1, n, n), 1 / n, dtype=dtype)))
            bound = RATIO * n * torch.finfo(dtype).eps
            assert (values[values.abs() < 0.5].abs() <= bound).all() and (values - 1).abs().min() <= bound


@pytest.mark.parametrize("path", ["warp", "block", "block_global"])
def test_the_same_eigenvalues_as_the_cpus(host_cuda, cpu_kernels, path):
    """In the same order: one algorithm."""
    a = torch.cat((randn(4, 12, 12), softmax(4, 12, 12)))
    ours = values_of(host_cuda.eigvals(a, path))
    torch.testing.assert_close(ours, torch.ops.overtone.eig_ex(a, False, False, False)[0])
