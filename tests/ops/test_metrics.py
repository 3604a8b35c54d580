"""The metrics of MATH §6: closed forms, the reference and the public functions side by side."""

from __future__ import annotations

import math

import pytest
import torch
from support import shapes
from torch.autograd import gradcheck

import overtone as ot
from overtone import reference
from overtone.ops import metrics as ops

NAMES = ("token_similarity", "token_diversity", "cosine_similarity", "effective_rank", "stable_rank")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_singular_values(sigma, n, c, dtype=torch.float64):
    k = len(sigma)
    u, v = (torch.linalg.qr(randn(size, k, seed=size)).Q for size in (n, c))
    return ((u * torch.tensor(sigma, dtype=torch.float64)) @ v.T).to(dtype)


def loop_cosine(x):
    """The mean over pairs, pair by pair; zero tokens count as cosine zero."""
    n, total = x.shape[0], 0.0
    for i in range(n):
        for j in range(n):
            size = float(x[i].norm() * x[j].norm())
            total += float(x[i] @ x[j]) / size if i != j and size > 0 else 0.0
    return total / (n * (n - 1))


@pytest.fixture(params=[reference, ops], ids=["reference", "public"])
def m(request):
    return request.param


class TestClosedForms:
    def test_similarity_of_known_tokens(self, m):
        x = torch.tensor([[3.0, 0.0], [1.0, 0.0]])  # mean 2: LFC² = 8, HFC² = 2
        torch.testing.assert_close(m.token_similarity(x).item(), 0.8)
        torch.testing.assert_close(m.token_diversity(x).item(), 0.2)

    @pytest.mark.parametrize(
        "x, wanted", [(torch.ones(4, 3), 1.0), (torch.eye(4), 0.25), (torch.tensor([[1.0], [-1.0]]), 0.0)]
    )
    def test_similarity_of_equal_orthogonal_and_opposite_tokens(self, m, x, wanted):
        torch.testing.assert_close(m.token_similarity(x).item(), wanted)
        torch.testing.assert_close(m.token_diversity(x).item(), 1 - wanted)

    def test_a_tiny_diversity_keeps_its_digits(self, m):
        """t_div = 1e-12 in float32, where 1 − t_sim is zero."""
        mean = 1 + randn(1, 64).abs()
        x = (mean + 1e-6 * randn(50, 64, seed=1)).float()
        exact = x.double()
        truth = (exact - exact.mean(0)).square().sum() / exact.square().sum()
        assert 1e-13 < truth < 1e-11
        assert abs(m.token_diversity(x).double() - truth) <= 2e-4 * truth

    def test_escalation_rate(self, m):
        """r = t_div(x)/t_div(y) = 1 + t_sim(x)(ξ₁/ξ₂ − 1)."""
        x, y = randn(3, 8, 5), randn(3, 8, 5, seed=1) + 0.5
        low = lambda t: t.mean(1, keepdim=True).square().sum((1, 2)) * 8  # noqa: E731
        high = lambda t: (t - t.mean(1, keepdim=True)).square().sum((1, 2))  # noqa: E731
        xi = (low(y) / low(x)) / (high(y) / high(x))
        wanted = 1 + low(x) / (low(x) + high(x)) * (xi - 1)
        torch.testing.assert_close(m.escalation_rate(x, y), wanted)
        assert ((m.escalation_rate(x, y) > 1) == (xi > 1)).all()

    def test_escalation_rate_of_attention(self, m):
        """A row-stochastic average of tokens with a mean makes them more similar."""
        x = randn(6, 4) + 1
        assert m.escalation_rate(x, randn(6, 6, seed=1).softmax(-1) @ x) > 1

    @pytest.mark.parametrize("zeros", [0, 2])
    def test_cosine_is_the_mean_over_pairs(self, m, zeros):
        x = randn(9, 5) + 0.3
        x[:zeros] = 0
        torch.testing.assert_close(m.cosine_similarity(x).item(), loop_cosine(x))

    @pytest.mark.parametrize(
        "x, wanted",
        [
            (torch.tensor([[1.0, 2.0], [10.0, 20.0], [0.1, 0.2]]), 1.0),
            (torch.eye(4), 0.0),
            (torch.tensor([[1.0], [-2.0]]), -1.0),
            (torch.tensor([[1.0, 0], [-0.5, 3**0.5 / 2], [-0.5, -(3**0.5) / 2]]), -0.5),
        ],
    )
    def test_cosine_of_known_tokens(self, m, x, wanted):
        torch.testing.assert_close(m.cosine_similarity(x).item(), wanted, atol=2e-7, rtol=0)

    @pytest.mark.parametrize("n, c", [(5, 5), (5, 9), (9, 5)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_ranks_of_orthogonal_tokens(self, m, n, c, dtype):
        x = with_singular_values([2.0] * 5, n, c, dtype)
        tolerance = 50 * torch.finfo(dtype).eps
        assert abs(m.effective_rank(x) - 5) <= tolerance and abs(m.stable_rank(x) - 5) <= tolerance

    @pytest.mark.parametrize("n, c", [(6, 9), (9, 6)])
    def test_ranks_from_singular_values(self, m, n, c):
        sigma = [4.0, 2.0, 1.0, 1.0]
        x = with_singular_values(sigma, n, c)
        p = [0.5, 0.25, 0.125, 0.125]
        torch.testing.assert_close(m.effective_rank(x).item(), 2 ** -sum(q * math.log2(q) for q in p))
        torch.testing.assert_close(m.stable_rank(x).item(), 22 / 16)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_equal_tokens_have_rank_one(self, m, dtype):
        x = randn(1, 64).to(dtype).expand(197, 64)
        tolerance = 1e-5 if dtype != torch.float64 else 1e-12
        assert abs(m.effective_rank(x) - 1) <= tolerance and abs(m.stable_rank(x) - 1) <= tolerance

    @pytest.mark.parametrize("small", [1e-3, 1e-6])
    def test_effective_rank_in_float32_is_that_of_the_singular_values(self, m, small):
        """The Gram matrix loses nothing: the truth is the effective rank of the float32 tokens' singular values."""
        x = with_singular_values([1.0] + [small] * 15, 40, 16, torch.float32)
        p = torch.linalg.svdvals(x.double())
        p = p / p.sum()
        truth = (-(p * p.log()).sum()).exp()
        svd32 = torch.linalg.svdvals(x)
        svd32 = svd32 / svd32.sum()
        plain = abs((-(svd32 * svd32.log()).sum()).exp() - truth)
        assert abs(m.effective_rank(x).double() - truth) <= 2 * plain + 4 * torch.finfo(torch.float32).eps * truth

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_zero_singular_values_count_for_nothing(self, m, dtype):
        """Small integers, so that the tokens have rank two exactly; 62 singular values of rounding would show."""
        left, right = (torch.randint(-9, 10, (size, 2), dtype=torch.float64) for size in (197, 64))
        x = (left @ right.T).to(dtype)
        p = torch.linalg.eigvals((left.T @ left) @ (right.T @ right)).real.sqrt()  # the two others, from 2 × 2
        p = p / p.sum()
        truth = (-(p * p.log()).sum()).exp()
        assert abs(m.effective_rank(x).double() - truth) <= 4 * torch.finfo(dtype).eps * truth

    def test_effective_rank_in_float64_keeps_digits_that_a_gram_matrix_loses(self, m):
        small = 1e-10
        x = with_singular_values([1.0, small], 8, 6)
        p = small / (1 + small)
        truth_minus_one = math.expm1(-(p * math.log(p) + (1 - p) * math.log1p(-p)))
        assert abs(float(m.effective_rank(x)) - 1 - truth_minus_one) <= 1e-4 * truth_minus_one


class TestDegenerate:
    WANTED = {
        "token_similarity": 1.0,
        "token_diversity": 0.0,
        "cosine_similarity": 0.0,
        "effective_rank": 0.0,
        "stable_rank": 0.0,
    }

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_zero_tokens(self, m, name, dtype):
        x = torch.zeros(2, 4, 3, dtype=dtype, requires_grad=True)
        result = getattr(m, name)(x)
        assert (result == self.WANTED[name]).all()
        result.sum().backward()
        assert (x.grad == 0).all()

    def test_zero_and_equal_tokens_of_the_escalation_rate(self, m):
        equal, different = torch.ones(4, 3), randn(4, 3, dtype=torch.float32)
        assert m.escalation_rate(different, equal) == math.inf
        assert m.escalation_rate(equal, different) == 0
        assert m.escalation_rate(equal, equal).isnan()

    @pytest.mark.parametrize("name", NAMES)
    def test_one_token(self, m, name):
        wanted = {"token_diversity": 0.0, "cosine_similarity": math.nan}.get(name, 1.0)
        result = getattr(m, name)(randn(2, 1, 5, dtype=torch.float32))
        torch.testing.assert_close(result, torch.full((2,), wanted), equal_nan=True)

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0), (0, 0, 0)])
    def test_empty(self, m, name, shape):
        assert getattr(m, name)(torch.zeros(shape)).shape == shape[:1]

    @pytest.mark.parametrize("name", ["effective_rank", "stable_rank"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_bad_sample_hurts_nobody_else(self, m, name, dtype):
        x = randn(3, 6, 4, dtype=dtype)
        good = getattr(m, name)(x)
        x[1, 0, 0] = math.nan
        result = getattr(m, name)(x)
        assert result[1].isnan() and torch.equal(result[[0, 2]], good[[0, 2]])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_rank_deficient_tokens_have_a_finite_gradient(self, m, dtype):
        x = randn(6, 2, dtype=dtype) @ randn(2, 5, dtype=dtype, seed=1)
        x.requires_grad_()
        (m.effective_rank(x) + m.stable_rank(x)).backward()
        assert x.grad.isfinite().all() and (x.grad != 0).any()


class TestOptions:
    @pytest.mark.parametrize("name", NAMES)
    def test_a_mask_leaves_padding_out(self, m, name):
        """The same as the valid tokens alone, whatever padding holds."""
        x = randn(3, 8, 5)
        mask = shapes.random_mask((3, 8), torch.Generator().manual_seed(1))
        mask[0, :3] = True
        x[~mask] = math.nan
        result = getattr(m, name)(x, mask=mask)
        for b in range(3):
            torch.testing.assert_close(result[b], getattr(m, name)(x[b][mask[b]]))

    def test_a_mask_of_the_escalation_rate(self, m):
        x, y, mask = randn(6, 3), randn(6, 3, seed=1), torch.tensor([1, 1, 0, 1, 1, 0], dtype=torch.bool)
        wanted = m.escalation_rate(x[mask], y[mask])
        x[~mask] = y[~mask] = math.nan
        torch.testing.assert_close(m.escalation_rate(x, y, mask=mask), wanted)

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_dtypes(self, m, name, dtype):
        """A result in the statistics' dtype, as accurate as that: half tokens are exact float32 numbers."""
        x = (randn(2, 33, 16) + 0.5).to(dtype)
        result, truth = getattr(m, name)(x), getattr(m, name)(x.double())
        assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        rtol = 32 * torch.finfo(result.dtype).eps
        torch.testing.assert_close(result.double(), truth, rtol=rtol, atol=rtol)

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("layout", ["transposed", "channels_strided", "packed"])
    def test_strides_and_leading_dimensions(self, m, name, layout):
        x = randn(2, 3, 7, 5)
        result = getattr(m, name)(shapes.with_layout(x, layout))
        assert result.shape == (2, 3)
        torch.testing.assert_close(result, getattr(m, name)(x))

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
    def test_gradients(self, m, name, shape):
        x = (randn(2, *shape) + 0.2).requires_grad_()
        assert gradcheck(getattr(m, name), (x,))

    def test_gradients_of_the_escalation_rate(self, m):
        args = randn(2, 4, 3).requires_grad_(), randn(2, 4, 3, seed=1).requires_grad_()
        assert gradcheck(m.escalation_rate, args)

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("dtype, most", [(torch.float32, 118), (torch.bfloat16, 118), (torch.float64, 1000)])
    def test_scale_does_not_matter(self, m, name, masked, dtype, most):
        """Neither to the metric, nor, but for the factor it is divided by, to its gradient; over all exponents."""
        mask = torch.tensor([True, True, False, True, True]) if masked else None
        x = (randn(2, 5, 4) + 0.5).to(dtype)

        def metric_and_gradient(x, function, other=()):
            x.requires_grad_()
            result = function(x, *other, mask=mask)
            return result.detach(), torch.autograd.grad(result.sum(), x)[0].double()

        function = getattr(m, name)
        wanted, gradient = metric_and_gradient(x.clone(), function)
        eps = torch.finfo(wanted.dtype).eps
        for exponent in range(-most, most + 1, most // 5):
            result, scaled_gradient = metric_and_gradient(x * 2.0**exponent, function)
            torch.testing.assert_close(result, wanted, rtol=8 * eps, atol=8 * eps)
            error = (scaled_gradient * 2.0**exponent - gradient).abs().max()
            assert error <= 8 * torch.finfo(dtype).eps * gradient.abs().max(), exponent

    @pytest.mark.parametrize("dtype, most", [(torch.float32, 118), (torch.float64, 1000)])
    def test_scale_does_not_matter_to_the_escalation_rate(self, m, dtype, most):
        x, y = randn(3, 8, 5, dtype=dtype), randn(3, 8, 5, dtype=dtype, seed=1) + 0.5
        wanted = m.escalation_rate(x, y)
        rtol = 8 * torch.finfo(dtype).eps
        for exponent in (-most, -most // 2, most // 2, most):
            factor = 2.0**exponent
            for pair in ((factor * x, y), (x, factor * y), (factor * x, factor * y)):
                torch.testing.assert_close(m.escalation_rate(*pair), wanted, rtol=rtol, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_collapsed_tokens_send_no_gradient_back(self, m, dtype):
        for tokens in (48, 49, 103, 197):
            x = randn(1, 1, 64).to(dtype).expand(1, tokens, 64).clone().requires_grad_()
            for name in ("token_similarity", "token_diversity"):
                (gradient,) = torch.autograd.grad(getattr(m, name)(x).sum(), x)
                assert not gradient.any(), (name, tokens)


class TestPublic:
    @pytest.mark.parametrize("name", NAMES)
    def test_agrees_with_the_reference_far_from_zero(self, name):
        x = (1 + 1e-3 * randn(4, 65, 72)).float()
        ours, plain, truth = getattr(ops, name)(x), getattr(reference, name)(x), getattr(reference, name)(x.double())
        error = (ours.double() - truth).abs().max()
        floor = 4 * torch.finfo(torch.float32).eps * truth.abs().max()
        assert error <= 2 * (plain.double() - truth).abs().max() + floor

    @pytest.mark.parametrize("name", NAMES[:3])
    def test_a_backend_that_cannot_run_raises(self, name):
        with pytest.raises(ot.BackendError, match="'cuda' cannot run"):
            getattr(ops, name)(torch.ones(3, 2), backend="cuda")

    @pytest.mark.parametrize("name", NAMES)
    def test_errors_name_the_argument(self, name):
        with pytest.raises(ValueError, match=rf"{name}: x: got torch.int64 .* wanted a floating-point tensor"):
            getattr(ops, name)(torch.ones(3, 2, dtype=torch.long))
        with pytest.raises(
            ValueError, match=rf"{name}: mask: got .*\[4\].* wanted a bool tensor broadcastable to \[3\]"
        ):
            getattr(ops, name)(torch.ones(3, 2), mask=torch.ones(4, dtype=torch.bool))

    def test_escalation_rate_checks_both(self):
        with pytest.raises(ValueError, match=r"escalation_rate: y: got .*\[4, 2\].* wanted .*\[3, C\]"):
            ops.escalation_rate(torch.ones(3, 2), torch.ones(4, 2))


class TestSpectralGap:
    """1 − |λ₂|, in the reference only."""

    def test_known_attention(self):
        n, e = 6, 0.3
        mixture = (1 - e) * torch.eye(n, dtype=torch.float64) + e / n
        torch.testing.assert_close(reference.spectral_gap(mixture).item(), e)
        assert abs(reference.spectral_gap(torch.eye(n)[[1, 2, 0, 3, 4, 5]])) < 1e-6
        causal = randn(2, n, n).masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf).softmax(-1)
        second = causal.diagonal(dim1=-2, dim2=-1)[:, 1:].amax(-1)
        torch.testing.assert_close(reference.spectral_gap(causal), 1 - second)

    def test_uniform_and_one_token(self):
        assert abs(reference.spectral_gap(torch.full((64, 64), 1 / 64, dtype=torch.float64)) - 1) < 1e-12
        assert reference.spectral_gap(torch.ones(2, 1, 1)).tolist() == [1.0, 1.0]
