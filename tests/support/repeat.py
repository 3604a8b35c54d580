"""Bit-equality over repeats and thread counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from support.accuracy import fresh, outputs_and_gradients


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_bit_equal(function: Callable, args: tuple, *, thread_counts: tuple[int, ...] = (1, 2, 3, 5)) -> None:
    """Outputs and gradients are the same bits in every repeat, for any number of threads."""
    first = None
    for count in (*thread_counts, thread_counts[0]):
        with threads(count):
            outputs, gradients = outputs_and_gradients(function, tuple(map(fresh, args)))
        if first is None:
            first = outputs + gradients
        for index, (now, before) in enumerate(zip(outputs + gradients, first, strict=True)):
            assert torch.equal(now, before), f"result {index} differs with {count} threads"


def check_backward_twice(function: Callable, args: tuple) -> None:
    """retain_graph: the second backward through the same graph gives the same gradients."""
    args = tuple(map(fresh, args))
    result = function(*args)
    outputs = result if isinstance(result, tuple) else (result,)
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    weights = [torch.ones_like(y) for y in outputs]
    first = torch.autograd.grad(outputs, leaves, weights, retain_graph=True)
    second = torch.autograd.grad(outputs, leaves, weights)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
