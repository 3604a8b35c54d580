"""The CUDA kernels of eigh, run on the host: the CPU solver's gallery and ratios, neighbours, orders of warps."""

from __future__ import annotations

import math

import pytest
import torch
from ops.linalg.test_eigh import bits, check_members, check_values, random_symmetric
from support import gallery

DTYPES = (torch.float32, torch.float64)
# n, and who works on a matrix; both kernels at small sizes, around the warp, and where the launches change over.
PATHS = ((1, "warp"), (2, "warp"), (3, "warp"), (8, "warp"), (17, "warp"), (32, "warp"))
PATHS += ((1, "block"), (3, "block"), (16, "block"), (33, None))
ORDERS = ("reverse", 1)


@pytest.mark.parametrize("dtype", DTYPES)
class TestGallery:
    @pytest.mark.parametrize(("n", "path"), PATHS)
    def test_every_member(self, host_cuda, n, path, dtype):
        names, a = gallery.symmetric_batch(n, dtype)
        (values, vectors), info = host_cuda.eigh(a, path)
        check_members(names, a, (values, vectors, info))
        (alone, _), info = host_cuda.eigh(a, path, vectors=False)
        assert not info.any()
        check_values(a, alone, values)

    @pytest.mark.parametrize("n", [64, 97])
    def test_large(self, host_cuda, n, dtype):
        names = ["random", "wilkinson", "rank one"]
        generator = torch.Generator().manual_seed(0)
        a = torch.stack([gallery.SYMMETRIC[name](n, dtype, generator).to(dtype) for name in names])
        (values, vectors), info = host_cuda.eigh(a)
        check_members(names, a, (values, vectors, info))

    @pytest.mark.parametrize(("n", "path"), [(9, "warp"), (9, "block"), (40, None)])
    def test_orders_of_warps_change_no_bit(self, host_cuda, n, path, dtype):
        a = random_symmetric(5, n, dtype=dtype)
        first = host_cuda.eigh(a, path)
        for order in ORDERS:
            for one, other in zip(first.results, host_cuda.eigh(a, path, order).results, strict=True):
                assert torch.equal(bits(one), bits(other))

    @pytest.mark.parametrize(("n", "path"), [(7, "warp"), (7, "block"), (32, "warp")])
    def test_a_bad_member_sets_its_own_info(self, host_cuda, n, path, dtype):
        a = random_symmetric(6, n, dtype=dtype)
        good = host_cuda.eigh(a, path)
        a[0, n - 1, 0], a[3, n - 1, n - 1], a[4, 1, 1] = math.nan, math.inf, -math.inf
        bad = host_cuda.eigh(a, path)
        assert bad.info.tolist() == [1, 0, 0, 1, 1, 0]
        for now, before in zip(bad.results, good.results, strict=True):
            assert now[bad.info == 1].isnan().all()
            assert torch.equal(bits(now[bad.info == 0]), bits(before[bad.info == 0]))

    @pytest.mark.parametrize("path", ["warp", "block"])
    def test_only_the_triangle_is_read_in_any_layout(self, host_cuda, path, dtype):
        a = random_symmetric(3, 6, dtype=dtype)
        hidden = torch.ones(6, 6).triu(1).bool()
        wanted = host_cuda.eigh(a, path).results[0]
        strided = torch.full((6, 3, 12), math.nan, dtype=dtype)[..., ::2].permute(1, 0, 2)
        for upper, mask in ((False, hidden), (True, hidden.T)):
            strided.copy_(a.masked_fill(mask, math.nan))
            values = host_cuda.eigh(strided, path, upper=upper).results[0]
            torch.testing.assert_close(values, wanted)
            assert torch.equal(values, host_cuda.eigh(strided.contiguous(), path, upper=upper).results[0])

    def test_empty_batch(self, host_cuda, dtype):
        for n in (3, 40):
            assert host_cuda.eigh(torch.empty(0, n, n, dtype=dtype)).info.shape == (0,)


@pytest.mark.parametrize("path", ["warp", "block"])
def test_closed_forms(host_cuda, path):
    eye = torch.eye(9).expand(2, 9, 9)
    (values, vectors), _ = host_cuda.eigh(eye, path)
    assert torch.equal(vectors, eye) and torch.equal(values, torch.ones(2, 9))
    a = gallery.clement(13, torch.float64, torch.Generator())[None]
    torch.testing.assert_close(host_cuda.eigh(a, path).results[0][0], torch.arange(-12, 13, 2).double())
