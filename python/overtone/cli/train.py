"""`overtone train`: a Vision Transformer with the spectrum of your choice, on a CPU, a GPU, or many with torchrun."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any


def add_parser(commands: argparse._SubParsersAction) -> None:
    from overtone.training.config import TrainConfig, field_types

    parser = commands.add_parser(
        "train",
        help="train a ViT with free, sharpening or smoothing layers",
        description="Trains a Vision Transformer and leaves in the run's folder: config.json, metrics.csv (a row per "
        "epoch, with every layer's HFC/LFC), model.safetensors, a checkpoint, and TensorBoard's event files. A run "
        "that was killed goes on with --resume, to the same result. Several processes: torchrun --nproc-per-node N "
        "-m overtone train …",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="folder of the run (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint, if there is one")
    parser.add_argument("--config", type=Path, metavar="JSON", help="fields from a file, such as a run's config.json")
    kinds = field_types()
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(TrainConfig):
        title = field.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        choices, _ = kinds[field.name]
        groups[title].add_argument(f"--{field.name.replace('_', '-')}", **_how_to_read(choices), help=_help(field))
    parser.set_defaults(run=run)


def _how_to_read(choices: tuple[Any, ...]) -> dict[str, Any]:
    """argparse's options for a field. Flags that are not given leave the field to --config or its default."""
    options: dict[str, Any] = {"default": argparse.SUPPRESS}
    if choices == (bool,):
        return options | {"action": argparse.BooleanOptionalAction}
    if isinstance(choices[0], type):
        return options | {"type": choices[0], "metavar": {int: "N", float: "X", str: "TEXT"}[choices[0]]}
    return options | {"type": type(choices[0]), "choices": choices}


def _help(field: dataclasses.Field) -> str:
    default = "" if field.default is None else f" (default: {field.default})"
    return (field.metadata["help"] + default).replace("%", "%%")


def run(arguments: argparse.Namespace) -> int:
    """0: trained; 1: the run failed; 2: a mistake in what was asked."""
    from overtone.training import TrainConfig, TrainingError, resolved, train

    is_first = os.environ.get("RANK", "0") == "0"
    try:
        config = TrainConfig.from_json(arguments.config) if arguments.config else TrainConfig()
        names = {field.name for field in dataclasses.fields(TrainConfig)}
        config = resolved(config.replace(**{name: value for name, value in vars(arguments).items() if name in names}))
        if is_first:
            print(config.as_text(), flush=True)
        result = train(config, arguments.out, resume=arguments.resume)
    except TrainingError as error:
        return _fail(str(error), error.exit_status)
    except KeyboardInterrupt:
        return _fail(f"stopped; go on with the same command and --resume ({arguments.out})", 130)
    if is_first:
        print(f"test accuracy {result.test_accuracy:.2%} after {len(result.history)} epochs")
        print(f"Run: {result.folder}")
    return 0


def _fail(message: str, status: int) -> int:
    print(f"overtone train: {message}", file=sys.stderr, flush=True)
    return status
