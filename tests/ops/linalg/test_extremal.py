"""extremal_eigvals: against the whole spectrum, and against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from support import general_gallery

from overtone import linalg
from overtone.ops.linalg import extremal
from overtone.reference.enclosures import on_mean_zero
from overtone.reference.linalg import perron_first

DTYPES = (torch.float32, torch.float64)


def smooth_attention(count, n, dtype, seed=0):
    """Attention of random queries and keys of width 4: few eigenvalues stand apart, the others crowd around zero."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, count, n, 4, generator=generator, dtype=torch.float64)
    return (q @ k.mT / 2).softmax(-1).to(dtype)


def check(a, result):
    """Both are eigenvalues up to the residual, and none of the other eigenvalues is further out by more than that."""
    eps = torch.finfo(a.dtype).eps
    values = perron_first(linalg.eigvals(a.double()))[..., 1:]
    allowed = 10 * (result.residual.double() + 10 * a.shape[-1] * eps)
    for found in (result.smallest, result.second):
        assert ((values - found.to(values.dtype)[..., None]).abs().amin(-1) <= allowed).all()
    assert (result.smallest.real - values.real.amin(-1) <= allowed).all()
    assert (values.abs().amax(-1) - result.second.abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [2, 3, 64, 129, 197])
def test_smooth_attention(dtype, n):
    a = smooth_attention(5, n, dtype)
    result = linalg.extremal_eigvals(a)
    assert result.smallest.shape == result.second.shape == result.residual.shape == (5,)
    check(a, result)


def test_arnoldi_converges_without_the_whole_spectrum(monkeypatch):
    a = smooth_attention(4, 640, torch.float32)
    monkeypatch.setattr(extremal, "eigvals_ex", None)
    result = linalg.extremal_eigvals(a)
    assert (result.residual > 0).any()
    monkeypatch.undo()
    check(a, result)


