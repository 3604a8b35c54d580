"""`overtone bench`: our ops beside eager PyTorch and torch.compile, in one run, each ratio beside a passed check."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overtone.benchmarks.case import Case

FILTERS = {"op": "op", "shape": "shape", "dtype": "dtype_name", "mode": "mode"}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to `overtone`."""
    parser = subparsers.add_parser("bench", help="compare with PyTorch, eager and compiled", description=__doc__)
    parser.add_argument("--op", nargs="+", metavar="NAME", help="only these ops")
    parser.add_argument("--shape", nargs="+", metavar="BxNxC", help="only these shapes, as --list prints them")
    parser.add_argument("--dtype", nargs="+", metavar="DTYPE", help="only these, for instance float32")
    parser.add_argument("--mode", nargs="+", metavar="MODE", help="only forward, backward or forward+backward")
    parser.add_argument("--rounds", type=_positive(int), metavar="N", help="undisturbed rounds wanted per case (10)")
    parser.add_argument("--seconds", type=_positive(float), metavar="S", help="time limit per case (15)")
    parser.add_argument("--threads", type=_positive(int), metavar="N", help="threads of torch (default: torch's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--quick", action="store_true", help="two calls each, without torch.compile: a smoke test")
    parser.add_argument("--no-compile", action="store_true", help="leave the torch.compile baselines out")
    parser.add_argument("--require-idle", action="store_true", help="fail if other processes use the machine")
    parser.set_defaults(run=run)


def _positive(kind: type):
    def parse(text: str):
        value = kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"got {text}, wanted a number above 0")
        return value

    parse.__name__ = kind.__name__  # argparse names it in the error for a text that is no number
    return parse


def run(args: argparse.Namespace) -> int:
    """0: every result is right; 1: one is wrong, or the machine is not idle and had to be; 2: nothing to do."""
    # Imported here: the other commands need none of this.
    import torch

    from overtone.benchmarks import kit, machine, report, timing

    cases = [case for case in kit.all_cases() if _selected(case, args)]
    if not cases:
        return _fail(f"no case has {_describe_filters(args)}; `overtone bench --list` prints them all", code=2)
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    if args.threads:
        torch.set_num_threads(args.threads)
    foreign = machine.foreign_cpus()
    if machine.is_disturbed(foreign):
        message = f"THE MACHINE IS BUSY: other processes use {foreign:.2f} CPUs"
        if args.require_idle:
            return _fail(f"{message}; --require-idle wants less than {machine.FOREIGN_LIMIT}", code=1)
        _say(f"WARNING: {message}; the figures are not to be quoted")
    result = kit.run_cases(
        cases,
        _plan(args, timing.QUICK if args.quick else timing.Plan()),
        compiled=not (args.no_compile or args.quick),
        quick=args.quick,
        foreign_cpus=foreign,
        progress=_Progress(len(cases)),
    )
    print(report.table(result))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report.as_json(result), indent=1) + "\n")
        _say(f"written: {args.json}")
    if args.require_idle and not result.idle:
        return _fail("other processes used the machine during the run, and --require-idle was given", code=1)
    return 0 if result.passed else 1


def _selected(case: Case, args: argparse.Namespace) -> bool:
    wanted = {attribute: getattr(args, option) for option, attribute in FILTERS.items()}
    return all(values is None or getattr(case, attribute) in values for attribute, values in wanted.items())


def _describe_filters(args: argparse.Namespace) -> str:
    given = {option: getattr(args, option) for option in FILTERS}
    return ", ".join(f"--{option} {' '.join(values)}" for option, values in given.items() if values)


def _plan(args: argparse.Namespace, plan):
    given = {name: getattr(args, name) for name in ("rounds", "seconds") if getattr(args, name) is not None}
    return dataclasses.replace(plan, **given)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _fail(message: str, code: int) -> int:
    _say(f"overtone bench: {message}")
    return code


class _Progress:
    """One line per case on stderr."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def __call__(self, case: Case) -> None:
        self.done += 1
        _say(f"[{self.done}/{self.total}] {case.name}")
