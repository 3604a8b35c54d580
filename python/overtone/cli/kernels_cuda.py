"""overtone kernels --cuda: what every CUDA C++ kernel takes of every architecture, or a model of its time."""

from __future__ import annotations

import argparse

from overtone.cli import kernels


def run(args: argparse.Namespace) -> int:
    if args.model:
        print_model()
        return 0
    from overtone.tools import cuda_aot as aot

    obstacle = aot.obstacle()
    if obstacle:
        return kernels._fail(f"the CUDA kernels cannot be compiled: {obstacle}")
    from overtone.tools import triton_aot as limits

    architectures = args.arch or list(aot.ARCHITECTURES)
    unknown = [name for name in architectures if name not in aot.ARCHITECTURES]
    if unknown:
        return kernels._fail(f"--arch: got {unknown[0]!r}, wanted one of {', '.join(aot.ARCHITECTURES)}")
    rows: list[tuple[str, ...]] = []
    problems: list[str] = []
    for launch, name, registers, spills in aot.compile_all(architectures, args.jobs or 1):
        dtype = str(launch.dtype).removeprefix("torch.")
        if args.dtype and dtype not in args.dtype:
            continue
        architecture = limits.ARCHITECTURES["sm_89" if name == "sm_86" else name]  # the same limits
        share = limits.occupancy(architecture, registers, launch.shared_bytes, launch.warps)
        usage = limits.Usage(registers, spills, launch.shared_bytes, share)
        place = (launch.name, f"n={launch.n}", "", str(launch.warps), "", dtype, name)
        rows.append((*place, str(registers), str(spills), str(launch.shared_bytes), f"{share:.1%}"))
        problem = usage.problem(architecture)
        if problem:
            problems.append(f"{' '.join(filter(None, place))}: {problem}")
    return kernels.report(args, rows, problems)


def print_model() -> None:
    """Per batch and GPU: what a matrix costs, the predicted time, and that of a loop over the batch."""
    from overtone.tools import cuda_cost

    header = (
        "op", "batch", "kernel", "GPU", "barriers", "shared", "MFLOP", "resident", "waves", "ms", "loop ms",
        "times faster",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for op, count, n in cuda_cost.BATCHES:
        for name, gpu in cuda_cost.GPUS.items():
            found = cuda_cost.predict(op, count, n, gpu)
            work, loop = found.work, count * cuda_cost.LOOP_MILLISECONDS
            rows.append((
                op, f"{count}×{n}", found.launch.name, name, f"{work.barriers:.0f}", f"{work.shared:.2e}",
                f"{work.flops / 1e6:.2f}", str(found.resident), str(found.waves), f"{found.milliseconds:.2f}",
                f"{loop:.0f}", f"{loop / found.milliseconds:.0f}",
            ))  # fmt: skip
    kernels.print_table(header, rows)
    print(
        "float32; per matrix: barriers, loads and stores of shared memory, FLOPs. A model, not a measurement: "
        f"{cuda_cost.ASSUMPTIONS}. loop: a cuSOLVER call per matrix, of which {cuda_cost.LOOP_MILLISECONDS} ms is the "
        "floor (for eigh to n = 32 torch has a batched one, which this is not)."
    )
