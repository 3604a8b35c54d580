"""The CUDA kernels of linalg on a real GPU: the suite that the host stand-in ran, gradients, streams, no host waits."""

from __future__ import annotations

import math

import pytest
import torch
from ops.linalg.test_eig import assert_ratios, backward_errors, softmax
from ops.linalg.test_eigh import check_members, random_symmetric, spectral_function
from ops.linalg.test_inverse import draw
from ops.linalg.test_qr import assert_is_qr, randn
from ops.linalg.test_qr import gallery as qr_gallery
from support import accuracy, gallery, general_gallery

import overtone as ot
from overtone import _extension
from overtone.ops.linalg.inverse import inverse, inverse_ex

pytestmark = pytest.mark.skipif(
    not ot.backends()["cuda"].available or "built without" in ot.backends()["cuda"].detail,
    reason="no CUDA device, or no CUDA kernels: the same source ran on the host",
)

DTYPES = (torch.float32, torch.float64)


def cpu(results):
    return tuple(result.cpu() for result in results)


@pytest.fixture
def no_waits():
    """Whatever makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", DTYPES)
class TestGallery:
    @pytest.mark.parametrize("n", [1, 2, 3, 8, 16, 31, 32, 33, 64, 65, 100])
    def test_eigh(self, dtype, n):
        names, a = gallery.symmetric_batch(n, dtype)
        check_members(names, a, cpu(ot.linalg.eigh_ex(a.cuda(), backend="cuda")))

    @pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 32, 33, 50, 65])
    def test_eigvals(self, dtype, n):
        names, a = general_gallery.batch(n, dtype)
        assert_ratios(backward_errors(a, ot.linalg.eigvals(a.cuda(), backend="cuda").cpu()), names)

    def test_large_eigvals(self, dtype):
        n = _extension.module.cuda_limit("eig", str(dtype).removeprefix("torch."), 0)
        a = softmax(4, n, n, dtype=dtype)
        values = ot.linalg.eigvals(a.cuda(), row_stochastic=True, backend="cuda").cpu()
        assert_ratios(backward_errors(a[:1], values[:1, :: n // 3]))

    @pytest.mark.parametrize("n", [1, 2, 3, 8, 17, 32])
    def test_qr(self, dtype, n):
        members = qr_gallery(n, dtype)
        a = torch.stack(list(members.values()))
        q, r = ot.linalg.qr(a.cuda(), backend="cuda")
        assert_is_qr(a, q.cpu(), r.cpu(), list(members))

    def test_a_bad_member(self, dtype):
        a = random_symmetric(2, 3, 20, dtype=dtype).cuda()
        good = ot.linalg.eigh_ex(a, backend="cuda")
        a[1, 1, 5, 2] = math.nan
        bad = ot.linalg.eigh_ex(a, backend="cuda")
        assert bad.info.nonzero().tolist() == [[1, 1]]
        assert torch.equal(bad.eigenvectors[bad.info == 0], good.eigenvectors[bad.info == 0])
        with pytest.raises(torch.linalg.LinAlgError, match=r"matrix \(1, 1\)"):
            ot.linalg.eigvalsh(a)

    def test_larger_matrices_go_to_torch(self, dtype):
        a = random_symmetric(2, 300, dtype=dtype)
        with pytest.raises(ot.BackendError, match="supports n ≤"):
            ot.linalg.eigh(a.cuda(), backend="cuda")
        check_members(["", ""], a, cpu(ot.linalg.eigh_ex(a.cuda())))

    def test_no_waits(self, dtype, no_waits):
        a = torch.randn(8, 20, 20, device="cuda", dtype=dtype)
        ot.linalg.eigh_ex(a, backend="cuda")
        ot.linalg.eigvals_ex(a, backend="cuda")
        ot.linalg.qr_ex(a, backend="cuda")

    def test_streams(self, dtype):
        a = torch.randn(64, 32, 32, device="cuda", dtype=dtype)
        wanted = ot.linalg.eigvals(a, backend="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            again = ot.linalg.eigvals(a.clone(), backend="cuda")
        stream.synchronize()
        assert torch.equal(torch.view_as_real(again), torch.view_as_real(wanted))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype):
    def separated(seed):
        generator = torch.Generator().manual_seed(seed)
        spectrum_of = torch.linspace(-2, 2, 12, dtype=torch.float64)
        a = torch.stack([gallery.with_eigenvalues(spectrum_of, generator) for _ in range(4)])
        return (a.to("cuda", dtype).requires_grad_(),)

    draws = [separated(seed) for seed in range(6)]
    accuracy.check_against_truth(
        spectral_function(lambda a: ot.linalg.eigh(a, backend="cuda")),
        spectral_function(torch.linalg.eigh),
        draws[0],
        more_draws=draws[1:],
    )
    draws = [((randn(4, 9, 9, seed=s) + 6 * torch.eye(9)).to("cuda", dtype).requires_grad_(),) for s in range(4)]
    accuracy.check_against_truth(
        lambda a: tuple(ot.linalg.qr(a, backend="cuda")),
        lambda a: tuple(ot.reference.linalg.qr(a)),
        draws[0],
        more_draws=draws[1:],
    )


@pytest.mark.parametrize("dtype", DTYPES)
class TestInverse:
    @pytest.mark.parametrize("n", [16, 192])
    def test_against_truth(self, dtype, n):
        draws = [(draw((2,), n, dtype, s).detach().cuda().requires_grad_(),) for s in range(3)]
        accuracy.check_against_truth(
            lambda A: inverse(A, backend="cuda"), ot.reference.linalg.inverse, draws[0], more_draws=draws[1:]
        )

    def test_no_waits(self, dtype):
        A = draw((12,), 192, dtype).detach().cuda().requires_grad_()
        inverse_ex(A, backend="cuda").inverse.sum().backward()  # cuSOLVER's handle is made, which waits
        torch.cuda.set_sync_debug_mode("error")
        try:
            inverse_ex(A, backend="cuda").inverse.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
