"""reference.spectrum: definitions, intervals, and the composite gradients of MATH §4."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from overtone.reference.linalg import qr
from overtone.reference.spectrum import compose, general, symmetric
from overtone.types import Spectrum

REGIMES = ("sharpen", "smooth")
SIGN = {"sharpen": -1, "smooth": 1}


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("regime", REGIMES)
def test_symmetric_is_v_lambda_v_transposed(regime):
    theta, psi = randn(2, 5, 5), randn(2, 5, seed=1)
    spectrum = symmetric(theta, psi, regime)
    v = spectrum.basis_in
    identity = torch.eye(5, dtype=torch.float64).expand(2, 5, 5)
    torch.testing.assert_close(v.mT @ v, identity)
    torch.testing.assert_close(spectrum.basis_out, v.mT)
    assert torch.equal(spectrum.eigenvalues, SIGN[regime] * psi**2)
    weight = compose(spectrum)
    torch.testing.assert_close(weight, weight.mT)
    torch.testing.assert_close(torch.linalg.eigvalsh(weight), spectrum.eigenvalues.sort(-1).values)
    r = v.mT @ theta  # upper triangular with a positive diagonal: V is the one QR factor
    assert (r.diagonal(dim1=-2, dim2=-1) > 0).all() and r.tril(-1).abs().max() < 1e-13


def test_symmetric_basis_is_continuous_in_theta():
    theta, step = randn(6, 6), 1e-7 * randn(6, 6, seed=1)
    before, after = (symmetric(t, randn(6, seed=2)).basis_in for t in (theta, theta + step))
    assert (before - after).abs().max() < 1e-5


def test_equal_eigenvalues_are_a_multiple_of_the_identity():
    spectrum = symmetric(randn(4, 4), torch.full((4,), 0.5, dtype=torch.float64), "sharpen")
    torch.testing.assert_close(compose(spectrum), -0.25 * torch.eye(4, dtype=torch.float64))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounded_eigenvalues_stay_in_the_half_open_interval(regime, dtype):
    psi = torch.tensor([0.0, 1e-30, 1e-3, 1.0, 30.0, 1e6, 1e15], dtype=dtype)
    size = SIGN[regime] * symmetric(torch.eye(7, dtype=dtype), psi, regime, bounded=True).eigenvalues
    assert (size > 0).all() and (size <= 1).all() and size[0] == 1


def test_bounded_eigenvalues_start_where_the_documentation_says():
    wanted = torch.tensor([0.01, 0.5, 1.0], dtype=torch.float64)
    psi = (1 / wanted - 1).sqrt()
    eigenvalues = symmetric(torch.eye(3, dtype=torch.float64), psi, "smooth", bounded=True).eigenvalues
    torch.testing.assert_close(eigenvalues, wanted)


@pytest.mark.parametrize("regime, wanted", [("sharpen", [-1.0, -0.5, 0.0, 0.0]), ("smooth", [0.0, 0.0, 0.0, 1.0])])
def test_general_is_clipped(regime, wanted):
    v, eigenvalues = randn(4, 4), torch.tensor([-3.0, -0.5, 0.0, 2.0], dtype=torch.float64)
    spectrum = general(v, eigenvalues, regime)
    assert spectrum.eigenvalues.tolist() == wanted
    torch.testing.assert_close(spectrum.basis_in @ spectrum.basis_out, torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(compose(spectrum) @ v, v * torch.tensor(wanted, dtype=torch.float64))


def test_a_clip_stops_the_gradient_outside_only():
    eigenvalues = torch.tensor([-3.0, -0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    general(randn(4, 4), eigenvalues, "sharpen").eigenvalues.sum().backward()
    assert eigenvalues.grad.tolist() == [0.0, 1.0, 1.0, 0.0]


def test_the_composed_weight_is_the_transpose_of_h():
    """vec(X + A X W) = (I + H ⊗ A) vec(X) with H = Wᵀ and vec stacking columns."""
    w = compose(general(randn(3, 3), -torch.rand(3, dtype=torch.float64)))
    a, x = randn(4, 4, seed=1).softmax(-1), randn(4, 3, seed=2)
    vec = x.T.reshape(-1)
    updated = vec + torch.kron(w.T.contiguous(), a) @ vec
    torch.testing.assert_close(updated.reshape(3, 4).T, x + a @ x @ w)


@pytest.mark.parametrize("function", [symmetric, general])
def test_unknown_regime(function):
    with pytest.raises(ValueError, match="regime: got 'free', wanted one of 'sharpen', 'smooth'"):
        function(torch.eye(2), torch.ones(2), "free")


def eigenvalue_cases():
    return [randn(5, seed=3), torch.full((5,), -0.5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)]


@pytest.mark.parametrize("eigenvalues", eigenvalue_cases(), ids=["distinct", "equal", "zero"])
class TestCompositeGradients:
    """MATH §4: closed forms that never divide by a gap, against autograd."""

    def test_symmetric(self, eigenvalues):
        theta, grad = randn(5, 5).requires_grad_(), randn(5, 5, seed=4)
        eigenvalues = eigenvalues.clone().requires_grad_()
        q, r = qr(theta)
        compose(Spectrum(q, eigenvalues, q.mT)).backward(grad)
        q, r, lam = q.detach(), r.detach(), eigenvalues.detach()
        s = q.T @ (grad + grad.T) / 2 @ q
        wanted = q @ (2 * s * (lam[None, :] - lam[:, None])).tril(-1) @ torch.linalg.inv(r).T
        torch.testing.assert_close(theta.grad, wanted, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(eigenvalues.grad, s.diagonal())

    def test_general(self, eigenvalues):
        v, grad = randn(5, 5).requires_grad_(), randn(5, 5, seed=4)
        eigenvalues = eigenvalues.clone().requires_grad_()
        compose(Spectrum(v, eigenvalues, torch.linalg.inv(v))).backward(grad)
        lam, inverse = eigenvalues.detach(), torch.linalg.inv(v.detach())
        s = v.detach().T @ grad @ inverse.T
        wanted = inverse.T @ (s * (lam[None, :] - lam[:, None]))
        torch.testing.assert_close(v.grad, wanted, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(eigenvalues.grad, s.diagonal())


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("bounded", [False, True])
def test_gradcheck_symmetric(regime, bounded):
    args = randn(2, 4, 4).requires_grad_(), randn(2, 4, seed=1).requires_grad_()
    assert gradcheck(lambda theta, psi: tuple(symmetric(theta, psi, regime, bounded)), args)


@pytest.mark.parametrize("regime", REGIMES)
def test_gradcheck_general(regime):
    inside = (SIGN[regime] * torch.tensor([0.1, 0.4, 0.6, 0.9], dtype=torch.float64)).requires_grad_()
    args = randn(4, 4).requires_grad_(), inside
    assert gradcheck(lambda v, eigenvalues: compose(general(v, eigenvalues, regime)), args)


@pytest.mark.parametrize("shape", [(0, 3), (2, 1)])
def test_empty_and_single(shape):
    batch, n = shape
    for spectrum in (symmetric(randn(batch, n, n), randn(batch, n)), general(randn(batch, n, n), randn(batch, n))):
        assert compose(spectrum).shape == (batch, n, n)
