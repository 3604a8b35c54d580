"""overtone kernels: what every Triton kernel takes of every architecture it is built for. No GPU is needed."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

_HEADER = ("kernel", "tokens", "BT×BC", "warps", "dtype", "architecture", "registers", "spills", "shared", "occupancy")


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "kernels",
        help="registers, spills, shared memory and occupancy of every Triton kernel on every architecture",
        description="Compiles every Triton kernel in every shipped configuration, without a GPU, and prints what it "
        "takes: registers per thread, bytes spilled per thread, bytes of shared memory per block, and the share of a "
        "processor's warps that can be resident. Takes minutes the first time; Triton caches what it compiled.",
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 on a spill or an exceeded limit")
    parser.add_argument("--arch", action="append", metavar="NAME", help="only this one (repeatable): sm_90, gfx942, …")
    parser.add_argument("--dtype", action="append", metavar="NAME", help="only this one (repeatable): float32, …")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    obstacle = _obstacle()
    if obstacle:
        return _fail(obstacle)
    from overtone.triton_kernels import compile as aot

    by_name = {str(dtype).removeprefix("torch."): dtype for dtype in aot.DTYPES}
    architectures = args.arch or list(aot.ARCHITECTURES)
    dtypes = args.dtype or list(by_name)
    for kind, wanted, known in (("--arch", architectures, aot.ARCHITECTURES), ("--dtype", dtypes, by_name)):
        unknown = [name for name in wanted if name not in known]
        if unknown:
            return _fail(f"{kind}: got {unknown[0]!r}, wanted one of {', '.join(known)}")

    kernels = [kernel for name in dtypes for kernel in aot.kernels(by_name[name])]
    jobs = [(kernel, name) for kernel in kernels for name in architectures]
    rows, problems = [], []
    for done, (kernel, name) in enumerate(jobs):
        label = f"{kernel.name} {str(kernel.dtype).removeprefix('torch.')} {name}"
        _progress(f"compiling {done + 1}/{len(jobs)}  {label}")
        usage = aot.compile(kernel, aot.ARCHITECTURES[name])
        rows.append(_row(kernel, name, usage))
        problem = usage.problem(aot.ARCHITECTURES[name])
        if problem:
            problems.append(f"{label} {kernel.config}: {problem}")
    _progress("")
    _print_table(rows)
    for problem in problems:
        print(f"problem: {problem}")
    print(f"{len(rows)} compiled, {len(problems)} with a spill or an exceeded limit")
    return 1 if args.check and problems else 0


def _obstacle() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set: kernels are interpreted, not compiled; unset it"
    return None


def _fail(message: str) -> int:
    print(f"overtone kernels: {message}", file=sys.stderr)
    return 2


def _row(kernel, architecture: str, usage) -> tuple[str, ...]:
    config = kernel.config
    return (
        kernel.name,
        str(kernel.tokens),
        f"{config.BT}×{config.BC}",
        str(config.num_warps),
        str(kernel.dtype).removeprefix("torch."),
        architecture,
        str(usage.registers),
        str(usage.spills),
        str(usage.shared),
        f"{usage.occupancy:.0%}",
    )


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(_HEADER, *rows, strict=True)]
    for row in (_HEADER, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _progress(text: str) -> None:
    """One line on stderr that overwrites itself; nothing where stderr is not a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
