"""What a matrix costs, as a formula, and the time that follows; a test counts the same in the host stand-in.

The kernels wait more than they compute: a matrix is a chain of dependent steps, and a GPU runs as many matrices side by
side as their shared memory and registers allow. So the time of a batch is the number of waves times that of the chain,
unless the multiplications or the shared memory of all resident matrices take longer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from overtone.cuda_kernels.launches import Launch

LOOP_MILLISECONDS = 0.93  # that torch.linalg takes per matrix on a GPU, at least: launches and waits

# (op, matrices, n)
BATCHES = (("eigvals", 1024, 65), ("eigvals", 512, 197), ("eigh", 4096, 16))


class Gpu(NamedTuple):
    """`shared`: bytes per processor; `lanes`: float32 multiply-adds per processor and cycle."""

    processors: int
    gigahertz: float
    shared: int
    lanes: int


GPUS = {"A100": Gpu(108, 1.41, 164 * 1024, 64), "H100": Gpu(132, 1.83, 228 * 1024, 128)}

# Cycles of latency, of the order that microbenchmarks of sm_80 and sm_90 give.
SHARED, ADD, ROOT, DIVIDE, SHUFFLE, WARP_BARRIER, BLOCK_BARRIER = 25, 4, 40, 40, 25, 8, 30
UNROLLED = 8  # cycles per element of a loop over shared memory: loads overlap, additions of a sum do not
ASSUMPTIONS = (
    f"latencies in cycles: shared memory {SHARED}, add {ADD}, root {ROOT}, division {DIVIDE}, shuffle {SHUFFLE}, "
    f"barrier of a warp {WARP_BARRIER}, of a block {BLOCK_BARRIER}; sweeps as counted on random matrices"
)

# Sweeps per eigenvalue, and the mean length of one as a share of n, on random matrices.
QL_SWEEPS, QL_LENGTH = 1.6, 0.5
FRANCIS_SWEEPS, FRANCIS_LENGTH = 1.45, 0.55
REFLECTORS = 8  # between two barriers


class Work(NamedTuple):
    """Of one matrix. `shared`: loads and stores of its threads; `cycles`: the chain of dependent steps."""

    barriers: float
    shared: float
    flops: float
    cycles: float


class Prediction(NamedTuple):
    launch: Launch
    work: Work
    resident: int  # matrices per processor
    waves: int
    milliseconds: float


def eigh_barriers(n: int, sweeps: float) -> float:
    """Of a matrix with eigenvectors, n ≥ 2; a reduction is one."""
    load, store = 2, 1
    tridiagonal = 4 * (n - 2) + 1
    return load + tridiagonal + (n + 1) + 3 * sweeps + 1 + store


def eigh_reductions(n: int, sweeps: float) -> float:
    return 1 + 2 * (n - 2) + 2 * sweeps + 1


def eigh_work(n: int, path: str) -> Work:
    sweeps = QL_SWEEPS * n
    steps = sweeps * QL_LENGTH * n
    barrier = WARP_BARRIER if path == "warp" else BLOCK_BARRIER
    # n³/3 elements pass through the tridiagonal reduction, as many form Q, and a step rotates n of them.
    elements = n**3 / 3
    shared = 5 * elements + 5 * elements + steps * (2 * n + 2 * n)
    flops = 6 * elements + 4 * elements + steps * n * (6 + 20)  # the recurrence is run by every thread
    barriers = eigh_barriers(n, sweeps)
    recurrence = ROOT + DIVIDE + 9 * ADD
    cycles = (
        barriers * barrier
        + eigh_reductions(n, sweeps) * 5 * SHUFFLE
        + n**2 / 2 * UNROLLED * 3  # a thread's passes over its rows and columns
        + n * (ROOT + 2 * DIVIDE)
        + steps * recurrence
    )
    return Work(barriers, shared, flops, cycles)


def eigvals_work(n: int, path: str) -> Work:
    sweeps = FRANCIS_SWEEPS * n
    steps = sweeps * FRANCIS_LENGTH * n
    is_warp = path == "warp"
    barrier = WARP_BARRIER if is_warp else BLOCK_BARRIER
    groups = 0 if is_warp else steps / REFLECTORS
    reduction_barriers = 5 * (n - 2) + 8
    barriers = reduction_barriers + 2 * groups + (2 * steps if is_warp else 0)
    elements = n**3 / 3 * 2.5  # that the reduction to Hessenberg form reads twice and changes once
    far = steps * n * FRANCIS_LENGTH * 2  # elements that a step's reflector changes: a row's and a column's part
    shared = 4 * elements + far * (2 if is_warp else 2 * (REFLECTORS + 2) / REFLECTORS / 3) * 3
    flops = 8 * elements / 2 + far * 10
    reflector = ROOT + DIVIDE + 8 * ADD + SHARED
    near = reflector + 2 * (2 * SHARED + 5 * ADD + WARP_BARRIER)
    far_pass = 2 * SHARED + REFLECTORS * 4 * ADD
    cycles = (
        reduction_barriers * (barrier + 3 * SHUFFLE)
        + n**2 * UNROLLED * 1.25
        + steps * near
        + groups * (2 * BLOCK_BARRIER + far_pass)
        + sweeps * 3 * (5 * SHUFFLE + 2 * SHARED)  # the search for windows, the shifts
    )
    return Work(barriers, shared, flops, cycles)


def predict(op: str, count: int, n: int, gpu: Gpu) -> Prediction:
    """The time of a batch of float32 matrices."""
    if op == "eigh":
        launch = Launch("eigh", "warp" if n <= 32 else "block", n, torch.float32)
        work = eigh_work(n, launch.path)
    else:
        path = "warp" if n <= 32 else "block" if n * n * 4 < gpu.shared // 2 else "packed"
        launch = Launch("eig", path, n, torch.float32)
        work = eigvals_work(n, path)
    blocks = min(gpu.shared // (launch.shared_bytes + 1024), 64 // launch.warps, 32)
    resident = blocks * launch.matrices_per_block
    waves = -(-count // (resident * gpu.processors))
    # 32 shared memory accesses of four bytes per cycle; a multiply-add is two FLOPs.
    busy = max(work.shared / 32, work.flops / (2 * gpu.lanes)) * min(resident, -(-count // gpu.processors))
    cycles = waves * max(work.cycles, busy)
    return Prediction(launch, work, resident, waves, cycles / (gpu.gigahertz * 1e6))
