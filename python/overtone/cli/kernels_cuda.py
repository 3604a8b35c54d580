"""overtone kernels --cuda: what every CUDA C++ kernel takes of every architecture."""

from __future__ import annotations

import argparse

from overtone.cli import fail, kernels


def run(args: argparse.Namespace) -> int:
    if args.cost:
        return fail("kernels", "--cost is of the Triton kernels: leave out --cuda")
    from overtone.tools import cuda_aot as aot

    obstacle = aot.obstacle()
    if obstacle:
        return fail("kernels", f"the CUDA kernels cannot be compiled: {obstacle}")
    from overtone.tools import occupancy as limits

    architectures = args.arch or list(aot.ARCHITECTURES)
    unknown = [name for name in architectures if name not in aot.ARCHITECTURES]
    if unknown:
        return fail("kernels", f"--arch: got {unknown[0]!r}, wanted one of {', '.join(aot.ARCHITECTURES)}")
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
        problem = usage.violation(architecture)
        if problem:
            problems.append(f"{' '.join(filter(None, place))}: {problem}")
    return kernels.report(args, rows, problems)