def test_a_spectrum_that_fills_a_disk_is_solved_whole():
    a = torch.randn(3, 150, 150, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    result = linalg.extremal_eigvals(a.reshape(3, 1, 150, 150))
    assert (result.residual == 0).all() and result.second.shape == (3, 1)
    check(a.reshape(3, 1, 150, 150), result)


@pytest.mark.parametrize("name", ["uniform attention", "causal attention", "permutation", "cycle", "equal rows"])
def test_special(name):
    a = general_gallery.GALLERY[name](140, torch.float64, torch.Generator().manual_seed(0))
    check(a, linalg.extremal_eigvals(a))


def test_mixture_of_identity_and_uniform():
    a = 0.7 * torch.eye(150, dtype=torch.float64) + 0.3 / 150
    result = linalg.extremal_eigvals(a)
    assert abs(result.smallest - 0.7) < 1e-13 and abs(result.second - 0.7) < 1e-13


def test_errors():
    with pytest.raises(torch.linalg.LinAlgError, match=r"extremal_eigvals: A: matrix \(1,\) has rows that do not sum"):
        linalg.extremal_eigvals(torch.stack([torch.eye(3), 2 * torch.eye(3)]))
    with pytest.raises(torch.linalg.LinAlgError, match="did not converge or has results beyond the largest number$"):
        linalg.extremal_eigvals(torch.full((3, 3), math.nan))
    with pytest.raises(ValueError, match="extremal_eigvals: A: got torch.float32 of shape"):
        linalg.extremal_eigvals(torch.ones(1, 1))
    with pytest.raises(TypeError, match="extremal_eigvals: tolerance: got str"):
        linalg.extremal_eigvals(torch.eye(3), tolerance="small")


def test_no_matrices():
    assert linalg.extremal_eigvals(torch.zeros(0, 200, 200)).second.shape == (0,)


def _local(n, g):
    distance = (torch.arange(n)[:, None] - torch.arange(n)).abs().double()
    logits = -distance / 5 + 0.5 * torch.randn(n, n, generator=g, dtype=torch.float64)
    return logits.masked_fill(distance > 20, -math.inf).softmax(-1)


def _doubly_stochastic(n, g):
    a = torch.randn(n, n, generator=g, dtype=torch.float64).exp()
    a = a + a.T
    for _ in range(50):
        a = a / a.sum(-1, keepdim=True).sqrt() / a.sum(-2, keepdim=True).sqrt()
    return (a + a.T) / 2


def _two_groups(n, g):
    """Tokens of two groups do not see each other: the eigenvalue 1 is double."""
    first = max(1, n // 3)
    return torch.block_diag(softmax(first, g), softmax(n - first, g))


def _hidden_pair(n, g):
    """Two tokens swap, with an eigenvalue of −0.9, and nobody else sees them."""
    pair = torch.tensor([[0.05, 0.95], [0.95, 0.05]], dtype=torch.float64)
    return torch.block_diag(smooth_attention(1, n - 2, torch.float64)[0], pair) if n > 2 else pair


def softmax(n, g, sharpness=1.0):
    return (sharpness * torch.randn(n, n, generator=g, dtype=torch.float64)).softmax(-1)


def _eye(n):
    return torch.eye(n, dtype=torch.float64)


FAMILIES = {
    "near identity": lambda n, g: 0.9 * _eye(n) + 0.1 * softmax(n, g),
    "near uniform": lambda n, g: softmax(n, g, 1e-3),
    "near permutation": lambda n, g: 0.99 * _eye(n)[torch.randperm(n, generator=g)] + 0.01 * softmax(n, g),
    "smooth": lambda n, g: smooth_attention(1, n, torch.float64, seed=n)[0],
    "sharp": lambda n, g: softmax(n, g, 30.0),
    "local": _local,
    "symmetric, doubly stochastic": _doubly_stochastic,
    "two groups": _two_groups,
    "hidden pair": _hidden_pair,
    "identity": lambda n, g: _eye(n),
    "uniform": lambda n, g: torch.full((n, n), 1 / n, dtype=torch.float64),
    "causal": lambda n, g: general_gallery.GALLERY["causal attention"](n, torch.float64, g),
    "anticausal": lambda n, g: general_gallery.GALLERY["causal attention"](n, torch.float64, g).flip(0, 1),
    "chain": lambda n, g: _eye(n)[[0, *range(n - 1)]],
    "one-hot": lambda n, g: _eye(n)[torch.randint(0, n, (n,), generator=g)],
}


def extremes(a):
    """The least real part and the largest modulus of all eigenvalues but the Perron one, in float64."""
    if not a.triu(1).any():
        values = a.diagonal()[1:]
    elif not a.tril(-1).any():
        values = a.diagonal()[:-1]
    else:
        values = torch.linalg.eigvals(on_mean_zero(a))
    return torch.tensor([values.real.min(), values.abs().max()])


def conditioning(a, size):
    """How far the extremes move if A is changed by that much, relatively: what no solver can do better than."""
    wanted, moved = extremes(a), torch.zeros(2)
    for seed in range(3):
        change = torch.randn(a.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        change = change - change.mean(-1, keepdim=True)
        moved = torch.maximum(moved, (extremes(a + change * (size * a.norm() / change.norm())) - wanted).abs())
    return moved


@pytest.mark.parametrize("steps", ["as chosen", "always"])
@pytest.mark.parametrize("family", FAMILIES)
def test_extremes_are_those_of_the_whole_spectrum(family, steps, monkeypatch):
    """With Arnoldi's steps where they pay, and wherever there is a matrix."""
    if steps == "always":
        monkeypatch.setattr(extremal, "LEAST_TOKENS", 2)
        monkeypatch.setattr(extremal, "TOKENS_PER_MATRIX", 0)
    for n in (2, 3, 16, 65, 100, 197):
        generator = torch.Generator().manual_seed(n)
        for dtype in DTYPES:
            a = FAMILIES[family](n, generator).to(dtype)
            a = a / a.sum(-1, keepdim=True)
            result, eps = linalg.extremal_eigvals(a), torch.finfo(dtype).eps
            error = torch.tensor([result.smallest.real, result.second.abs()]) - extremes(a.double())
            # Backward errors: a solver's n ε, and of Arnoldi the residual and what may be beyond, the tolerance.
            backward = max(10 * eps, float(result.residual))
            beyond = 100 * n**0.5 * eps if result.residual > 0 else 20 * n * eps
            assert (error.abs() <= 5 * conditioning(a.double(), backward) + beyond).all(), (n, dtype, error)


def test_near_identity_in_float32():
    """A cluster of eigenvalues at 0.9, from which a spurious zero would stand apart."""
    for seed in range(10):
        a = 0.9 * torch.eye(197) + 0.1 * softmax(197, torch.Generator().manual_seed(seed)).float()
        result = linalg.extremal_eigvals(a)
        assert (torch.tensor([result.smallest.real, result.second.abs()]) - extremes(a.double())).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_normal", [True, False])
@pytest.mark.parametrize("hidden", [-0.8, 0.95, -0.55, 0.3, -0.2])
def test_a_converged_pair_that_is_not_extremal_is_not_taken(hidden, is_normal, dtype):
    """An invariant subspace without the extremal eigenvector, however it was found: powers of the rest tell."""
    n, known = 60, torch.tensor([0.9, -0.5, 0.4], dtype=torch.float64)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        rest = 0.1 * (2 * torch.rand(n - 4, generator=generator, dtype=torch.float64) - 1)
        values = torch.cat([known, torch.tensor([hidden], dtype=torch.float64), rest])
        vectors = torch.randn(n, n, generator=generator, dtype=torch.float64)
        vectors = torch.linalg.qr(vectors).Q if is_normal else torch.eye(n, dtype=torch.float64) + vectors / n**0.5 / 2
        matrix = (vectors * values @ torch.linalg.inv(vectors)).to(dtype)[None]
        q = torch.linalg.qr(vectors[:, :3]).Q.to(dtype)[None]
        extremes = torch.tensor([[-0.5], [0.9]], dtype=torch.complex128)
        certain = extremal._nothing_is_beyond(extremes, matrix, q, 1e-6)
        assert bool(certain) == (-0.5 < hidden < 0.9)


def test_ex_reports_and_the_others_do_not_change():
    a = smooth_attention(5, 30, torch.float32)
    bad = a.clone()
    bad[1], bad[3, 0, 0] = 2 * a[1], math.nan
    result, wanted = linalg.extremal_eigvals_ex(bad), linalg.extremal_eigvals(a)
    assert result.info.tolist() == [0, 2, 0, 1, 0]
    assert result.smallest[[1, 3]].isnan().all() and result.second[[1, 3]].isnan().all()
    for found, alone in zip(result, wanted, strict=False):
        assert torch.equal(found[[0, 2, 4]], alone[[0, 2, 4]])
    with pytest.raises(ValueError, match="extremal_eigvals_ex: A: got"):
        linalg.extremal_eigvals_ex(torch.ones(2, 3))
