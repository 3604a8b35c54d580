"""The CUDA kernel of qr, run on the host: the CPU solver's gallery and ratios, shapes, neighbours, orders of warps."""

from __future__ import annotations

import math

import pytest
import torch
from ops.linalg.test_eigh import bits
from ops.linalg.test_qr import assert_is_qr, gallery, randn

DTYPES = (torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
class TestGallery:
    @pytest.mark.parametrize("n", [1, 2, 3, 8, 17, 32])
    def test_every_member(self, host_cuda, n, dtype):
        members = gallery(n, dtype)
        a = torch.stack(list(members.values()))
        (q, r), info = host_cuda.qr(a)
        assert not info.any()
        assert_is_qr(a, q, r, list(members))

    @pytest.mark.parametrize(("rows", "columns"), [(5, 3), (3, 5), (1, 9), (9, 1), (32, 7), (7, 32)])
    @pytest.mark.parametrize("complete", [False, True])
    def test_shapes(self, host_cuda, rows, columns, complete, dtype):
        a = randn(3, rows, columns, dtype=dtype)
        a[1, :, columns // 2 :] = 0
        (q, r), info = host_cuda.qr(a, complete=complete)
        assert not info.any()
        assert_is_qr(a, q, r)
        assert torch.equal(host_cuda.qr(a, complete=complete, need_q=False).results[1], r)

    def test_small_columns_keep_their_digits(self, host_cuda, dtype):
        a = randn(1, 12, 12, dtype=dtype)
        exponent = -torch.arange(12) * (100 if dtype == torch.float32 else 900) // 12
        (q, r), (q_scaled, r_scaled) = (host_cuda.qr(x).results for x in (a, torch.ldexp(a, exponent)))
        assert torch.equal(q_scaled, q) and torch.equal(r_scaled, torch.ldexp(r, exponent))

    def test_bad_members_and_orders(self, host_cuda, dtype):
        a = randn(6, 7, 7, dtype=dtype)
        good = host_cuda.qr(a)
        for order in ("reverse", 1):
            for one, other in zip(good.results, host_cuda.qr(a, order).results, strict=True):
                assert torch.equal(bits(one), bits(other))
        a[0, 0, 1], a[3, 6, 6] = math.nan, math.inf
        bad = host_cuda.qr(a)
        assert bad.info.tolist() == [1, 0, 0, 1, 0, 0]
        for now, before in zip(bad.results, good.results, strict=True):
            assert now[bad.info == 1].isnan().all()
            assert torch.equal(bits(now[bad.info == 0]), bits(before[bad.info == 0]))
        assert host_cuda.qr(a[:0]).info.shape == (0,)
