"""extremal_eigvals: against the whole spectrum, and against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from kit import general_gallery

from overtone import linalg
from overtone.ops import extremal
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
    a = smooth_attention(4, 197, torch.float32)
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
