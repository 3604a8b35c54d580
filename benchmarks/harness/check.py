"""A result is right if its error against a float64 truth is no worse than plain PyTorch's at the same precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# How many times plain PyTorch's own error is allowed: sums in another order differ by about that much.
ERROR_FACTOR = 3


@dataclass(frozen=True)
class Check:
    """Whether an implementation's results are right. `error` and `tolerance` are relative, of the worst result."""

    passed: bool
    error: float
    tolerance: float
    message: str = ""
    skipped: bool = False  # it could not run here for want of a package, which is no mistake

    @staticmethod
    def missing(message: str) -> Check:
        return Check(False, float("nan"), float("nan"), message, skipped=True)

    @staticmethod
    def failed(message: str) -> Check:
        return Check(False, float("nan"), float("nan"), message)


@dataclass(frozen=True)
class Expected:
    """What results are compared with."""

    inputs: tuple[Any, ...]
    plain: tuple[Tensor, ...]  # the eager reference's or the measure's results, at the case's precision
    truth: tuple[Tensor, ...]  # and in float64
    # Roundings of a running sum that are allowed on top. None for us; for a baseline, which may well add everything up
    # in one long sum and still be what people use, as many as the inputs have elements.
    num_terms: int = 0
    # The dtype that intermediates may be rounded to, whatever the result's. None for us; a baseline computes in the
    # case's dtype throughout, and a float32 sum of its bfloat16 numbers is no better than they are.
    intermediate_dtype: torch.dtype | None = None


def widened(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float64))


def _relative_error(result: Tensor, truth: Tensor) -> float:
    difference, scale = (widened(result) - truth).abs().max().item(), truth.abs().max().item()
    return difference / scale if scale else difference


def _rounding_floor(dtype: torch.dtype, expected: Expected) -> float:
    """Two roundings, to the result's dtype or the intermediates', for where plain PyTorch happens to be exact.

    A sum's error grows like √n.
    """
    accumulator = torch.promote_types(dtype, torch.float32)
    rounding = max(torch.finfo(each).eps for each in (dtype, expected.intermediate_dtype or dtype))
    return rounding + math.sqrt(expected.num_terms) * torch.finfo(accumulator).eps


def _compare(name: str, result: Tensor, plain: Tensor, truth: Tensor, expected: Expected) -> Check:
    if result.shape != plain.shape or result.dtype != plain.dtype:
        got, wanted = (f"{t.dtype} of shape {list(t.shape)}" for t in (result, plain))
        return Check.failed(f"{name} is {got}, wanted {wanted}")
    if not truth.numel():
        return Check(True, 0.0, 0.0)
    tolerance = ERROR_FACTOR * _relative_error(plain, truth) + _rounding_floor(result.dtype, expected)
    error = _relative_error(result, truth)
    passed = error <= tolerance  # False for NaN
    return Check(passed, error, tolerance, "" if passed else f"{name}: error {error:.2g}, tolerance {tolerance:.2g}")


def check_against_truth(results: tuple[Tensor, ...], expected: Expected) -> Check:
    """The standard check: every result's largest error relative to its largest value."""
    if len(results) != len(expected.plain):
        return Check.failed(f"got {len(results)} results, wanted {len(expected.plain)}")
    tensors = zip(results, expected.plain, expected.truth, strict=True)
    checks = [_compare(f"result {i}", *each, expected) for i, each in enumerate(tensors, start=1)]
    failed = [check for check in checks if not check.passed]
    if failed:
        return failed[0]
    return max(checks, key=lambda check: check.error / check.tolerance if check.tolerance else 0.0)
