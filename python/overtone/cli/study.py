"""`overtone study`: trains free, smoothing and sharpening ViTs and writes the papers' tables and figures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "study",
        help="train ViT, ViT⁺ and ViT⁻ and write the papers' tables and figures",
        description="Trains free, smoothing and sharpening ViTs with several seeds, on all, half and a tenth of the "
        "data; measures which eigenvalue dominates, the tokens over depth, the accuracy under corruptions; compares "
        "post-norm, de-escalated and pre-norm models of several depths, and both kinds of spectra; adds what needs no "
        "training; and writes one HTML page, PNG figures and CSV tables beside the papers' numbers. Minutes on two "
        "cores for digits. Interrupted at any moment, the same command continues; finished runs are not repeated.",
    )
    parser.add_argument("--data", default="digits", metavar="NAME", help="digits (default), cifar10 or cifar100")
    parser.add_argument("--data-dir", metavar="FOLDER", help="where the archive of cifar is")
    parser.add_argument("--seeds", type=int, metavar="N", help="runs of everything (default: 3)")
    parser.add_argument("--epochs", type=int, metavar="N", help="with all data (digits 10, cifar 100)")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at a time (default: one per core; with a GPU 1)")
    parser.add_argument("--depths", type=int, nargs="+", metavar="N", help="layers to compare (6 12 24)")
    parser.add_argument(
        "--methods", nargs="*", metavar="NAME", help="also compare methods: those named, or all of them"
    )
    parser.add_argument(
        "--parts", nargs="*", metavar="NAME", help="compare besides the regimes: depth, kinds, text, methods"
    )
    parser.add_argument("--long", action="store_true", help="also 4 to 32 layers, V Λ V⁻¹ on text and mixed")
    parser.add_argument("--quick", action="store_true", help="one seed, a smaller model, 2 epochs: under a minute")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of the report (reports/study-NAME)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0: written; 1: a run failed, or a claim did not come out; 2: a mistake in what was asked."""
    from overtone.study import Plan, study
    from overtone.training import TrainingError

    folder = arguments.out or Path(f"reports/study-{arguments.data}{'-quick' if arguments.quick else ''}")
    try:
        plan = Plan.of(
            arguments.data,
            data_dir=arguments.data_dir,
            seeds=arguments.seeds,
            epochs=arguments.epochs,
            quick=arguments.quick,
            parts=_parts(arguments),
            depths=arguments.depths,
            methods=arguments.methods or None,
            long=arguments.long,
        )
        result = study(plan, folder, jobs=arguments.jobs)
    except TrainingError as error:
        return _fail(str(error), error.exit_status)
    except KeyboardInterrupt:
        return _fail(f"interrupted; run the same command again to continue ({folder})", 130)
    print(result.summary())
    return 0 if result.all_claims_hold else 1


def _parts(arguments: argparse.Namespace) -> list[str]:
    """--methods adds what it names to --parts."""
    from overtone.study import PARTS

    parts = [*PARTS] if arguments.parts is None else arguments.parts
    return parts if arguments.methods is None else [*parts, "methods"]


def _fail(message: str, status: int) -> int:
    print(f"overtone study: {message}", file=sys.stderr, flush=True)
    return status
