"""`overtone info`: what is installed, what was built, and which kernels run on this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform

import torch

import overtone
from overtone import hardware
from overtone.backends import SUPPORT

VARIABLES = ("TRITON_INTERPRET", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "info",
        help="what is installed and built, and which kernels run here",
        description="Prints versions, how the extension was built, the instruction set in use, every backend with the "
        "reason why it is or is not available, the ops each backend has kernels for, and the variables in force. "
        "Paste it into a bug report.",
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    information = collect()
    print(json.dumps(information, indent=2) if arguments.json else as_text(information))
    return 0


def collect() -> dict[str, dict]:
    return {
        "versions": _versions(),
        "torch": _torch_build(),
        "cpu": _cpu(),
        "extension": hardware.build_info(),
        "backends": {name: status._asdict() for name, status in overtone.backends().items()},
        "kernels": {op: _kernels_of(op) for op in SUPPORT},
        "environment": _environment(),
    }


def _versions() -> dict[str, str]:
    return {
        "overtone": overtone.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _installed_version("triton"),
        "system": platform.platform(),
    }


def _installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _torch_build() -> dict[str, str | int]:
    return {
        "cuda": torch.version.cuda or "not in this build",
        "rocm": torch.version.hip or "not in this build",
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _cpu() -> dict[str, str | int | list[str]]:
    machine: dict[str, str | int | list[str]] = {"architecture": platform.machine(), "cores": os.cpu_count() or 0}
    level = hardware.isa()
    if level is not None:
        machine["features"] = hardware.cpu_features()
        machine["level in use"] = level
        machine["levels here"] = hardware.available_isas()
    return machine


def _kernels_of(op: str) -> dict[str, list[str]]:
    """The dtypes of the op's kernels, per backend."""
    return {
        backend: [str(dtype).removeprefix("torch.") for dtype in support.dtypes]
        for backend, support in SUPPORT[op].items()
    }


def _environment() -> dict[str, str]:
    return {
        name: value for name, value in sorted(os.environ.items()) if name.startswith("OVERTONE_") or name in VARIABLES
    }


def as_text(information: dict[str, dict]) -> str:
    sections = {
        **information,
        "backends": {
            name: f"{'available' if status['available'] else 'not available'}: {status['detail']}"
            for name, status in information["backends"].items()
        },
        "kernels": {op: _kernels_as_text(per_backend) for op, per_backend in information["kernels"].items()},
        "environment": information["environment"] or {"": "no variable that matters is set"},
    }
    width = 2 + max(len(name) for section in sections.values() for name in section)
    lines = []
    for title, section in sections.items():
        lines += [title, *(f"  {name:<{width}}{_value_as_text(value)}" for name, value in section.items()), ""]
    return "\n".join(lines).rstrip()


def _kernels_as_text(per_backend: dict[str, list[str]]) -> str:
    kernels = [f"{backend} ({', '.join(dtypes)})" for backend, dtypes in per_backend.items()]
    return ", ".join([*kernels, "reference (any)"])


def _value_as_text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
