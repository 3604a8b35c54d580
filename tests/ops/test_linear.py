"""linear and mlp on the CPU kernels: exactness, gradients, contracts, every instruction set."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import accuracy, compiling, repeat, shapes

from overtone import reference
from overtone.ops.linear import linear, mlp

pytestmark = pytest.mark.usefixtures("cpu_kernels")

DTYPES = (torch.float32, torch.float64)
# (tokens' shape, inputs, hidden, outputs): around vectors, panels, groups of channels and blocks of tokens, and none.
# torch's own products of float64 are the larger error where sums are long: those have a test of their own.
LONG = ((3, 65), 192, 768, 192)
SIZES = [
    ((2, 5), 6, 24, 6),
    ((1, 1), 1, 1, 1),
    ((129,), 17, 50, 9),
    ((2, 113), 48, 193, 33),
    ((0, 5), 6, 24, 6),
    ((1, 300), 97, 7, 200),
]


def weights_and_tokens(size, dtype, seed=0):
    """x, w1, b1, w2, b2, all needing gradients."""
    leading, inputs, hidden, outputs = size
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, scale=1.0):
        return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()

    return (
        random(*leading, inputs),
        random(hidden, inputs, scale=inputs**-0.5),
        random(hidden),
        random(outputs, hidden, scale=hidden**-0.5),
        random(outputs),
    )


SIZES_AND_TYPES = [*itertools.product(SIZES, DTYPES), (LONG, torch.float32)]


def on_cpu(function):
    return lambda *args: function(*args, backend="cpu")


class TestExactness:
    @pytest.mark.parametrize("size, dtype", SIZES_AND_TYPES, ids=str)
    def test_mlp(self, size, dtype, isa_level, poisoned_empty, cpu_kernels):
        draws = [weights_and_tokens(size, dtype, seed) for seed in range(3)]
        accuracy.check_against_truth(on_cpu(mlp), reference.mlp, draws[0], more_draws=draws[1:])
        assert cpu_kernels.last_kernel() == f"mlp_backward/{isa_level}"

    @pytest.mark.parametrize("has_bias", [True, False])
    @pytest.mark.parametrize("size, dtype", SIZES_AND_TYPES, ids=str)
    def test_linear(self, size, has_bias, dtype, isa_level, poisoned_empty, cpu_kernels):
        draws = [weights_and_tokens(size, dtype, seed)[: 3 if has_bias else 2] for seed in range(3)]
        accuracy.check_against_truth(on_cpu(linear), reference.linear, draws[0], more_draws=draws[1:])
        assert cpu_kernels.last_kernel() == f"linear_backward/{isa_level}"

    def test_long_sums_of_float64(self, isa_level):
        """No further from sums in extended precision than torch is."""
        x, w1, b1, *_ = (t.detach() for t in weights_and_tokens(LONG, torch.float64))
        wide = [np.asarray(t, dtype=np.longdouble) for t in (x, w1, b1)]
        if np.finfo(np.longdouble).eps >= np.finfo(np.float64).eps:
            pytest.skip("this machine has no precision beyond float64")
        truth = wide[0] @ wide[1].T + wide[2]
        ours, plain = (np.abs(f(x, w1, b1).numpy() - truth).max() for f in (on_cpu(linear), reference.linear))
        floor = accuracy.FLOOR_ULPS * torch.finfo(torch.float64).eps * float(np.abs(truth).max())
        assert ours <= accuracy.FORWARD_FACTOR * plain + floor

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.integers(0, 300),
        st.integers(1, 70),
        st.integers(1, 220),
        st.integers(1, 70),
        st.sampled_from(shapes.LAYOUTS),
    )
    def test_any_size_and_layout(self, tokens, inputs, hidden, outputs, layout):
        draws = [weights_and_tokens(((tokens,), inputs, hidden, outputs), torch.float32, seed) for seed in range(3)]
        args = [shapes.with_layout(t.detach(), layout).requires_grad_() if t.dim() == 2 else t for t in draws[0]]
        accuracy.check_against_truth(on_cpu(mlp), reference.mlp, tuple(args), more_draws=draws[1:])
        accuracy.check_against_truth(
            on_cpu(linear), reference.linear, tuple(args[:3]), more_draws=[draw[:3] for draw in draws[1:]]
        )

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_gelu_and_its_slope_everywhere(self, dtype, isa_level):
        """One hidden channel of weight one: y is GELU itself, from its middle into both tails and beyond them."""
        x = torch.cat((torch.linspace(-12, 12, 20001, dtype=dtype), torch.tensor([-50.0, 50, 1e30, -1e30]).to(dtype)))
        x = x[:, None].requires_grad_()
        one, zero = torch.ones(1, 1, dtype=dtype), torch.zeros(1, dtype=dtype)
        y = mlp(x, one, zero, one, zero, backend="cpu")
        (slope,) = torch.autograd.grad(y.sum(), x)
        wide = x.detach().double()
        below = torch.special.ndtr(wide)
        truth = torch.where(wide < -40, torch.zeros(()), wide * below)
        bell = torch.exp(-wide.square() / 2) / math.sqrt(2 * math.pi)
        true_slope = below + torch.where(wide.abs() > 40, torch.zeros(()), wide * bell)
        eps = torch.finfo(dtype).eps
        # Two units of |x|, or of one: Φ is rounded at one, and multiplied by x.
        assert ((y.double() - truth).abs() <= 2 * eps * wide.abs().clamp(min=1)).all()
        assert ((slope.double() - true_slope).abs() <= 4 * eps).all()

    def test_values_that_are_not_finite(self):
        x = torch.tensor([[math.inf], [math.nan], [1.0]])
        one, zero = torch.ones(1, 1), torch.zeros(1)
        y = mlp(x, one, zero, one, zero, backend="cpu")
        assert y[0] == math.inf and y[1].isnan() and y[2].isfinite()


class TestContract:
    @pytest.mark.parametrize("function, count", [(mlp, 5), (linear, 3), (linear, 2)])
    def test_gradcheck(self, function, count):
        args = weights_and_tokens(((2, 3), 4, 7, 5), torch.float64)[:count]
        assert torch.autograd.gradcheck(on_cpu(function), args)
        assert torch.autograd.gradgradcheck(on_cpu(function), args)

    def test_opcheck(self):
        x, w1, b1, w2, b2 = weights_and_tokens(((9,), 6, 20, 5), torch.float32)
        ops = torch.ops.overtone
        for residual in (None, torch.randn(9, 5, requires_grad=True)):
            torch.library.opcheck(ops.mlp.default, (x, w1, b1, w2, b2, residual, True))
        torch.library.opcheck(ops.linear.default, (x, w1, b1))
        torch.library.opcheck(ops.linear.default, (x, w1, None))
        plain = [t.detach() for t in (x, w1, b1, w2, b2)]
        y, pre = ops.mlp(*plain, None, True)
        for needs in ((True, True), (True, False), (False, True)):
            torch.library.opcheck(ops.mlp_backward.default, (y, plain[0], plain[1], plain[3], pre, *needs))
            torch.library.opcheck(ops.linear_backward.default, (pre[:, :20], plain[0], plain[1], *needs))

    @pytest.mark.parametrize("function, count", [(mlp, 5), (linear, 3)])
    def test_compiles(self, function, count):
        calls = [weights_and_tokens(((2, n), 6, 20, 7), torch.float32)[:count] for n in (5, 9)]
        compiling.check_compiles(on_cpu(function), calls)

    @pytest.mark.parametrize("function, count", [(mlp, 5), (linear, 3)])
    def test_bit_equal(self, function, count):
        args = weights_and_tokens(((3, 197), 48, 200, 64), torch.float32)[:count]
        repeat.check_bit_equal(on_cpu(function), args)
        repeat.check_backward_twice(on_cpu(function), args)

    @pytest.mark.parametrize("needed", range(5))
    def test_one_gradient_alone(self, needed):
        args = weights_and_tokens(((2, 9), 6, 20, 5), torch.float32)
        everything = torch.autograd.grad(mlp(*args, backend="cpu").sum(), args)
        alone = [t.detach().requires_grad_(place == needed) for place, t in enumerate(args)]
        (grad,) = torch.autograd.grad(mlp(*alone, backend="cpu").sum(), alone[needed])
        assert torch.equal(grad, everything[needed])

    def test_without_channels_the_reference_runs(self):
        x, weight, bias = torch.randn(2, 3, 0), torch.randn(4, 0), torch.randn(4)
        assert torch.equal(linear(x, weight, bias), bias.expand(2, 3, 4))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_residual(self, dtype, isa_level):
        """The sum, and its gradient handed on; with halves it is that of float32, not rounded before it is added."""
        x, w1, b1, w2, b2 = weights_and_tokens(((2, 9), 6, 20, 5), dtype)
        residual = torch.randn(2, 9, 5, dtype=torch.promote_types(dtype, torch.float32)).mT.contiguous().mT
        residual.requires_grad_()
        y = mlp(x, w1, b1, w2, b2, residual=residual, backend="cpu")
        without = mlp(x, w1, b1, w2, b2, backend="cpu")
        assert y.dtype == residual.dtype
        torch.testing.assert_close(y, residual + without, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
        weights = torch.randn_like(y)
        assert torch.equal(torch.autograd.grad(y, residual, weights, retain_graph=True)[0], weights)
        grads = torch.autograd.grad(y, (x, w1, b1, w2, b2), weights)
        plain = torch.autograd.grad(without, (x, w1, b1, w2, b2), weights.to(dtype))
        for grad, other in zip(grads, plain, strict=True):
            torch.testing.assert_close(grad, other, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)

    def test_errors_name_the_argument(self):
        x, w1, b1, w2, b2 = weights_and_tokens(((2, 9), 6, 20, 5), torch.float32)
        with pytest.raises(ValueError, match=r"mlp: w2: got .* \[20, 5\]"):
            mlp(x, w1, b1, w2.mT, b2)
        with pytest.raises(ValueError, match="linear: bias: got torch.float64"):
            linear(x, w1, b1.double())
        with pytest.raises(ValueError, match=r"mlp: residual: got .* \[2, 9\]"):
            mlp(x, w1, b1, w2, b2, residual=torch.zeros(2, 9))
        with pytest.raises(ValueError, match="linear: weight: got torch.float16"):
            linear(x.bfloat16(), w1.half())


def autocast(function, dtype):
    def call(*args):
        with torch.autocast("cpu", dtype, enabled=args[0].dtype != torch.float64):
            return function(*args)

    return call


HALVES = (torch.bfloat16, torch.float16)
HALF_SIZES = [*SIZES, ((3, 67), 64, 256, 96)]


def half_draws(size, count, dtype, *, wide):
    """x and weights in halves, or (wide) the weights in float32, as autocast has them."""
    draws = []
    for seed in range(3):
        x, *weights = weights_and_tokens(size, torch.float32, seed)[:count]
        weights = weights if wide else [w.detach().to(dtype).requires_grad_() for w in weights]
        draws.append((x.detach().to(dtype).requires_grad_(), *weights))
    return draws


class TestHalves:
    """Judged by PyTorch's layers at the same precision."""

    @pytest.mark.parametrize("wide", [True, False], ids=["float32 weights", "bfloat16 weights"])
    @pytest.mark.parametrize("size", HALF_SIZES, ids=str)
    @pytest.mark.parametrize("function, count", [(mlp, 5), (linear, 3), (linear, 2)])
    def test_bfloat16(self, function, count, size, wide, bf16_level, poisoned_empty, cpu_kernels):
        plain = autocast(getattr(reference, function.__name__), torch.bfloat16)
        draws = half_draws(size, count, torch.bfloat16, wide=wide)
        accuracy.check_against_truth(on_cpu(function), plain, draws[0], more_draws=draws[1:])
        assert cpu_kernels.last_kernel() == f"{function.__name__}_backward/{bf16_level}"

    @pytest.mark.parametrize("dtype", HALVES)
    @pytest.mark.parametrize("size", HALF_SIZES, ids=str)
    @pytest.mark.parametrize("function, count", [(mlp, 5), (linear, 3)])
    def test_widened(self, function, count, size, dtype, isa_level, poisoned_empty, cpu_kernels):
        plain = autocast(getattr(reference, function.__name__), dtype)
        draws = half_draws(size, count, dtype, wide=True)
        accuracy.check_against_truth(on_cpu(function), plain, draws[0], more_draws=draws[1:])
        assert cpu_kernels.last_kernel() == f"{function.__name__}_backward/{isa_level}"

    @pytest.mark.parametrize("function, count", [(mlp, 5), (linear, 3)])
    def test_float16_is_widened_everywhere(self, function, count, bf16_level, cpu_kernels):
        args = half_draws(SIZES[0], count, torch.float16, wide=True)[0]
        function(*args, backend="cpu").sum().backward()
        vectors = "baseline" if bf16_level.endswith("emulated") else "avx512"
        assert cpu_kernels.last_kernel() == f"{function.__name__}_backward/{vectors}"

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.integers(0, 300),
        st.integers(1, 70),
        st.integers(1, 220),
        st.integers(1, 70),
        st.sampled_from(shapes.LAYOUTS),
    )
    def test_any_size_and_layout(self, bf16_level, tokens, inputs, hidden, outputs, layout):
        draws = half_draws(((tokens,), inputs, hidden, outputs), 5, torch.bfloat16, wide=True)
        args = [shapes.with_layout(t.detach(), layout).requires_grad_() if t.dim() == 2 else t for t in draws[0]]
        for function, count in ((mlp, 5), (linear, 3)):
            plain = autocast(getattr(reference, function.__name__), torch.bfloat16)
            more = [draw[:count] for draw in draws[1:]]
            accuracy.check_against_truth(on_cpu(function), plain, tuple(args[:count]), more_draws=more)

    def test_gelu_and_its_slope_everywhere(self, bf16_level):
        x = torch.cat((torch.linspace(-12, 12, 20001), torch.tensor([-50.0, 50, 1e30, -1e30]))).bfloat16()
        x = x[:, None].requires_grad_()
        one, zero = torch.ones(1, 1), torch.zeros(1)
        y = mlp(x, one, zero, one, zero, backend="cpu")
        (slope,) = torch.autograd.grad(y.sum(), x)
        wide = x.detach().double()
        below, bell = torch.special.ndtr(wide), torch.exp(-wide.square() / 2) / math.sqrt(2 * math.pi)
        truth = torch.where(wide < -40, torch.zeros(()), wide * below)
        eps = torch.finfo(torch.bfloat16).eps
        assert ((y.double() - truth).abs() <= eps * truth.abs() + eps / 128).all()
        assert (
            (slope.double() - below - torch.where(wide.abs() > 40, torch.zeros(()), wide * bell)).abs() <= eps
        ).all()

    @pytest.mark.parametrize("function, count", [(mlp, 5), (linear, 3)])
    def test_bit_equal(self, function, count, bf16_level):
        args = half_draws(((3, 197), 48, 200, 64), count, torch.bfloat16, wide=True)[0]
        repeat.check_bit_equal(on_cpu(function), args)
        repeat.check_backward_twice(on_cpu(function), args)

    @pytest.mark.parametrize("needed", range(5))
    def test_one_gradient_alone(self, needed, bf16_level):
        args = half_draws(((2, 9), 6, 20, 5), 5, torch.bfloat16, wide=True)[0]
        everything = torch.autograd.grad(mlp(*args, backend="cpu").sum(), args)
        alone = [t.detach().requires_grad_(place == needed) for place, t in enumerate(args)]
        (grad,) = torch.autograd.grad(mlp(*alone, backend="cpu").sum(), alone[needed])
        assert torch.equal(grad, everything[needed])

    def test_opcheck(self, bf16_level):
        x, w1, b1, w2, b2 = half_draws(((9,), 6, 20, 5), 5, torch.bfloat16, wide=True)[0]
        ops, residual = torch.ops.overtone, torch.randn(9, 5, requires_grad=True)
        torch.library.opcheck(ops.mlp.default, (x, w1, b1, w2, b2, residual, True))
        torch.library.opcheck(ops.linear.default, (x, w1, b1))

    @pytest.mark.parametrize("function, count", [(mlp, 5), (linear, 3)])
    def test_autocast(self, function, count, bf16_level, cpu_kernels):
        """x is cast, parameters are not, and their gradients are in float32; as a graph and twice, too."""
        args = weights_and_tokens(((2, 9), 6, 20, 7), torch.float32)[:count]
        call = autocast(function, torch.bfloat16)
        y = call(*args)
        assert y.dtype == torch.bfloat16
        assert cpu_kernels.last_kernel() == f"{function.__name__}/{bf16_level}"
        assert torch.equal(y, function(args[0].bfloat16(), *args[1:], backend="cpu"))
        assert all(g.dtype == torch.float32 for g in torch.autograd.grad(y.float().sum(), args))
        (grad,) = torch.autograd.grad(call(*args).float().square().sum(), args[0], create_graph=True)
        assert torch.autograd.grad(grad.square().sum(), args[1])[0].isfinite().all()
        calls = [weights_and_tokens(((2, n), 6, 20, 7), torch.float32)[:count] for n in (5, 9)]
        compiling.check_compiles(call, calls)
