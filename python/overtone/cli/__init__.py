"""The command line: `overtone info | kernels | bench | train | predict | analyze | study`, one module per command."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from overtone import __version__
from overtone.backends import BackendError

COMMANDS = ("info", "kernels", "bench", "train", "predict", "analyze", "study")

FIRST_COMMANDS = {
    "overtone study": "train ViT, ViT⁺ and ViT⁻ on digits; tables and figures (minutes)",
    "overtone analyze timm:vit_tiny_patch16_224": "does a model oversmooth, where, and why?",
    "overtone bench --quick": "our ops beside PyTorch's, each checked",
}

Number = TypeVar("Number", int, float)


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in the arguments in one line, without the usage before it."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="overtone",
        description="Fused kernels that steer a Transformer's smoothing. Without a command: what this machine can do.",
        epilog="exit status: 0 success; 1 a check failed or a run ended badly; 2 a mistake in the request, or the "
        "machine refused it; 130 interrupted",
    )
    top.add_argument("--version", action="version", version=f"overtone {__version__}")
    commands = top.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"overtone.cli.{name}").add_parser(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 when a check failed, 2 for a mistake in what was asked."""
    top = parser()
    arguments = top.parse_args(argv)
    if arguments.command is None:
        arguments.command, arguments.run = "info", greet
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BackendError as error:
        return fail(arguments.command, str(error))
    except BrokenPipeError:
        _discard_output()  # the reader (head, less) has gone
        return 0
    except OSError as error:
        _discard_output()
        place = f"{error.filename}: " if error.filename else ""
        return fail(arguments.command, f"{place}{error.strerror or error}")
    except KeyboardInterrupt:
        return 130


def greet(_: argparse.Namespace) -> int:
    """What `overtone` alone says: the version, the machine, and where to begin."""
    from overtone import backends

    print(f"overtone {__version__}: kernels that steer a Transformer's smoothing through its eigenspectrum\n")
    print("This machine:")
    for name, status in backends().items():
        print(f"  {name:<10} {'yes' if status.available else 'no':<4} {status.detail}")
    print("\nThree commands to try:")
    for command, purpose in FIRST_COMMANDS.items():
        print(f"  {command:<46} {purpose}")
    print("\nAll commands: overtone --help. What to paste into a bug report: overtone info --json")
    return 0


def fail(command: str, message: str, status: int = 2) -> int:
    """Print why a command stops, in one line on stderr; returns its exit status."""
    print(f"overtone {command}: {message}", file=sys.stderr, flush=True)
    return status


def positive(kind: type[Number]) -> Callable[[str], Number]:
    """The type of an argument that is a number above zero: `type=positive(int)`."""

    def parse(text: str) -> Number:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"got {text}, wanted a number above 0")
        return value

    parse.__name__ = kind.__name__  # argparse names it where the text is not a number
    return parse


class _Renamed(argparse.Action):
    """An old spelling of a flag, which works for one release with a warning."""

    def __init__(self, option_strings: Sequence[str], dest: str, new: str, **kwargs: Any):
        super().__init__(option_strings, dest, **kwargs)
        self.new = new

    def __call__(self, parser, namespace, values, option_string=None):
        print(f"{parser.prog}: {option_string} is deprecated, use {self.new}", file=sys.stderr)
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)


def renamed_flag(parser: argparse.ArgumentParser, old: str, new: str, **kwargs: Any) -> None:
    """Accept `old` for the flag `new` of `parser`; kwargs are add_argument's of a flag that takes a value."""
    dest = new.removeprefix("--").replace("-", "_")
    if not kwargs:
        kwargs = {"nargs": 0, "const": True}
    parser.add_argument(
        old, action=_Renamed, new=new, dest=dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **kwargs
    )


def _discard_output() -> None:
    """What Python would still flush at exit goes nowhere, quietly."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
