"""The one place where ops are registered with torch: schema, fake, gradient and the GPU kernels in Python of each op.

The C++ and CUDA kernels register themselves when overtone._C is loaded. In a process with TRITON_INTERPRET=1
that extension is not loaded, and CPU tensors go to the Triton kernels instead.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.compiler.config

from overtone.backends import triton_interprets
from overtone.reference.linalg import raise_unsolved

LIBRARY = torch.library.Library("overtone", "DEF")


def contracts_digest(folder: Path) -> str:
    """A name for what the sources in `folder` say."""
    sources = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()[:16]


# torch.compile keeps compiled graphs on disk, under keys that name our ops but do not know their fakes. A graph of
# another overtone, whose fakes had other strides, would be taken for this one's.
torch.compiler.config.cache_key_tag += f"overtone {contracts_digest(Path(__file__).parent)};"


def define(schema: str, *, fake: Callable, triton: str | None = None, blas3: str | None = None) -> None:
    """Define an op once: `triton` names its launcher as 'module.function' of overtone.triton_kernels, `blas3` its
    implementation for CUDA tensors in overtone.blas3, if it has one."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"overtone::{name}", fake, lib=LIBRARY)
    if triton is not None:
        LIBRARY.impl(name, _imported("overtone.triton_kernels", triton), "CPU" if triton_interprets() else "CUDA")
    if blas3 is not None:
        LIBRARY.impl(name, _imported("overtone.blas3", blas3), "CUDA")


def define_raising(schema: str, *, solver: str, fake: Callable) -> None:
    """Define a solver's strict form: op `solver` (…) -> (…, info), but a matrix that was not solved raises.

    It takes the solver's arguments and, last, the function to name in the error. An op of its own, opaque to
    torch.compile, so that it raises there too.
    """

    def solve(*args):
        *inputs, function = args
        results = getattr(torch.ops.overtone, solver)(*inputs)
        raise_unsolved(function, results[-1])
        return results

    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    torch.library.register_fake(f"overtone::{name}", lambda *args: fake(*args[:-1]), lib=LIBRARY)
    LIBRARY.impl(name, solve, "CompositeExplicitAutograd")


def _imported(package: str, path: str) -> Callable:
    module, _, function = path.rpartition(".")

    def call(*args):
        # Imported at the first call: importing overtone must not import Triton, let alone touch a device.
        return getattr(importlib.import_module(f"{package}.{module}"), function)(*args)

    return call


def differentiable(name: str, *, setup: Callable, backward: Callable) -> None:
    """Give op `name` its gradient."""
    torch.library.register_autograd(f"overtone::{name}", backward, setup_context=setup, lib=LIBRARY)


def without_vmap(name: str, instead: str) -> None:
    """Make torch.vmap of op `name` raise: torch would run it in a slow loop. `instead` says what to do."""

    def refuse(info, in_dims, *args):
        raise NotImplementedError(f"overtone::{name} does not support torch.vmap: {instead}")

    torch.library.register_vmap(f"overtone::{name}", refuse, lib=LIBRARY)


def differentiable_gradient(function: Callable, inputs: tuple, grads: tuple) -> tuple:
    """The gradients of the reference `function` at `inputs`, as a graph that can be differentiated again."""
    with torch.enable_grad():
        inputs = tuple(x if x.requires_grad else x.detach().requires_grad_() for x in inputs)
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return torch.autograd.grad(outputs, inputs, grads, create_graph=True, allow_unused=True)
