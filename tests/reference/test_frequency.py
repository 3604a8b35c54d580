"""The reference of the frequency ops against explicit matrices in float64 and the exact oracles of MATH §7."""

from __future__ import annotations

import pytest
import torch
from support import shapes
from torch.autograd import gradcheck, gradgradcheck

from overtone import reference

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def tokens(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def averaging(mask: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """Π as a matrix, entry by entry: row i averages the valid tokens it may see; rows of invalid tokens are zero."""
    n = mask.shape[0]
    pi = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        seen = [j for j in range(n) if mask[j] and (j <= i or not is_causal)]
        for j in seen:
            pi[i, j] = 1 / len(seen) if mask[i] else 0.0
    return pi


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_components_are_the_projections(is_causal, masked):
    x = tokens(9, 5)
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 1], dtype=torch.bool) if masked else torch.ones(9, dtype=torch.bool)
    pi = averaging(mask, is_causal)
    low, high = reference.frequency_components(x, mask=mask if masked else None, is_causal=is_causal)
    torch.testing.assert_close(low, pi @ x)
    torch.testing.assert_close(high, (torch.diag(mask.double()) - pi) @ x)


def test_norms_are_frobenius_norms_of_the_projections():
    x = tokens(2, 3, 7, 4)
    pi = torch.full((7, 7), 1 / 7, dtype=torch.float64)
    low, high = reference.frequency_norms(x)
    for b in range(2):
        for h in range(3):
            torch.testing.assert_close(low[b, h], (pi @ x[b, h]).norm())
            torch.testing.assert_close(high[b, h], (x[b, h] - pi @ x[b, h]).norm())


def test_norms_are_those_of_one_row_and_its_copies():
    row = torch.tensor([3.0, 4.0])
    norms = reference.frequency_norms(row.expand(9, 2))
    assert norms.low == 15.0 and norms.high == 0.0 and norms.ratio == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("centre", [1.0, 1000.0])
def test_tiny_high_frequencies_keep_their_digits(dtype, centre):
    """HFC/LFC = 1e-6 with tokens far from zero, right to 1e-4 (MATH §1)."""
    mean = centre * (1 + tokens(1, 192).abs())
    x = (mean + 1e-6 * mean * tokens(197, 192, seed=1)).to(dtype)
    exact = x.double()
    truth = (exact - exact.mean(0)).norm() / (exact.mean(0).norm() * 197**0.5)
    ratio = reference.frequency_norms(x).ratio
    assert 5e-7 < truth < 2e-6
    assert abs(ratio.double() - truth) <= 1e-4 * truth


def test_filters_compose():
    """F(F(x; a, b); c, d) = F(x; ac, bd)."""
    x = tokens(2, 11, 3)
    twice = reference.frequency_filter(reference.frequency_filter(x, 0.7, -1.3), 2.0, 0.4)
    torch.testing.assert_close(twice, reference.frequency_filter(x, 1.4, -0.52))


def test_low_frequencies_have_no_high_ones():
    low, high = reference.frequency_components(tokens(6, 4))
    assert reference.frequency_norms(low).high < 1e-14
    assert reference.frequency_norms(high).low < 1e-14


def test_channel_gains_are_per_channel():
    x, low, high = tokens(6, 4), tokens(4, seed=1), tokens(4, seed=2)
    mean = x.mean(0)
    torch.testing.assert_close(reference.frequency_filter(x, low, high), low * mean + high * (x - mean))


@pytest.mark.parametrize("is_causal", [False, True])
def test_de_escalation_takes_the_mean_off(is_causal):
    x = tokens(8, 3)
    wanted = x - 0.3 * averaging(torch.ones(8, dtype=torch.bool), is_causal) @ x
    torch.testing.assert_close(reference.de_escalate(x, 0.3, is_causal=is_causal), wanted)


def test_de_escalation_is_idempotent_and_leaves_no_low_frequencies():
    once = reference.de_escalate(tokens(8, 3))
    torch.testing.assert_close(reference.de_escalate(once), once)
    assert reference.frequency_norms(once).low < 1e-14


def test_causal_filter_sees_no_later_token():
    x = tokens(8, 3)
    changed = x.clone()
    changed[5:] += 100
    before, after = (reference.frequency_filter(t, 0.2, 1.5, is_causal=True) for t in (x, changed))
    assert torch.equal(before[:5], after[:5])


@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_may_hold_anything_and_gets_no_gradient(is_causal):
    mask = torch.tensor([1, 0, 1, 1, 0], dtype=torch.bool)
    x = tokens(5, 3)
    x[~mask] = float("nan")
    x.requires_grad_()
    y = reference.frequency_filter(x, 0.5, 2.0, mask=mask, is_causal=is_causal)
    norms = reference.frequency_norms(x, mask=mask)
    (y.sum() + norms.low + norms.high).backward()
    valid = reference.frequency_filter(x.detach()[mask], 0.5, 2.0, is_causal=is_causal)
    torch.testing.assert_close(y[mask], valid)
    assert (y[~mask] == 0).all() and (x.grad[~mask] == 0).all() and x.grad.isfinite().all()


