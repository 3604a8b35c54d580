"""Calls every solver, forward and backward, with matrices of hostile scales at every size where memory errors hide.

A script for processes that watch memory (tests/project/test_sanitizers.py); that the values are right is for
tests/ops/linalg/test_hostile.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from support import gallery, hostile, shapes

import overtone as ot
from overtone import _C

DTYPES = (torch.float32, torch.float64)
SIZES = range(71)
# Where a matrix alone, or a few of them, go to LAPACK, at any level; matrices reduced by rows; panels of columns.
CROSSOVERS = (81, 97, 111, 129)
ALONE = (24, 31, 41, 46, 51, 66, 71, 101, 111)
# What LAPACK gives up on, or balances to its harm.
FOR_LAPACK = ("ordinary", "row blocks", "graded up", "rows graded up", "scattered", "the largest number", "smallest")


def solve_there_and_back(solve: Callable, a: torch.Tensor) -> int:
    """Returns the number of calls. A gradient may be refused; then nothing is left to watch."""
    leaf = a.detach().requires_grad_()
    *results, info = solve(leaf)
    assert all(part[info == 0].isfinite().all() for part in results)
    try:
        sum((part.abs() if part.is_complex() else part)[info == 0].square().sum() for part in results).backward()
    except (torch.linalg.LinAlgError, RuntimeError) as refusal:
        assert any(reason in str(refusal) for reason in ("numerically equal", "defective", "linearly dependent")), (
            refusal
        )
    return 2


def exercise(a: torch.Tensor) -> int:
    """Every solver; returns the number of calls."""
    symmetric = gallery.symmetrized(a)
    ot.linalg.eigvalsh_ex(symmetric, "U", backend="cpu")
    ot.linalg.eigvals_ex(a, backend="cpu")
    ot.linalg.eigvals_ex(a.softmax(-1), row_stochastic=True, backend="cpu")
    calls = 3 + solve_there_and_back(lambda a: ot.linalg.eigh_ex(gallery.symmetrized(a), backend="cpu"), a)
    calls += solve_there_and_back(lambda a: ot.linalg.eig_ex(a, backend="cpu"), a)
    return calls + exercise_qr(a)


def exercise_qr(a: torch.Tensor) -> int:
    ot.linalg.qr_ex(a, "complete", backend="cpu")
    return 1 + solve_there_and_back(lambda a: ot.linalg.qr_ex(a, backend="cpu"), a)


def exercise_size(n: int, dtype: torch.dtype) -> int:
    """All scales in one batch, with a bad member, in a layout that changes with the size."""
    _, a = hostile.batch(n, n, dtype, seed=n)
    a[3:4] = math.nan
    layout = shapes.LAYOUTS[n % len(shapes.LAYOUTS)]
    calls = exercise(shapes.with_layout(a, layout).detach())
    for rows, columns in ((n + 3, n), (n, n + 5)):
        calls += exercise_qr(hostile.batch(rows, columns, dtype, seed=n)[1])
    return calls


def exercise_alone(n: int, dtype: torch.dtype) -> int:
    names, a = hostile.batch(n, n, dtype, seed=n)
    return sum(exercise(a[names.index(name)]) for name in FOR_LAPACK)


def main() -> None:
    calls = 0
    levels = [level for level in _C.available_isas() if level not in ("avx512_bf16", "amx")]  # with those of avx512
    for level in levels:
        _C.set_isa(level)
        for dtype in DTYPES:
            # Every size at one level, by turns; those around lanes and blocks at each.
            own = [n for n in SIZES if n <= 18 or n % len(levels) == levels.index(level)]
            calls += sum(exercise_size(n, dtype) for n in (*own, *CROSSOVERS[:: 1 if level == levels[-1] else 3]))
            calls += sum(exercise_alone(n, dtype) for n in ALONE)
    print(f"{calls} calls at {', '.join(levels)}; sanitizers: {_C.build_info()['sanitizers']}")


if __name__ == "__main__":
    main()
