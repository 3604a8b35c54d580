"""The files of a run: written whole or not at all, and read without pickle.

Tensors are in safetensors, everything else is JSON in the same file's metadata, so that one rename replaces all of a
checkpoint at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overtone.training.errors import CheckpointError
from overtone.training.recipe import WeightAverage

CHECKPOINT = "checkpoint.safetensors"  # what a run needs to go on
WEIGHTS = "model.safetensors"  # what a trained model needs


def write_text(path: Path, text: str) -> None:
    with _replacing(path) as draft:
        draft.write_text(text)


def write_tensors(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    from safetensors.torch import save_file  # here, as below: reading a configuration needs no extra package

    with _replacing(path) as draft:
        draft.touch()  # safetensors alone would keep the file from other users
        save_file(tensors, draft, {"state": json.dumps(state)})


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A draft to write to, which takes the file's place once all of it is on the disk."""
    draft = path.with_name(f".{path.name}.draft")
    yield draft
    _flush(draft)
    os.replace(draft, path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(path: Path) -> dict[str, Any]:
    """What is not a tensor."""
    with _opened(path) as file:
        return json.loads(file.metadata()["state"])


def read_tensors(path: Path) -> dict[str, Tensor]:
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            if "state" not in (file.metadata() or {}):
                raise CheckpointError(f"{path}: not written by overtone: it has no state")
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged: {error}; remove it, and the run starts anew") from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process writes to a run's folder. The lock ends with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{folder}: another process is training here") from None
        yield


def collected(model: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage | None) -> dict[str, Tensor]:
    """Every tensor of a run's state."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    if average is not None:
        tensors |= {f"average.{name}": value for name, value in average.values.items()}
    return tensors


def weights(model: nn.Module, average: WeightAverage | None) -> dict[str, Tensor]:
    """The weights to use: the averaged ones if there are any."""
    return model.state_dict() | (average.values if average is not None else {})


def gathered(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Each tensor whole and on the CPU, for the process that keeps them. All must call it: each may hold a part."""
    result = {}
    for name, value in tensors.items():
        value = whole(value)
        if keep:
            result[name] = value.detach().cpu().contiguous()
    return result


def whole(value: Tensor) -> Tensor:
    """The tensor, also where FSDP2 has split it over processes."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@torch.no_grad()
def restore(
    tensors: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage | None
) -> None:
    """The inverse of `collected`, for any number of processes."""
    for name, value in model.state_dict().items():
        value.copy_(_like(value, tensors[f"model.{name}"]))
    for name, parameter in model.named_parameters():
        prefix = f"optimizer.{name}."
        saved = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        optimizer.state[parameter] = {
            key: _like(parameter, value) if value.shape == parameter.shape else value.to(parameter.device)
            for key, value in saved.items()
        }
    if average is not None:
        for name, value in average.values.items():
            value.copy_(_like(value, tensors[f"average.{name}"]))


def _like(target: Tensor, value: Tensor) -> Tensor:
    """On the target's device, and split over processes as the target is."""
    value = value.to(target.device)
    if not hasattr(target, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, target.device_mesh, target.placements)  # type: ignore[attr-defined]
