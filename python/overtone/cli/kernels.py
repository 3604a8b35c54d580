"""overtone kernels: what every Triton kernel takes of every architecture it is built for. No GPU is needed."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import os
import sys
from pathlib import Path

from overtone.cli import fail, renamed_flag
from overtone.report.table import aligned

_HEADER = (
    "kernel", "case", "tile", "warps", "stages", "dtype", "architecture", "registers", "spills", "shared", "occupancy",
)  # fmt: skip
_PLACE = _HEADER.index("registers")  # what comes before names a row, what follows is what it takes


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "kernels",
        help="registers, spills, shared memory and occupancy of every Triton kernel on every architecture",
        description="Compiles every Triton kernel in every shipped configuration, without a GPU, and prints what it "
        "takes: registers per thread, bytes spilled per thread, bytes of shared memory per block, and the share of a "
        "processor's warps that can be resident. Takes minutes the first time; Triton caches what it compiled.",
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 on a spill or an exceeded limit or budget")
    parser.add_argument("--budget", type=Path, metavar="CSV", help="a table like this one that no kernel may exceed")
    parser.add_argument("--write-budget", type=Path, metavar="CSV", help="write such a table")
    parser.add_argument("--cost", action="store_true", help="instead: bytes, FLOPs and roofline time of attention")
    renamed_flag(parser, "--model", "--cost")
    parser.add_argument("--cuda", action="store_true", help="the CUDA C++ kernels of linalg instead of the Triton ones")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="compile so many at a time")
    parser.add_argument("--sample-every", type=int, default=1, metavar="N", help="only a sample: every N-th kernel")
    renamed_flag(parser, "--every", "--sample-every", type=int)
    parser.add_argument("--arch", action="append", metavar="NAME", help="only this one (repeatable): sm_90, gfx942, …")
    parser.add_argument("--dtype", action="append", metavar="NAME", help="only this one (repeatable): float32, …")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.cuda:
        from overtone.cli import kernels_cuda

        return kernels_cuda.run(args)
    obstacle = _obstacle()
    if obstacle:
        return fail("kernels", obstacle)
    from overtone.tools import triton_aot as aot

    by_name = {str(dtype).removeprefix("torch."): dtype for dtype in aot.DTYPES}
    architectures = args.arch or list(aot.ARCHITECTURES)
    dtypes = args.dtype or list(by_name)
    for kind, wanted, known in (("--arch", architectures, aot.ARCHITECTURES), ("--dtype", dtypes, by_name)):
        unknown = [name for name in wanted if name not in known]
        if unknown:
            return fail("kernels", f"{kind}: got {unknown[0]!r}, wanted one of {', '.join(known)}")

    if args.cost:
        _print_cost()
        return 0
    jobs = [(name, by_name[dtype]) for name in architectures for dtype in dtypes]
    rows, problems = [], []
    for kernel, name, usage in aot.compile_all(jobs, args.jobs, args.sample_every):
        row = _row(kernel, name, usage)
        rows.append(row)
        _progress(f"compiled {len(rows)}: {' '.join(row[:_PLACE])}")
        problem = usage.violation(aot.ARCHITECTURES[name])
        if problem:
            problems.append(f"{' '.join(row[:_PLACE])}: {problem}")
    _progress("")
    return report(args, rows, problems)


def report(args: argparse.Namespace, rows: list[tuple[str, ...]], problems: list[str]) -> int:
    """Prints the table and what is wrong with it; the command's status."""
    print("\n".join(aligned([_HEADER, *rows])))
    if args.budget is not None:
        problems += _over_budget(rows, args.budget)
    if args.write_budget is not None:
        with args.write_budget.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows((_HEADER, *rows))
    for problem in problems:
        print(f"problem: {problem}")
    print(f"{len(rows)} compiled, {len(problems)} with a spill or an exceeded limit")
    return 1 if args.check and problems else 0


def _over_budget(rows: list[tuple[str, ...]], file: Path) -> list[str]:
    """What takes more than its row of the budget allows, and what has no row."""
    with file.open(newline="") as lines:
        budget = {tuple(row[:_PLACE]): row[_PLACE:] for row in csv.reader(lines)}
    problems = []
    for row in rows:
        allowed = budget.get(row[:_PLACE])
        if allowed is None:
            problems.append(f"{' '.join(row[:_PLACE])}: not in {file}; --write-budget adds it")
            continue
        *sizes, occupancy = (float(cell.rstrip("%")) for cell in row[_PLACE:])
        *most, least = (float(cell.rstrip("%")) for cell in allowed)
        if occupancy < least or any(size > limit for size, limit in zip(sizes, most, strict=True)):
            taken = ", ".join(f"{name} {cell}" for name, cell in zip(_HEADER[_PLACE:], row[_PLACE:], strict=True))
            problems.append(f"{' '.join(row[:_PLACE])}: {taken}; the budget is {', '.join(allowed)}")
    return problems


def _obstacle() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set: kernels are interpreted, not compiled; unset it"
    return None


def _row(kernel, architecture: str, usage) -> tuple[str, ...]:
    options = kernel.options
    return (
        kernel.name,
        kernel.case,
        kernel.tile,
        str(options["num_warps"]),
        str(options.get("num_stages", "")),
        str(kernel.dtype).removeprefix("torch."),
        architecture,
        str(usage.registers),
        str(usage.spills),
        str(usage.shared),
        f"{usage.occupancy:.1%}",
    )


def _print_cost() -> None:
    """Per shape and GPU: what crosses HBM, and the time that bandwidth and peak allow, ours and eager's."""
    import torch

    from overtone.tools import attention_cost as model
    from overtone.triton_kernels.attention.config import padded_width

    header = (
        "shape", "GPU", "mode", "launches", "MB", "eager MB", "ratio", "half norms", "µs", "eager µs", "times faster",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for shape in model.SHAPES:
        for name, gpu in model.GPUS.items():
            for mode, training in (("forward", False), ("forward+backward", True)):
                ours = model.ours(shape, torch.bfloat16, gpu.architecture, training)
                eager = model.eager(shape, torch.bfloat16, training)
                half = model.eager(shape, torch.bfloat16, training, norms_dtype=torch.bfloat16)
                moved, eager_moved, half_moved = (sum(cost.bytes for cost in costs) for costs in (ours, eager, half))
                time, eager_time = (model.roofline(costs, gpu) for costs in (ours, eager))
                rows.append(
                    (
                        shape.label, name, mode, str(len(ours)), f"{moved / 1e6:.1f}", f"{eager_moved / 1e6:.1f}",
                        f"{moved / eager_moved:.2f}", f"{moved / half_moved:.2f}", f"{1e6 * time:.1f}",
                        f"{1e6 * eager_time:.1f}", f"{eager_time / time:.2f}",
                    )
                )  # fmt: skip
    print("\n".join(aligned([header, *rows])))
    print(
        "bfloat16. A model, not a measurement: every tensor crosses HBM once per launch, launches cost nothing, each "
        "runs at the vendor's bandwidth or peak. eager: SDPA, scale, matmul, add, norms in float32 as in the reference "
        "and under autocast; half norms: the ratio of bytes if eager takes the norms in bfloat16."
    )
    padding = ", ".join(f"{width}: {padded_width(width) / width:.2f}" for width in (64, 72, 80, 88, 96, 128))
    print(f"Products with a head of some width are executed at the next power of two, so many times as many: {padding}")


def _progress(text: str) -> None:
    """One line on stderr that overwrites itself; nothing where stderr is not a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
