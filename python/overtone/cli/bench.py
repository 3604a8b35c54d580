"""`overtone bench`: our ops beside eager PyTorch and torch.compile, in one run, each ratio beside a passed check."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from overtone._files import replace_atomically
from overtone.cli import fail, positive

if TYPE_CHECKING:
    from overtone.benchmarks.harness.case import Case
    from overtone.benchmarks.harness.runner import Result, Run

DESCRIPTION = """\
Compares our ops with eager PyTorch, torch.compile, torch.linalg and the modules of timm and transformers, in one
interleaved run: time, and the peak of memory of one call. A ratio is printed only beside a passed check. Without --all
it runs the standard set, which is published: about eight minutes on two cores. With --all it takes at most 28, and only
the standard cases and those of an --op have baselines under torch.compile.
"""
EXAMPLES = """\
examples:
  overtone bench --list                                  the cases; * is the standard set
  overtone bench --op eigh --all --json eigh.json        every case of one op
  overtone bench --require-idle --json run.json          then: overtone bench --publish run.json
  overtone bench --against main --op frequency_norms     has it become slower since? 1 if so
  overtone bench --scaling reports/scaling.html          time and memory against N, batch, d, depth, threads
How a figure is made, and what the JSON holds: docs/benchmarks.md
"""
NOISY = "other processes used the machine during the run, and --require-idle was given"
ALL_MINUTES = 28.0
FILTERS = {"op": "op", "shape": "shape", "dtype": "dtype_name", "mode": "mode", "backend": "backend"}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to `overtone`."""
    parser = subparsers.add_parser(
        "bench",
        help="compare with PyTorch, eager and compiled",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_argument_group("which cases")
    which.add_argument("--op", nargs="+", metavar="NAME", help="only these ops")
    which.add_argument("--shape", nargs="+", metavar="BxNxC", help="only these shapes, as --list prints them")
    which.add_argument("--dtype", nargs="+", metavar="DTYPE", help="only these, for instance float32")
    which.add_argument("--mode", nargs="+", metavar="MODE", help="only forward, backward or forward+backward")
    which.add_argument("--backend", nargs="+", metavar="NAME", help="only cpu, triton or cuda (default: what is here)")
    which.add_argument("--all", action="store_true", help="every case, not only the standard set")
    which.add_argument("--list", action="store_true", help="print the cases, * the standard set, and stop")
    how = parser.add_argument_group("how")
    how.add_argument("--rounds", type=positive(int), metavar="N", help="clean rounds wanted per case (10)")
    how.add_argument("--seconds", type=positive(float), metavar="S", help="time limit per case (15)")
    how.add_argument(
        "--minutes", type=positive(float), metavar="M", help="time limit of the run (28 with --all, else none)"
    )
    how.add_argument("--threads", type=positive(int), metavar="N", help="threads of torch (default: torch's)")
    how.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there, after every case")
    how.add_argument("--quick", action="store_true", help="two calls each, without torch.compile: a smoke test")
    how.add_argument("--no-compile", action="store_true", help="leave the torch.compile baselines out")
    how.add_argument("--require-idle", action="store_true", help="fail if other processes use the machine")
    other = parser.add_argument_group("instead").add_mutually_exclusive_group()
    other.add_argument(
        "--publish", nargs="+", type=Path, metavar="FILE", help="the published figures, from such --json"
    )
    other.add_argument("--readme", nargs="+", type=Path, help=argparse.SUPPRESS)  # --publish, until the next release
    other.add_argument("--against", metavar="REV", help="this checkout against a commit, or a folder that is built")
    other.add_argument("--scaling", type=Path, metavar="FILE", help="how cost grows, as one HTML page")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0: every result is right; 1: one is wrong or slower, or the machine is not idle and had to be; 2: a mistake."""
    if args.readme:
        _say("overtone bench: --readme is deprecated, use --publish")
    if args.publish or args.readme:
        return _publish(args.publish or args.readme)
    # Imported here: the other commands need none of this.
    import torch

    from overtone.benchmarks.harness import runner

    if args.minutes is None and args.all:
        args.minutes = ALL_MINUTES
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.scaling:
        return _scaling(args)
    standard = _standard_names()
    cases = [case for case in runner.all_cases() if _selected(case, args)]
    if args.list:
        print("\n".join(f"{'*' if case.name in standard else ' '} {case.name}" for case in cases))
    elif not args.all:
        cases = _narrowed(cases, standard, named=args.op or ())
    if not cases:
        beyond = "" if args.all or args.list else " in the standard set (--all: in all)"
        return fail(
            "bench", f"no case{beyond} has {_describe_filters(args)}; `overtone bench --list` prints them all", status=2
        )
    if args.list:
        return 0
    return _against(args, [case.name for case in cases]) if args.against else _compare(args, cases)


def _narrowed(cases: Sequence[Case], standard: set[str], named: Sequence[str]) -> list[Case]:
    """The standard cases; and all of an op that was named and has none of them."""
    has_standard = {case.op for case in cases if case.name in standard}
    return [case for case in cases if case.name in standard or (case.op in named and case.op not in has_standard)]


def _beyond_standard(cases: Sequence[Case]) -> set[str]:
    """What is not published; but a case of ours under torch.compile is about its compiled baseline."""
    from overtone.benchmarks.harness.case import is_compiled

    return {case.name for case in cases if not is_compiled(case.workload.ours)} - _standard_names()


def _standard_names() -> set[str]:
    from overtone.benchmarks.harness.tables import standard_names

    return standard_names()


def _compare(args: argparse.Namespace, cases: Sequence[Case]) -> int:
    from overtone.benchmarks.harness import machine, report, runner, timing

    foreign = machine.other_cpu_load()
    if machine.is_noisy(foreign):
        message = f"THE MACHINE IS BUSY: other processes use {foreign:.2f} CPUs"
        if args.require_idle:
            return fail("bench", f"{message}; --require-idle wants less than {machine.MAX_OTHER_LOAD}", status=1)
        _say(f"WARNING: {message}; the figures are not to be quoted")
    progress = _Progress(len(cases))

    def keep(run: Run) -> None:
        progress.after(run.results[-1])
        _keep_json(args.json, report.as_json(run))

    result = runner.run_cases(
        cases,
        _plan(args, timing.QUICK if args.quick else timing.Plan()),
        compiled=not (args.no_compile or args.quick),
        quick=args.quick,
        other_cpu_load=foreign,
        without_compile=_beyond_standard(cases) if args.all and not args.op else (),
        budget=args.minutes and 60 * args.minutes,
        before=progress.before,
        after=keep,
    )
    print(report.table(result))
    _write_json(args.json, report.as_json(result))
    if result.interrupted:
        return 130
    if result.left_out:
        return fail("bench", f"the time was up before {result.left_out} of the cases; see --minutes", status=1)
    if args.require_idle and not result.idle:
        return fail("bench", NOISY, status=1)
    return 0 if result.passed else 1


def _against(args: argparse.Namespace, names: Sequence[str]) -> int:
    """Whether this checkout is slower than another one."""
    from overtone.benchmarks.harness import checkout, compare

    options = {"rounds": args.rounds or compare.ROUNDS}
    if args.quick:
        options = {"rounds": compare.FEWEST_ROUNDS, "seconds": 0.0}
    try:
        with checkout.other_build(args.against) as site:
            results = compare.compare_all(
                names,
                lambda: (compare.Process(site, args.threads), compare.Process(None, args.threads)),
                lambda comparison: print(comparison.row(), flush=True),
                **options,
            )
    except (checkout.BuildError, compare.SideDied) as error:
        return fail("bench", str(error), status=2)
    wrong = [result for result in results if result.verdict in ("SLOWER", "FAILED")]
    print(f"{len(results) - len(wrong)} of {len(results)} cases are right and not slower than {args.against}", end="")
    print(f", by more than {compare.TOLERANCE:.0%} and noise:" if wrong else ".")
    print("\n".join(result.row() for result in wrong), end="\n" if wrong else "")
    _write_json(args.json, {"against": args.against, "results": [dataclasses.asdict(result) for result in results]})
    if args.require_idle and not all(result.reliable for result in results):
        return fail("bench", NOISY, status=1)
    return 1 if wrong else 0


def _scaling(args: argparse.Namespace) -> int:
    """How cost grows, as a table and a page."""
    if importlib.util.find_spec("matplotlib") is None:  # said before the minutes that measuring takes
        return fail("bench", "figures need matplotlib: pip install 'overtone[report]'", status=2)
    from overtone.benchmarks.harness import machine, scaling, scaling_page

    plan = dataclasses.replace(scaling.PLAN, rounds=1, slice_seconds=0.0) if args.quick else scaling.PLAN
    chosen = [sweep for sweep in scaling.sweeps() if args.op is None or sweep.op.split()[0] in args.op]
    if not chosen:
        return fail("bench", f"no curve has {_describe_filters(args)}", status=2)
    measured = [scaling.measure(sweep, _plan(args, plan), _say) for sweep in chosen]
    print(scaling_page.slopes(measured).text())
    facts = machine.describe()
    scaling_page.page(measured, facts).write(args.scaling)
    print(f"\nPage: {args.scaling}")
    _write_json(args.json, scaling_page.as_json(measured, facts))
    failures = [failure for each in measured for failure in each.failures]
    for failure in failures:
        _say(f"FAILED {failure}")
    if args.require_idle and any(each.noisy for each in measured):
        return fail("bench", NOISY, status=1)
    return 1 if failures else 0


def _publish(files: Sequence[Path]) -> int:
    from overtone.benchmarks.harness import checkout, publish

    try:
        written = publish.write(files, checkout.ROOT)
    except (OSError, ValueError, ImportError) as error:
        return fail("bench", str(error), status=2)
    for path in written:
        _say(f"written: {path.relative_to(checkout.ROOT)}")
    return 0


def _write_json(path: Path | None, content: object) -> None:
    _keep_json(path, content)
    if path is not None:
        _say(f"written: {path}")


def _keep_json(path: Path | None, content: object) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_atomically(path) as draft:
        draft.write_text(json.dumps(content, indent=1) + "\n")


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


class _Progress:
    """One line per case on stderr: its name before it runs, its figure after."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0

    def before(self, case: Case) -> None:
        self.done += 1
        print(f"[{self.done}/{self.total}] {case.name}", end="", file=sys.stderr, flush=True)

    def after(self, result: Result) -> None:
        best = result.fastest_baseline
        figure = f"{best[1]:.2f}x {best[0]}" if best else "FAILED"
        _say(f": {figure}{'' if result.reliable else ', on a busy machine'}")
