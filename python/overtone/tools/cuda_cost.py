"""What a matrix costs, as a formula, and the time that follows; a test counts the same in the host stand-in.

The kernels wait more than they compute: a matrix is a chain of dependent steps, and a GPU runs as many matrices side by
side as their shared memory and registers allow. So the time of a batch is the number of waves times that of the chain,
unless the multiplications or the shared memory of all resident matrices take longer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from overtone.tools.cuda_launches import Launch

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

# Sweeps per eigenvalue, and the mean length of one of QL's as a share of n, on random matrices. Those of Francis shrink
# evenly from n to nothing.
QL_SWEEPS, QL_LENGTH = 1.75, 0.6
FRANCIS_SWEEPS = 1.6
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


def _squares(n: int) -> int:
    """2² + … + (n − 1)²"""
    return (n - 1) * n * (2 * n - 1) // 6 - 1


def _threads(n: int) -> int:
    return -(-n // 32) * 32


def eigh_barriers(n: int, sweeps: float) -> float:
    """Of a matrix with eigenvectors, n ≥ 2; a reduction is one."""
    load, representable, store = 2, 1, 1
    tridiagonal = 4 * (n - 2) + 1
    return load + tridiagonal + (n + 1) + 3 * sweeps + 1 + representable + store


def eigh_reductions(n: int, sweeps: float) -> float:
    return 1 + 2 * (n - 2) + 2 * sweeps + 1 + 1


def eigh_flops(n: int, sweeps: float, steps: float) -> float:
    """6 i² and 4 i² in step i of the reduction and of forming Q; a step of QL is run by all threads and rotates n."""
    threads = _threads(n)
    reduction = 6 * _squares(n) - 4 * (n - 1) ** 2 + 30 * threads * (n - 2)
    return 2 * n * n + reduction + 4 * _squares(n) + 12 * threads * sweeps + (18 * threads + 6 * n) * steps


def eigh_shared(n: int, sweeps: float, steps: float) -> float:
    """Loads and stores of single numbers."""
    threads = _threads(n)
    per_reduction = threads * (threads // 32) if n > 32 else 0
    reduction = 5 * _squares(n) - 3 * (n - 1) ** 2 + (n - 2) * (3.5 * n + threads + 2 * per_reduction)
    per_sweep = 5 * n + 3 * threads + 2 * per_reduction
    return 6 * n * n + reduction + 5 * _squares(n) + per_sweep * sweeps + (2 * threads + 2 * n + 2) * steps


def eigh_work(n: int, path: str) -> Work:
    sweeps = QL_SWEEPS * n
    steps = sweeps * QL_LENGTH * n
    barriers = eigh_barriers(n, sweeps)
    cycles = (
        barriers * (WARP_BARRIER if path == "warp" else BLOCK_BARRIER)
        + eigh_reductions(n, sweeps) * 5 * SHUFFLE
        + n**2 / 2 * UNROLLED * 3  # a thread's passes over its rows and columns
        + n * (ROOT + 2 * DIVIDE)
        + steps * (ROOT + DIVIDE + 9 * ADD)
    )
    return Work(barriers, eigh_shared(n, sweeps, steps), eigh_flops(n, sweeps, steps), cycles)


class Francis(NamedTuple):
    """Of one matrix: `steps` of the bulge, `elements` that their reflectors meet (rows and columns of the window)."""

    sweeps: float
    steps: float
    elements: float
    groups: float  # of reflectors that a block applies together

    @classmethod
    def of(cls, n: int, sweeps_per_eigenvalue: float = FRANCIS_SWEEPS) -> Francis:
        sweeps, steps = sweeps_per_eigenvalue * n, sweeps_per_eigenvalue * n**2 / 2
        return cls(sweeps, steps, sweeps_per_eigenvalue * n**3 / 3, steps / REFLECTORS + sweeps / 2)


def eigvals_barriers(n: int, path: str, francis: Francis) -> float:
    """Of the team: warp barriers of a warp, block barriers of a block."""
    reduction = 6 * (n - 2) + 5
    if path == "warp":
        return reduction + 2 * francis.steps + 5 * francis.sweeps + 1.5 * n
    return reduction + 2 * francis.groups


def eigvals_flops(n: int, path: str, francis: Francis) -> float:
    """A reflector is made by the 32 lanes of a warp and takes 10 operations per element."""
    threads = _threads(n)
    sizes = n * (n - 1) // 2 - 1  # 2 + … + (n − 1)
    reduction = 4 * n * sizes + 6 * _squares(n) + 25 * threads * (n - 2)
    if path == "packed":
        reduction += 5 * 32 * n * (n - 2)  # rows of global memory are summed by warps, with five shuffles each
    return reduction + 32 * 15 * francis.steps + 10 * (francis.elements + 4 * francis.steps) + 1400 * francis.sweeps


def eigvals_shared(n: int, path: str, francis: Francis) -> float:
    """Loads and stores of single numbers."""
    threads = _threads(n)
    sizes = n * (n - 1) // 2 - 1
    in_shared = 5 * n * sizes + 4 * _squares(n)
    reduction = 2 * n * sizes + 3 * _squares(n) if path == "packed" else in_shared
    per_reduction = 0 if path == "warp" else threads * (threads // 32)
    reduction += (n - 2) * (5 * n + 2 * threads + 3 * per_reduction)
    made = 32 * 3 * francis.steps + 32 * 15 * francis.sweeps
    if path == "warp":
        return reduction + made + 6 * (francis.elements + 4 * francis.steps)
    near = 15  # elements that the chief's reflector meets
    far = francis.elements - 11 * francis.steps
    # Ten elements loaded and stored, and eight reflectors of five numbers, per eight reflectors.
    return reduction + made + (6 * near + 5) * francis.steps + 60 / REFLECTORS * far


def eigvals_work(n: int, path: str) -> Work:
    francis = Francis.of(n)
    barrier = WARP_BARRIER if path == "warp" else BLOCK_BARRIER
    reflector = ROOT + DIVIDE + 8 * ADD + SHARED
    near = reflector + 2 * (2 * SHARED + 5 * ADD + WARP_BARRIER)
    far_pass = 0 if path == "warp" else 2 * BLOCK_BARRIER + 2 * SHARED + REFLECTORS * 4 * ADD
    cycles = (
        (6 * n + 5) * (barrier + 3 * SHUFFLE)
        + n**2 * UNROLLED * 1.25
        + francis.steps * near
        + francis.groups * far_pass
        + francis.sweeps * 3 * (5 * SHUFFLE + 2 * SHARED)  # the search for windows, the shifts
    )
    return Work(
        eigvals_barriers(n, path, francis), eigvals_shared(n, path, francis), eigvals_flops(n, path, francis), cycles
    )


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