def test_a_wholly_masked_sample_is_zero():
    x = tokens(2, 4, 3).requires_grad_()
    mask = torch.tensor([[True] * 4, [False] * 4])
    norms = reference.frequency_norms(x, mask=mask)
    (norms.low + norms.high).sum().backward()
    assert norms.low[1] == 0 and norms.high[1] == 0 and (x.grad[1] == 0).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes(dtype):
    """Half types: the statistics are float32 ones of the given values, the filter's result is rounded once."""
    x = tokens(2, 33, 16, dtype=dtype)
    exact = x.double()
    mean = exact.mean(-2, keepdim=True)
    y, norms = reference.frequency_filter(x, 0.5, 2.0), reference.frequency_norms(x)
    assert y.dtype == dtype
    assert norms.low.dtype == norms.high.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    statistics_eps, eps = torch.finfo(norms.low.dtype).eps, torch.finfo(dtype).eps
    torch.testing.assert_close(norms.high.double(), (exact - mean).norm(dim=(1, 2)), rtol=8 * statistics_eps, atol=0)
    truth = 0.5 * mean + 2.0 * (exact - mean)
    assert ((y.double() - truth).abs() <= eps / 2 * truth.abs() + 8 * statistics_eps * truth.abs().max()).all()


@pytest.mark.parametrize("layout", shapes.LAYOUTS)
def test_strides_do_not_matter(layout):
    x = tokens(2, 7, 5)
    x = x[:1].expand(2, 7, 5).contiguous() if layout == "expanded" else x
    strided = shapes.with_layout(x, layout)
    torch.testing.assert_close(reference.frequency_norms(strided), reference.frequency_norms(x))
    torch.testing.assert_close(reference.frequency_filter(strided, 0.1, 2.0), reference.frequency_filter(x, 0.1, 2.0))


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0), (2, 1, 3)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_empty_and_single(shape, is_causal):
    x = tokens(*shape)
    assert reference.frequency_filter(x, 0.5, 2.0, is_causal=is_causal).shape == shape
    norms = reference.frequency_norms(x)
    assert norms.low.shape == norms.high.shape == shape[:1]
    assert (norms.high == 0).all()
    torch.testing.assert_close(norms.low, x.flatten(1).norm(dim=1))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_filter_gradients(masked, is_causal):
    x, low, high = (t.requires_grad_() for t in (tokens(2, 5, 3), tokens(3, seed=1), tokens(3, seed=2)))
    mask = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 1, 1, 0]], dtype=torch.bool) if masked else None
    call = lambda *args: reference.frequency_filter(*args, mask=mask, is_causal=is_causal)  # noqa: E731
    assert gradcheck(call, (x, low, high)) and gradgradcheck(call, (x, low, high))


def test_norm_gradients_are_the_components_over_their_norms():
    x = tokens(6, 4).requires_grad_()
    norms = reference.frequency_norms(x)
    mean = x.detach().mean(0, keepdim=True)
    low = torch.autograd.grad(norms.low, x, retain_graph=True)[0]
    high = torch.autograd.grad(norms.high, x)[0]
    torch.testing.assert_close(low, mean.expand(6, 4) / norms.low.detach())
    torch.testing.assert_close(high, (x.detach() - mean) / norms.high.detach())
    assert gradcheck(lambda x: tuple(reference.frequency_norms(x)), (x,))
    assert gradgradcheck(lambda x: tuple(reference.frequency_norms(x)), (x,))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("masked", [False, True])
def test_equal_tokens_have_no_high_frequency(dtype, masked):
    for n in (*range(1, 70), 103, 197, 577):
        x = tokens(2, 1, 33, dtype=dtype).expand(2, n, 33).clone().requires_grad_()
        mask = shapes.random_mask((2, n), torch.Generator().manual_seed(n)) if masked else None
        high = reference.frequency_norms(x, mask=mask).high
        assert high.tolist() == [0, 0] and not torch.autograd.grad(high.sum(), x)[0].any(), n


@pytest.mark.parametrize("dtype, most", [(torch.float32, 118), (torch.float64, 1000)])
def test_norms_at_every_scale(dtype, most):
    """Multiplying by a power of two is exact, so norms are multiplied by it and their gradients are the same."""
    x = tokens(2, 9, 7, dtype=dtype)

    def norms_and_gradient(x):
        x.requires_grad_()
        norms = reference.frequency_norms(x)
        return torch.stack(norms).detach(), torch.autograd.grad(norms.low.sum() + 0.3 * norms.high.sum(), x)[0]

    norms, gradient = norms_and_gradient(x.clone())
    for exponent in range(-most, most + 1, most // 10):
        scaled_norms, scaled_gradient = norms_and_gradient(x * 2.0**exponent)
        assert torch.equal(scaled_norms * 2.0**-exponent, norms), exponent
        torch.testing.assert_close(scaled_gradient, gradient, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_norm_gradients_are_zero_at_zero_norms():
    for x in (torch.zeros(4, 3), torch.ones(4, 3)):
        x.requires_grad_()
        assert (torch.autograd.grad(reference.frequency_norms(x).high, x)[0] == 0).all()
