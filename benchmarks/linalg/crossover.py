"""Measures where a matrix per lane stops being faster than LAPACK, on an idle machine; about two minutes.

    python -m overtone.benchmarks.linalg.crossover

csrc/cpu/linalg/eigh/op.cpp and eig/op.cpp solve in lanes while one item of lanes takes less time than LAPACK for its
matrices, estimated as n / worth matrices of size n. Printed is worth as measured on one thread: n times LAPACK's time
for one matrix, over the time of an item. The constants should lie near the values where worth times matrices is n.
"""

from __future__ import annotations

import torch

import overtone as ot
from overtone import hardware
from overtone.benchmarks.harness.case import Call
from overtone.benchmarks.harness.timing import Plan, interleave

PLAN = Plan(rounds=5, seconds=6.0)
SYMMETRIC, GENERAL = (48, 64, 96, 128, 197, 256), (128, 197, 256, 384)
SOLVERS = {
    "eigh": (ot.linalg.eigh, SYMMETRIC),
    "eigvalsh": (ot.linalg.eigvalsh, SYMMETRIC),
    "eigvals": (ot.linalg.eigvals, GENERAL),
    "eig": (ot.linalg.eig, GENERAL[:2]),
}


def matrices(count: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, n, n, generator=torch.Generator().manual_seed(0), dtype=dtype)


def bound(solver, a: torch.Tensor) -> tuple[Call, bool]:
    """The call, after it ran once, and whether it went to LAPACK."""
    call = Call(lambda _: solver(a, backend="cpu"))
    call.run(None)
    return call, hardware.last_kernel().endswith("/lapack")


def fit(name: str, dtype: torch.dtype, lanes: int) -> None:
    solver, sizes = SOLVERS[name]
    for n in sizes:
        alone, alone_by_lapack = bound(solver, matrices(1, n, dtype))
        item, item_by_lapack = bound(solver, matrices(lanes, n, dtype))
        if not alone_by_lapack or item_by_lapack:
            print(f"{name:9} {dtype} n = {n}: both go the same way, nothing to compare")
            continue
        measured = interleave({"alone": alone, "item": item}, PLAN)
        alone_seconds, item_seconds = (measured.timings[each].minimum for each in ("alone", "item"))
        worth = n * alone_seconds / item_seconds
        verdict = "lanes" if item_seconds < lanes * alone_seconds else "LAPACK"
        mark = "" if measured.reliable else " ~"
        print(f"{name:9} {dtype} n = {n}: worth {worth:.0f}, {lanes} matrices are for {verdict}{mark}")


def main() -> None:
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.float64):
        lanes = {"baseline": 16, "avx2": 32}.get(
            hardware.isa() or "", 64
        ) // dtype.itemsize  # above AVX-512 are levels of its lanes
        for name in SOLVERS:
            fit(name, dtype, lanes)


if __name__ == "__main__":
    main()
