"""rounded_layer_norm: exactness, gradients, contract, every instruction set, and where models use it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support import accuracy, compiling, repeat
from torch import nn

from overtone.nn.norms import SignedLayerNorm, normalize_for_products
from overtone.ops.layer_norm import rounded_layer_norm

pytestmark = pytest.mark.usefixtures("cpu_kernels")

SHAPES = [(2, 5, 6), (1, 1, 1), (129, 16), (3, 43, 17), (0, 5, 8), (260, 192), (3, 100)]


def leaves(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = (shape, shape[-1:], shape[-1:])
    return tuple(torch.randn(size, generator=generator).requires_grad_() for size in sizes)


def plain(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias).to(torch.promote_types(torch.bfloat16, x.dtype))


def rounded(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias).bfloat16()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact(shape, isa_level, poisoned_empty, cpu_kernels):
    """The result is PyTorch's but for its rounding, of one unit; gradients are those of the same rounded gradient."""
    args = leaves(shape)
    y = rounded_layer_norm(*args, backend="cpu")
    truth = plain(*(arg.detach().double() for arg in args))
    error = (y.double() - truth).abs()
    assert (error <= torch.finfo(torch.bfloat16).eps / 2 * truth.abs() + 1e-5).all()
    draws = [leaves(shape, seed) for seed in range(3)]
    weights = torch.randn(shape).bfloat16()

    def gradients(function, given):
        given = tuple(arg.detach().requires_grad_() for arg in given)
        out = function(*given)
        return torch.autograd.grad(out, given, weights.to(out.dtype))

    truths = gradients(plain, [arg.double() for arg in args])
    allowed = [
        max(accuracy.max_error(p, t) for p, t in pairs)
        for pairs in zip(
            *(
                zip(gradients(rounded, draw), gradients(plain, [arg.double() for arg in draw]), strict=True)
                for draw in draws
            ),
            strict=True,
        )
    ]
    ours = gradients(lambda *given: rounded_layer_norm(*given, backend="cpu"), args)
    assert cpu_kernels.last_kernel() == f"rounded_layer_norm_backward/{isa_level}"
    for grad, exact, error in zip(ours, truths, allowed, strict=True):
        accuracy.assert_error_within(grad, exact, error, factor=accuracy.GRADIENT_FACTOR, what="gradient")


def test_opcheck():
    torch.library.opcheck(torch.ops.overtone.rounded_layer_norm.default, (*leaves((9, 20)), 1e-6))


def test_repeats_and_compiles():
    repeat.check_bit_equal(rounded_layer_norm, leaves((300, 48)))
    repeat.check_backward_twice(rounded_layer_norm, leaves((300, 48)))
    # A float that is an argument would be traced as a symbol first, and then once more as a constant.
    compiling.check_compiles(lambda *args: rounded_layer_norm(*args, 1e-6), [leaves((2, n, 20)) for n in (5, 9)])


@pytest.mark.parametrize("needed", range(3))
def test_one_gradient_alone(needed):
    args = leaves((7, 20))
    everything = torch.autograd.grad(rounded_layer_norm(*args).sum(), args)
    alone = [arg.detach().requires_grad_(place == needed) for place, arg in enumerate(args)]
    (grad,) = torch.autograd.grad(rounded_layer_norm(*alone).sum(), alone[needed])
    assert torch.equal(grad, everything[needed])


def test_second_gradient():
    x, weight, bias = leaves((4, 9))
    (grad,) = torch.autograd.grad(rounded_layer_norm(x, weight, bias).float().square().sum(), x, create_graph=True)
    assert torch.autograd.grad(grad.square().sum(), weight)[0].isfinite().all()


def test_transforms():
    """vmap runs the kernel with the mapped dimension in the batch; torch.func differentiates the reference."""
    x, weight, bias = (leaf.detach() for leaf in leaves((3, 4, 9)))
    mapped = torch.vmap(rounded_layer_norm, in_dims=(0, None, None))(x, weight, bias)
    assert torch.equal(mapped, rounded_layer_norm(x, weight, bias))
    weights = torch.vmap(rounded_layer_norm, in_dims=(None, 0, None))(x, torch.stack([weight, bias]), bias)
    assert torch.equal(weights[1], rounded_layer_norm(x, bias, bias))

    def loss(x, function=rounded_layer_norm):
        return function(x, weight, bias).float().square().sum()

    torch.testing.assert_close(torch.func.grad(loss)(x), torch.func.grad(loss)(x, rounded))
    slope, tangent = torch.func.jvp(rounded_layer_norm, (x, weight, bias), (x.cos(), weight.cos(), bias.cos()))
    expected = torch.func.jvp(rounded, (x, weight, bias), (x.cos(), weight.cos(), bias.cos()))
    assert torch.equal(slope, expected[0]) and torch.equal(tangent, expected[1])


def test_errors_name_the_argument():
    x, weight, bias = leaves((4, 9))
    with pytest.raises(ValueError, match=r"rounded_layer_norm: weight: got .* \[8\]"):
        rounded_layer_norm(x, weight[:8], bias)


class TestInModels:
    x = torch.randn(2, 3, 8)

    def result(self, norm, x, dtype=torch.bfloat16):
        with torch.autocast("cpu", dtype):
            return normalize_for_products(norm, x)

    def test_rounds_under_autocast_alone(self, cpu_kernels):
        norm = nn.LayerNorm(8)
        assert torch.equal(self.result(norm, self.x), rounded_layer_norm(self.x, norm.weight, norm.bias, norm.eps))
        assert normalize_for_products(norm, self.x).dtype == torch.float32

    def test_leaves_everything_else_alone(self):
        calls = []
        hooked = nn.LayerNorm(8)
        hooked.register_forward_hook(lambda *_: calls.append(1))
        others = (SignedLayerNorm(8), nn.Identity(), nn.LayerNorm((3, 8)), nn.LayerNorm(8, bias=False), hooked)
        for norm in others:
            assert torch.equal(self.result(norm, self.x), norm(self.x))
        assert len(calls) == 2
        assert self.result(nn.LayerNorm(8), self.x, torch.float16).dtype == torch.float32
