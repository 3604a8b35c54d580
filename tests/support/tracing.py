"""What a program does on a GPU, traced on fake tensors: no GPU, and no CUDA build of torch, is needed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from overtone.ops import basis, registry

backends = sys.modules["overtone.backends"]  # the name in the package is the public function


class Trace(TorchDispatchMode):
    """Counts what reaches the device, by name.

    Our ops that consist of torch's, such as batched factorisations, are run, so that what they call is counted; those
    with kernels of their own (Triton, CUDA) are one operation each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func._schema.name] += 1
        op = registry.OPS.get(func._schema.name.removeprefix("overtone::")) if func.namespace == "overtone" else None
        inner = None if op is None else op.cuda or op.composite
        if inner is None:
            return func(*args, **(kwargs or {}))
        with self:
            return inner(*args)


@contextmanager
def fake_gpu(monkeypatch) -> Iterator[FakeTensorMode]:
    """Tensors inside have a shape and no numbers, and this package takes them for CUDA tensors.

    Whatever asks for a number raises. To torch they are on the CPU: a CPU build of torch aborts in autograd of device
    "cuda", whose streams it does not know.
    """
    default_backend, absence = backends._default_backend, backends._absence
    monkeypatch.setattr(backends, "_default_backend", lambda device, op: default_backend("cuda", op))
    monkeypatch.setattr(backends, "_absence", lambda op, name, device, dtype: absence(op, name, "cuda", dtype))
    monkeypatch.setattr(basis, "_is_on_host", lambda matrix: False)
    with FakeTensorMode() as mode:
        yield mode


def without_numbers(model: torch.nn.Module) -> torch.nn.Module:
    """The model, inside `fake_gpu`, on fake tensors: while it is built, numbers have to be there."""
    return model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
