"""`overtone train`: a ViT or a language model with the spectrum of your choice, in one process or in many."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overtone.training import TrainConfig
    from overtone.training.config import Setting


def add_parser(commands: argparse._SubParsersAction) -> None:
    from overtone.training.config import GROUPS, RENAMED, SIZES, flag, settings

    parser = commands.add_parser(
        "train",
        help="train a ViT or a language model with free, sharpening or smoothing layers",
        description="Trains a Vision Transformer, or with --data text a language model, and leaves in the run's "
        "folder: config.json, metrics.csv (a row per epoch, with every layer's HFC/LFC), model.safetensors, a "
        "checkpoint, and TensorBoard's event files. A run that was killed continues with --out and --resume alone, to "
        "the same result. Several processes: torchrun --nproc-per-node N -m overtone train …",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="folder of the run (%(default)s)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the folder's checkpoint, if there is one, with the run's own options. More --epochs make "
        "the run longer: the learning rate follows the longer run's cosine from there. Another option that would "
        "change the result, or other data, is refused",
    )
    parser.add_argument("--config", type=Path, metavar="JSON", help="fields from a file, such as a run's config.json")
    names = {group: name for name, group in GROUPS.items()}
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    groups["model"].add_argument("--size", **_how_to_read(tuple(SIZES)), help="ViT-Ti, -S or -B (default: tiny)")
    for setting in settings().values():
        groups[names[setting.group]].add_argument(
            flag(setting.name), **_how_to_read(setting.kinds), help=_help(setting)
        )
    for old, new in RENAMED.items():
        hidden = _how_to_read(settings()[new].kinds) | {"help": argparse.SUPPRESS}
        parser.add_argument(flag(old), **hidden)
    parser.set_defaults(run=run)


def _how_to_read(kinds: tuple[Any, ...]) -> dict[str, Any]:
    """argparse's options for a setting. Flags that are not given leave it to --config or its default."""
    options: dict[str, Any] = {"default": argparse.SUPPRESS}
    if kinds == (bool,):
        return options | {"action": argparse.BooleanOptionalAction}
    if isinstance(kinds[0], type):
        return options | {"type": kinds[0], "metavar": {int: "N", float: "X", str: "TEXT"}[kinds[0]]}
    return options | {"type": type(kinds[0]), "choices": kinds}


def _help(setting: Setting) -> str:
    is_said = setting.default is None or setting.name in ("dim", "num_heads", "patch_size")
    default = "" if is_said else f" (default: {setting.default})"
    return (setting.help + default).replace("%", "%%")


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
        return _fail(f"interrupted; continue with --out {arguments.out} --resume", 130)
    if is_first:
        print(f"{result.summary()} after {len(result.history)} epochs")
        print(f"Run: {result.folder}")
    return 0


def _config(arguments: argparse.Namespace) -> TrainConfig:
    """The fields that are given (flags before those of --config), over the resumed run's or the defaults."""
    from overtone.training import ConfigError, TrainConfig
    from overtone.training.config import RENAMED, renamed_flags, settings
    from overtone.training.run_folder import check_settings, saved_config

    names = (*settings(), *RENAMED, "size")
    flags = renamed_flags({name: getattr(arguments, name) for name in names if hasattr(arguments, name)})
    asked = TrainConfig.from_json(arguments.config).settings() if arguments.config else {}
    before = saved_config(arguments.out) if arguments.resume else None
    if arguments.resume and before is None and not flags and not asked:
        raise ConfigError(f"{arguments.out}: there is no run to resume, and no option says what to train")
    base = before or TrainConfig()
    try:
        return base.replace(**asked).replace(**flags)
    except ConfigError:
        if before is not None:  # what does not go together is an option and the run
            check_settings(arguments.out, before, asked | flags)
        raise


def _fail(message: str, status: int) -> int:
    print(f"overtone train: {message}", file=sys.stderr, flush=True)
    return status
