"""The fairest baseline of a batched decomposition: torch itself, the batch split over threads, one BLAS thread each.

torch.linalg solves a batch in a serial loop; a user who knows that can do this in Python.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from overtone.benchmarks.harness.case import Function, as_results


@cache
def _workers(count: int) -> ThreadPoolExecutor:
    # set_num_threads holds for the thread that calls it; the caller keeps its own.
    return ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))


class SplitOverThreads:
    """`function` of a batch [B, ...], its parts computed by as many threads as torch uses, and put together again."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def __call__(self, batch: Tensor, *options: Any) -> tuple[Tensor, ...]:
        count = torch.get_num_threads()
        grad_mode = torch.is_grad_enabled()

        def run(part: Tensor) -> tuple[Tensor, ...]:
            with torch.set_grad_enabled(grad_mode):
                return as_results(self.function(part, *options))

        parts = list(_workers(count).map(run, batch.chunk(count)))
        return tuple(torch.cat(results) for results in zip(*parts, strict=True))
