"""`overtone train`: a Vision Transformer with the spectrum of your choice, on a CPU, a GPU, or many with torchrun."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overtone.training import TrainConfig


def add_parser(commands: argparse._SubParsersAction) -> None:
    from overtone.training.config import TrainConfig, field_types

    parser = commands.add_parser(
        "train",
        help="train a ViT with free, sharpening or smoothing layers",
        description="Trains a Vision Transformer and leaves in the run's folder: config.json, metrics.csv (a row per "
        "epoch, with every layer's HFC/LFC), model.safetensors, a checkpoint, and TensorBoard's event files. A run "
        "that was killed goes on with --out and --resume alone, to the same result. Several processes: torchrun "
        "--nproc-per-node N -m overtone train …",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="folder of the run (%(default)s)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the folder's checkpoint, if there is one, with the run's own options. More --epochs make the "
        "run longer: the learning rate follows the longer run's cosine from there. Another option that would change "
        "the result, or other data, is refused",
    )
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
    from overtone.training import TrainingError, train
    from overtone.training.errors import machine_errors

    is_first = os.environ.get("RANK", "0") == "0"
    try:
        with machine_errors():
            config = _config(arguments)
        if is_first:
            print(config.as_text(), flush=True)
        result = train(config, arguments.out, resume=arguments.resume)
    except TrainingError as error:
        return _fail(str(error), error.exit_status)
    except KeyboardInterrupt:
        return _fail(f"stopped; go on with --out {arguments.out} --resume", 130)
    if is_first:
        print(f"test accuracy {result.test_accuracy:.2%} after {len(result.history)} epochs")
        print(f"Run: {result.folder}")
    return 0


def _config(arguments: argparse.Namespace) -> TrainConfig:
    """The fields that are given (flags before those of --config), over the resumed run's or the defaults."""
    from overtone.training import ConfigError, TrainConfig, resolved
    from overtone.training.trainer import check_same_run, saved_config

    names = {field.name for field in dataclasses.fields(TrainConfig)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    if arguments.config:
        given = TrainConfig.from_json(arguments.config).to_dict() | given
    before = saved_config(arguments.out) if arguments.resume else None
    if arguments.resume and before is None and not given:
        raise ConfigError(f"{arguments.out}: there is no run to resume, and no option says what to train")
    config = (before or TrainConfig()).replace(**given)
    try:
        return resolved(config)
    except ConfigError:
        if before is not None:  # what does not go together is an option and the run
            check_same_run(arguments.out, before, config)
        raise


def _fail(message: str, status: int) -> int:
    print(f"overtone train: {message}", file=sys.stderr, flush=True)
    return status
