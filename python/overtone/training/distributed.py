"""The processes of a run: one, or those that torchrun started, on PyTorch's own engines (DDP, FSDP2)."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from overtone.training.config import TrainConfig
from overtone.training.errors import CheckpointError, ConfigError, LostProcessError, TrainingError, machine_errors

T = TypeVar("T")

# What gloo and nccl say when they have lost another process.
_SIGNS_OF_LOSS = ("gloo", "nccl", "connection", "timed out", "timeout", "process group")


class Distributed:
    """What a process must know about the others. Use it as a context: inside, they are connected."""

    def __init__(self, config: TrainConfig) -> None:
        environment = os.environ
        self.connected = "RANK" in environment and "WORLD_SIZE" in environment
        self.rank = int(environment["RANK"]) if self.connected else 0
        self.world_size = int(environment["WORLD_SIZE"]) if self.connected else 1
        self.is_main = self.rank == 0
        self.config = config
        self.device = self._device(int(environment.get("LOCAL_RANK", 0)))

    def _device(self, local_rank: int) -> torch.device:
        wanted = self.config.run.device
        if wanted == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device: cuda was asked for, but torch finds no GPU here; use auto or cpu")
        if wanted == "cpu" or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", local_rank)

    def __enter__(self) -> Distributed:
        if self.connected:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            timeout = datetime.timedelta(seconds=self.config.run.timeout)
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo", timeout=timeout)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if not self.connected:
            return
        if error is None:
            destroy()
        elif isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS_OF_LOSS):
            # The group is left as it is: waiting for the others is what must not happen now.
            raise LostProcessError(
                f"rank {self.rank} of {self.world_size} lost contact with the other ranks: one failed or hung for more "
                f"than {self.config.run.timeout:g} s ({str(error).splitlines()[0]}); "
                "the last checkpoint is whole; continue with --resume"
            ) from error

    def agreed(self, find: Callable[[], T], brief: Callable[[T], str]) -> T:
        """What `find` returns, if it is the same in every process (in brief words); all raise if it fails in one."""
        found, failure = None, None
        try:
            with machine_errors():
                found = find()
        except TrainingError as error:
            if not self.connected:
                raise
            failure = error
        if not self.connected:
            return found  # type: ignore[return-value]
        words = str(failure) if failure is not None else brief(found)  # type: ignore[arg-type]
        all_words: list[tuple[bool, str]] = [(False, "")] * self.world_size
        dist.all_gather_object(all_words, (failure is not None, words))
        if failure is not None:
            raise failure
        for rank, (failed, said) in enumerate(all_words):
            if failed:
                raise CheckpointError(f"rank {rank}: {said}")
        if len(set(all_words)) > 1:
            listed = "; ".join(f"rank {rank}: {said}" for rank, (_, said) in enumerate(all_words))
            raise CheckpointError(f"the ranks would not train the same run: {listed}; all need the same folders")
        return found  # type: ignore[return-value]

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as this process trains it. `model` keeps its parameters' names, sharded in place by FSDP2."""
        if not self.connected:
            return model
        if self.config.run.strategy == "ddp":
            return DistributedDataParallel(
                model, device_ids=[self.device] if self.device.type == "cuda" else None, broadcast_buffers=False
            )
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.world_size,))
        # NeuTRENO asks the first block for its values before the block runs: it must be whole as long as the model is.
        first = 1 if self.config.model.method == "neutreno" else 0
        for block in list(model.blocks)[first:]:  # type: ignore[arg-type]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def gradients(self, wrapped: nn.Module, complete: bool) -> AbstractContextManager:
        """Around forward and backward: gradients are exchanged only when a step's last part makes them complete."""
        if isinstance(wrapped, DistributedDataParallel):
            return contextlib.nullcontext() if complete else wrapped.no_sync()
        if self.connected:
            wrapped.set_requires_gradient_sync(complete)  # type: ignore[operator]
        return contextlib.nullcontext()

    def sum(self, value: Tensor) -> Tensor:
        """Over the processes."""
        return self._reduced(value, dist.ReduceOp.SUM)

    def min(self, value: Tensor) -> Tensor:
        return self._reduced(value, dist.ReduceOp.MIN)

    def _reduced(self, value: Tensor, operation: Any) -> Tensor:
        if not self.connected:
            return value
        value = value.clone()
        dist.all_reduce(value, operation)
        return value

    def to_device(self, value: Tensor) -> Tensor:
        """Copied while the device works on what it was given before."""
        if self.device.type != "cuda":
            return value.to(self.device)
        return value.pin_memory().to(self.device, non_blocking=True)


def destroy() -> None:
    """dist.destroy_process_group() after the last collective.

    gloo's threads free the last tensors they were given, for which they need Python's lock. A process that ends while
    one waits for it dies with "terminate called without an active exception", and one that frees DDP's reducer waits
    for the thread for ever. So they get a moment in which nobody holds the lock.
    """
    time.sleep(0.2)
    dist.destroy_process_group()
