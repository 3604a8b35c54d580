"""The files of a run: written whole or not at all, and read without pickle.

Tensors are in safetensors, everything else is JSON in the same file's metadata, so that one rename replaces all of a
checkpoint at once. A checksum over both is looked at whenever the file is read; it costs about a second per gigabyte.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from overtone._files import replace_atomically, write_safetensors
from overtone.training.errors import CheckpointError, one_line, reason
from overtone.training.optim import EMA

CHECKPOINT = "checkpoint.safetensors"  # what a run needs to go on
WEIGHTS = "model.safetensors"  # what a trained model needs

# The metadata of a file: its state, and SHA-256 of the state alone and of everything. Files of the time before there
# were checksums have "state"; a name of its own keeps a damaged file from passing for one of them.
STATE, STATE_DIGEST, DIGEST = "checked_state", "state_sha256", "sha256"
STATE_WITHOUT_DIGEST = "state"


def write_text(path: Path, text: str) -> None:
    with _replacing(path) as draft:
        draft.write_text(text)


def write_tensors(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    text = json.dumps(state)
    with _replacing(path) as draft:
        write_safetensors(draft, tensors, {STATE: text, STATE_DIGEST: _digest(text), DIGEST: _digest(text, tensors)})


def _digest(text: str, tensors: dict[str, Tensor] | None = None) -> str:
    """SHA-256 of the state, and of names, dtypes, shapes and bytes of the tensors (contiguous, on the CPU)."""
    digest = hashlib.sha256(text.encode())
    for name, value in sorted((tensors or {}).items()):
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        if value.numel():
            digest.update((ctypes.c_char * value.nbytes).from_address(value.data_ptr()))
    return digest.hexdigest()


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A draft to write to, which takes the file's place once all of it is on the disk."""
    from safetensors import SafetensorError  # here, as below: reading a configuration needs no extra package

    try:
        with replace_atomically(path) as draft:
            yield draft
    except (OSError, SafetensorError) as error:
        said = reason(error) if isinstance(error, OSError) else one_line(error)
        before = "; the one before it is whole" if path.is_file() else ""
        raise CheckpointError(f"{path}: cannot be written: {said}{before}") from error


def read_state(path: Path) -> dict[str, Any]:
    """What is not a tensor."""
    with _opened(path) as file:
        state = json.loads(_checked_text(file))
        if not isinstance(state, dict):
            raise ValueError("its state is no object")
        return state


def read_tensors(path: Path) -> dict[str, Tensor]:
    with _opened(path) as file:
        text, metadata = _checked_text(file), file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        if STATE in metadata and _digest(text, tensors) != metadata.get(DIGEST):
            raise ValueError("its tensors are not those that were written (SHA-256)")
        return tensors


def read_run(path: Path) -> dict[str, Any]:
    """The state of a checkpoint, with "sha256", which tells it from other checkpoints. `read_tensors` checks them."""
    state = read_state(path)
    for name, kind in {"step": int, "seconds": float, "config": dict, "history": list}.items():
        if not isinstance(state.get(name), kind):
            raise CheckpointError(f"{path} is damaged (its state has no {name}); delete it to start over")
    with _opened(path) as file:
        digest = file.metadata().get(DIGEST)
    return state | {"sha256": digest or _digest(json.dumps(state), read_tensors(path))}


def note_if_unchecked(path: Path) -> None:
    with _opened(path) as file:
        if STATE not in file.metadata():
            print(
                f"note: {path} is of an overtone without checksums: damage, or other data than the run's, would not be "
                "noticed",
                file=sys.stderr,
            )


def _checked_text(file: Any) -> str:
    metadata = file.metadata()
    if STATE not in metadata:
        return metadata[STATE_WITHOUT_DIGEST]
    if _digest(metadata[STATE]) != metadata.get(STATE_DIGEST):
        raise ValueError("its state is not the one that was written (SHA-256)")
    return metadata[STATE]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            if not {STATE, STATE_WITHOUT_DIGEST} & (file.metadata() or {}).keys():
                raise CheckpointError(f"{path}: not written by overtone, or damaged: it has no state")
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file") from None
    except PermissionError as error:
        raise CheckpointError(f"{path}: not readable: {reason(error)}") from None
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # a damaged header may break any assumption of what reads it
        raise CheckpointError(f"{path} is damaged ({one_line(error)}); delete it to start over") from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process writes to a run's folder. The lock ends with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except (FileExistsError, NotADirectoryError):
        raise CheckpointError(f"{folder}: cannot be a run's folder: it, or a part of its path, is a file") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be a run's folder: {reason(error)}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{folder}: another process is training here") from None
        yield


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, ema: EMA | None) -> dict[str, Tensor]:
    """Every tensor of a run's state, whole and on the CPU, for the main process; all must call it."""
    weights, updates = cast(Any, get_state_dict(model, optimizer, options=FULL))
    tensors = {f"model.{name}": value for name, value in weights.items()}
    for name, entries in updates.get("state", {}).items():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in entries.items()}
    if ema is not None:
        tensors |= {f"average.{name}": value for name, value in final_weights(model, ema).items()}
    return {name: value.contiguous() for name, value in tensors.items()}


def final_weights(model: nn.Module, ema: EMA | None) -> dict[str, Tensor]:
    """The weights to use, the averaged ones if there are any: whole and on the CPU, for the main process."""
    with contextlib.nullcontext() if ema is None else ema.swapped_in():
        weights = cast(Any, get_model_state_dict(model, options=FULL))
        # Swapping back would change what is not a copy.
        return {name: value.contiguous() if ema is None else value.clone() for name, value in weights.items()}


def restore_state(
    tensors: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, ema: EMA | None
) -> None:
    """The inverse of `state_tensors`, for any number of processes, each of which has all tensors."""
    weights, updates = cast(Any, get_state_dict(model, optimizer))  # as they must be; nothing is gathered for that
    updates["state"] = {
        name: {key: fitting(tensors, f"optimizer.{name}.{key}", value) for key, value in entries.items()}
        for name, entries in updates["state"].items()
    }
    whole = StateDictOptions(full_state_dict=True)
    if ema is not None:
        set_model_state_dict(
            model, {name: fitting(tensors, f"average.{name}", value) for name, value in weights.items()}, options=whole
        )
        ema.reset()
    found: Any = {name: fitting(tensors, f"model.{name}", value) for name, value in weights.items()}
    set_state_dict(model, optimizer, model_state_dict=found, optim_state_dict=updates, options=whole)


def full_tensor(value: Tensor) -> Tensor:
    """The tensor, also where FSDP2 has sharded it."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def fitting(tensors: dict[str, Tensor], name: str, target: Any) -> Tensor:
    """A saved tensor, of the shape it must have: copying would broadcast another one."""
    value = tensors.get(name)
    if value is None or value.shape != target.shape:
        found = "none" if value is None else f"one of shape {tuple(value.shape)}"
        raise CheckpointError(f"the checkpoint's tensor {name}: got {found}, wanted shape {tuple(target.shape)}")
    return value
