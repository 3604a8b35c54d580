"""The command line: `overtone info | kernels | bench | train | predict | analyze | study`, a module each."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from overtone import __version__
from overtone.backends import BackendError

COMMANDS = ("info", "kernels", "bench", "train", "predict", "analyze", "study")


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the arguments, instead of the usage and then the line."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="overtone", description="Fused kernels that steer a Transformer's smoothing.")
    top.add_argument("--version", action="version", version=f"overtone {__version__}")
    commands = top.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"overtone.cli.{name}").add_parser(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 when a check failed, 2 for a mistake in what was asked."""
    arguments = parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BackendError as error:
        print(f"overtone {arguments.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        _discard_output()  # the reader (head, less) has gone
        return 0
    except OSError as error:
        _discard_output()
        place = f"{error.filename}: " if error.filename else ""
        print(f"overtone {arguments.command}: {place}{error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _discard_output() -> None:
    """What Python would still flush at exit goes nowhere, quietly."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
