"""Tolerances are derived, never chosen: the error against a float64 truth may be at most `factor` times that of plain
PyTorch at the same precision, plus a rounding floor of a few units in the last place of the largest value."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
FLOOR_ULPS = 4.0


def to_float64(value):
    """The same value, every floating tensor in float64 and detached; a leaf that needs a gradient stays one."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return value


def fresh(value):
    """A detached copy with the same strides and requires_grad."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_(value.requires_grad)
    return value


def to_float32(value):
    """The same value, every floating tensor in float32 and detached; a leaf that needs a gradient stays one."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().float().requires_grad_(value.requires_grad)
    return value


def max_error(result: Tensor, truth: Tensor) -> float:
    return (result.double() - truth).abs().max().item() if truth.numel() else 0.0


def assert_error_within(actual: Tensor, truth: Tensor, plain_error: float, *, factor: float, what: str) -> None:
    """The error is at most `factor` times `plain_error`, that of PyTorch at the same precision, plus the floor."""
    assert actual.shape == truth.shape, f"{what}: shape {list(actual.shape)}, wanted {list(truth.shape)}"
    if truth.numel() == 0:
        return
    assert torch.isfinite(truth).all(), f"{what}: the truth itself is not finite"
    error = max_error(actual, truth)
    floor = FLOOR_ULPS * torch.finfo(actual.dtype).eps * truth.abs().max().item()
    bound = factor * plain_error + floor
    assert error <= bound, f"{what}: error {error:.3e} exceeds {factor} x PyTorch's {plain_error:.3e} + {floor:.1e}"


def outputs_and_gradients(function: Callable, args: tuple, seed: int = 7) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of function(*args), and the gradients of a random combination of them for every leaf that needs one.

    The random weights depend on the outputs' shapes only, so two implementations see the same loss.
    """
    result = function(*args)
    outputs = list(result) if isinstance(result, tuple) else [result]
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    if not leaves:
        return outputs, []
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in outputs]
    gradients = torch.autograd.grad(outputs, leaves, weights, allow_unused=True)
    return outputs, [g if g is not None else torch.zeros_like(x) for g, x in zip(gradients, leaves, strict=True)]


def check_against_truth(
    ours: Callable,
    plain: Callable,
    args: tuple,
    *,
    gradient_factor: float = GRADIENT_FACTOR,
    more_draws: Sequence[tuple] = (),
) -> None:
    """Outputs and gradients of `ours` against `plain` at the same precision and in float64.

    There is no wider truth for float64 itself: PyTorch's error there is taken as its float32 error, scaled by the
    ratio of the two precisions. `more_draws`: other arguments of the same shapes. Where a result has few elements,
    PyTorch's error in one draw says little (it may well be zero); it is then the largest over all draws.
    """
    is_float64 = any(isinstance(a, Tensor) and a.dtype == torch.float64 for a in args)
    errors = _plain_errors(plain, args, is_float64)
    for draw in more_draws:
        errors = [
            [max(pair) for pair in zip(*kind, strict=True)]
            for kind in zip(errors, _plain_errors(plain, draw, is_float64), strict=True)
        ]
    exact = outputs_and_gradients(plain, tuple(map(to_float64, args)))
    like = outputs_and_gradients(plain, tuple(map(fresh, args)))
    result = outputs_and_gradients(ours, tuple(map(fresh, args)))
    kinds = (("output", FORWARD_FACTOR), ("gradient", gradient_factor))
    for (kind, factor), truths, plains, actuals, allowed in zip(kinds, exact, like, result, errors, strict=True):
        for index, (t, p, a, error) in enumerate(zip(truths, plains, actuals, allowed, strict=True)):
            what = f"{kind} {index}"
            assert a.dtype == p.dtype, f"{what}: dtype {a.dtype}, wanted {p.dtype}"
            assert_error_within(a, t, error, factor=factor, what=what)


def _plain_errors(plain: Callable, args: tuple, is_float64: bool) -> list[list[float]]:
    """PyTorch's largest error in every output and in every gradient."""
    scale = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps if is_float64 else 1.0
    exact = outputs_and_gradients(plain, tuple(map(to_float64, args)))
    rough = outputs_and_gradients(plain, tuple(map(to_float32 if is_float64 else fresh, args)))
    return [
        [scale * max_error(p, t) for p, t in zip(plains, truths, strict=True)]
        for plains, truths in zip(rough, exact, strict=True)
    ]
