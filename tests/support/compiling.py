"""torch.compile(fullgraph=True): same numbers as eager, forward and backward, and no recompilation for a new size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from support.accuracy import fresh, outputs_and_gradients


def check_compiles(
    function: Callable, calls: Sequence[tuple], *, exact: bool = True, sums: Collection[int] = ()
) -> None:
    """Compiles once with dynamic shapes, runs every call, compares outputs and gradients with eager.

    `exact`: the op itself is opaque to the compiler, so the bits must agree, but for the gradients at the places
    `sums`, which PyTorch sums: the compiler may choose another order. All calls must be served by one graph.
    """
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for args in calls:
        eager = outputs_and_gradients(function, tuple(map(fresh, args)))
        ours = outputs_and_gradients(compiled, tuple(map(fresh, args)))
        for kind, ys, zs in zip(("output", "gradient"), ours, eager, strict=True):
            for index, (y, z) in enumerate(zip(ys, zs, strict=True)):
                if exact and not (kind == "gradient" and index in sums):
                    assert torch.equal(y, z), f"{kind} {index}: compiled and eager differ"
                else:
                    torch.testing.assert_close(y, z, msg=lambda m, k=kind, i=index: f"{k} {i}: {m}")
                assert y.stride() == z.stride(), f"{kind} {index}: strides {y.stride()}, eager has {z.stride()}"
    assert counter.frame_count == 1, f"{counter.frame_count} graphs were compiled for {len(calls)} sizes, wanted 1"
