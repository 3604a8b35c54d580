"""Tiny training runs, each in a process of its own that may be killed.

The processes are forked from one that has imported torch already, which takes a tenth of a new interpreter's time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from overtone.training import TrainConfig, checkpoint

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "sklearn.datasets", "safetensors.torch", "overtone.training"]
)

# Four steps an epoch; every part of a run's state is in use.
TINY = TrainConfig(
    data="digits", train_fraction=0.1, dim=16, num_heads=2, depth=2, regime="sharpen,free", drop_path=0.1, epochs=2,
    batch_size=32, grad_accumulation=2, learning_rate=3e-3, warmup_epochs=0.5, ema=0.9, checkpoint_steps=1,
    timeout=300.0, tensorboard=False,
)  # fmt: skip
SECONDS = 300  # a run of TINY takes one; a machine may be busy


def start(function: Callable, *arguments, processes: int | None = None) -> list[BaseProcess]:
    """Call the function in a new process, or in several that are connected."""
    environments: list[dict[str, str]] = [{}]
    if processes is not None:
        shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    started = [_context.Process(target=_call, args=(environment, function, arguments)) for environment in environments]
    for process in started:
        process.start()
    return started


def statuses(processes: list[BaseProcess]) -> list[int | None]:
    """Exit statuses, once all have ended; negative for a signal. A process that hangs is ended and has None."""
    for process in processes:
        process.join(SECONDS)
    found = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return found


def run_well(function: Callable, *arguments, processes: int | None = None) -> None:
    assert set(statuses(start(function, *arguments, processes=processes))) == {0}


def _call(environment: dict[str, str], function: Callable, arguments: tuple) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    function(*arguments)
    sys.stdout.flush()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def outcome(folder: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Everything that a run leaves behind but times: all tensors, and the metrics."""
    tensors = checkpoint.read_tensors(folder / checkpoint.CHECKPOINT)
    weights = checkpoint.read_tensors(folder / checkpoint.WEIGHTS)
    tensors |= {f"weights.{name}": value for name, value in weights.items()}
    history = checkpoint.read_state(folder / checkpoint.CHECKPOINT)["history"]
    times = ("seconds", "images_per_second", "bytes_per_second")
    return tensors, [{name: value for name, value in row.items() if name not in times} for row in history]


def check_same_bits(one: Path, other: Path) -> None:
    (tensors, metrics), (expected_tensors, expected_metrics) = outcome(one), outcome(other)
    assert metrics == expected_metrics
    assert tensors.keys() == expected_tensors.keys()
    different = [name for name, value in tensors.items() if not torch.equal(value, expected_tensors[name])]
    assert not different
