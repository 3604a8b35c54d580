"""The one place where ops are registered with torch: schema, fake, gradient and the GPU kernels in Python of each op.

The C++ and CUDA kernels register themselves when overtone._C is loaded. In a process with TRITON_INTERPRET=1
that extension is not loaded, and CPU tensors go to the Triton kernels instead.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config
from torch import _C, Tensor
from torch._library.autograd import Info, make_autograd_impl

from overtone import _transforms as transforms
from overtone._precision import autocast_disabled
from overtone.backends import NOT_BY_KERNELS, BackendError, active_backend, triton_interpreter_enabled

LIBRARY = torch.library.Library("overtone", "DEF")

OPS: dict[str, Op] = {}  # what is registered, by name


def schema_digest(folder: Path) -> str:
    """A name for what the sources in `folder` say."""
    sources = [path.read_bytes() for path in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()[:16]


# torch.compile keeps compiled graphs on disk, under keys that name our ops but do not know their fakes. A graph of
# another overtone, whose fakes had other strides, would be taken for this one's.
torch.compiler.config.cache_key_tag += f"overtone {schema_digest(Path(__file__).parent)};"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vmap:
    """How torch.vmap maps an op: one call with the mapped dimension in the batch.

    Where an argument is mapped that has no batch (weights) there is a call for each of its members.
    """

    batched: tuple[int, ...]  #: the places of the arguments with dimensions of a batch
    merges: bool = False  #: they have exactly one such dimension, which the mapped one is merged with, not any number
    contiguous: tuple[int, ...] = ()  #: the places of the arguments that the kernels take contiguous only


@dataclasses.dataclass(frozen=True, kw_only=True)
class Op:
    """All there is to know of an op. One without `backward` has no gradient, and is not for users' tensors."""

    schema: str
    fake: Callable  #: results on fake tensors: shapes, dtypes and strides
    triton: str | None = None  #: its launcher in overtone.triton_kernels, imported at the first call
    cuda: Callable | None = None  #: its implementation for CUDA tensors, in torch ops
    composite: Callable | None = None  #: its implementation on any device
    save: Callable | None = None  #: as torch.library.register_autograd's setup_context
    backward: Callable | None = None  #: as torch.library.register_autograd's
    #: Takes the op's arguments and returns its results, in differentiable PyTorch. It runs where a derivative is wanted
    #: that the kernels do not have: forward mode, and torch.func's. Results for backward alone may be empty there.
    reference: Callable | None = None
    #: Takes the op and its arguments, the first of them dual, and returns dual results; or None where it leaves them to
    #: the reference.
    jvp: Callable | None = None
    vmap: Vmap | None = None  #: given wherever `backward` is

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


def register(op: Op) -> None:
    """Make torch.ops.overtone.<op.name>."""
    OPS[op.name] = op
    LIBRARY.define(op.schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"overtone::{op.name}", op.fake, lib=LIBRARY)
    if op.triton is not None:
        LIBRARY.impl(op.name, _launcher(op.triton), "CPU" if triton_interpreter_enabled() else "CUDA")
    if op.cuda is not None:
        LIBRARY.impl(op.name, op.cuda, "CUDA")
    if op.composite is not None:
        LIBRARY.impl(op.name, op.composite, "CompositeExplicitAutograd")
    if op.backward is not None:
        overload = getattr(torch.ops.overtone, op.name).default
        LIBRARY.impl(op.name, _differentiable(overload, op), "Autograd", with_keyset=True)
        LIBRARY.impl(op.name, _mapped(overload, op.vmap or Vmap(batched=())), "FuncTorchBatched")


def register_strict(solver: Op, name: str, check: Callable[[str, Tensor], None]) -> None:
    """The strict form of a solver (…) -> (…, info): op `name`, which raises where a matrix was not solved.

    It takes the solver's arguments and, last, the function to name in the error; `check` is given that and the info,
    and raises. An op of its own, opaque to torch.compile, so that it raises there too.
    """
    parameters, _, results = solver.schema.partition("(")[2].partition(") ->")
    strict = dataclasses.replace(
        solver,
        schema=f"{name}({parameters}, str function) ->{results}",
        fake=lambda *args: solver.fake(*args[:-1]),
        triton=None,
        cuda=None,
        composite=_checked(getattr(torch.ops.overtone, solver.name), check),
        reference=None if solver.reference is None else _checked(solver.reference, check),
    )
    register(strict)


def _checked(solve: Callable, check: Callable[[str, Tensor], None]) -> Callable:
    def call(*args):
        *inputs, function = args
        results = solve(*inputs)
        check(function, results[-1])
        return results

    return call


def _launcher(path: str) -> Callable:
    module, _, function = path.rpartition(".")

    def call(*args):
        # Imported at the first call: importing overtone must not import Triton, let alone touch a device.
        return getattr(importlib.import_module(f"overtone.triton_kernels.{module}"), function)(*args)

    return call


def call(name: str, tensor: Tensor, *args) -> Any:
    """torch.ops.overtone.<name>(tensor, …), whose products are as wide in a transform as the kernels'."""
    with transforms.without_autocast(tensor):
        return getattr(torch.ops.overtone, name)(tensor, *args)


def _differentiable(overload: torch._ops.OpOverload, op: Op) -> Callable:
    """The op under autograd, forward-mode AD and torch.func's transforms."""
    by_kernels = make_autograd_impl(overload, Info(op.backward, op.save))

    def differentiate(keyset, *args):
        if not transforms.tracked(args):
            return by_kernels(keyset, *args)
        results = None
        # Autocast has no say in what kernels compute either.
        with autocast_disabled(next(x for x in args if isinstance(x, Tensor))):
            # If a graph is made at this level, too, what it saves must be dual: the reference's is.
            if op.jvp is not None and not (torch.is_grad_enabled() and args[0].requires_grad):
                results = op.jvp(overload, *args)
            return _by_reference(op, args) if results is None else results

    return differentiate


def _by_reference(op: Op, args: tuple) -> Any:
    named = active_backend()
    if named not in (None, "reference") or op.reference is None:
        raise BackendError(f"{op.name}: backend {named!r} cannot run this call: {NOT_BY_KERNELS}")
    return op.reference(*args)


def _mapped(overload: torch._ops.OpOverload, vmap: Vmap) -> Callable:
    """The op under torch.vmap."""

    def run(*args):
        places = vmap.contiguous
        return overload(*(x.contiguous() if i in places and x is not None else x for i, x in enumerate(args)))

    def call(*args):
        level = _C._functorch.peek_interpreter_stack().level()
        pairs = [_C._functorch._unwrap_batched(x, level) if isinstance(x, Tensor) else (x, None) for x in args]
        size = next((x.shape[dim] for x, dim in pairs if dim is not None), None)
        with _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(_C.DispatchKey.FuncTorchBatched)):
            if size is None:  # nothing is mapped at this level
                return overload(*args)
            if any(dim is not None for place, (_, dim) in enumerate(pairs) if place not in vmap.batched):
                results, dims = _one_by_one(run, pairs, size)
            else:
                results, dims = _in_one_call(run, pairs, size, vmap)
        wrapped = tuple(
            x if dim is None else _C._functorch._add_batch_dim(x, dim, level)
            for x, dim in zip(results, dims, strict=True)
        )
        return wrapped[0] if len(overload._schema.returns) == 1 else wrapped

    return call


def _one_by_one(run: Callable, pairs: list, size: int) -> tuple[tuple, tuple]:
    members = [run(*(x if dim is None else x.select(dim, i) for x, dim in pairs)) for i in range(size)]
    columns = zip(*members, strict=True) if isinstance(members[0], tuple) else [members]
    results = tuple(torch.stack(tuple(column)) for column in columns)
    return results, (0,) * len(results)


def _in_one_call(run: Callable, pairs: list, size: int, vmap: Vmap) -> tuple[tuple, tuple]:
    args = [x for x, _ in pairs]
    for place in vmap.batched:
        x, dim = pairs[place]
        if x is not None:
            x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            args[place] = x.flatten(0, 1) if vmap.merges else x
    results = run(*args)
    results = results if isinstance(results, tuple) else (results,)
    batch = args[vmap.batched[0]].shape[0]
    # What was not wanted came back empty.
    dims = tuple(0 if x.dim() > 0 and x.shape[0] == batch else None for x in results)
    if vmap.merges:
        results = tuple(
            x if dim is None else x.unflatten(0, (size, batch // size)) for x, dim in zip(results, dims, strict=True)
        )
    return results, dims


def double_backward_via_reference(function: Callable, inputs: tuple, grads: tuple) -> tuple:
    """The gradients of the reference `function` at `inputs`, as a graph that can be differentiated again."""

    def outputs_of(*inputs):
        outputs = function(*inputs)
        return tuple(outputs) if isinstance(outputs, tuple) else (outputs,)

    if _C._are_functorch_transforms_active():  # grads may be wrapped: only a transform can take them
        return torch.func.vjp(outputs_of, *inputs)[1](tuple(grads))
    with torch.enable_grad():
        inputs = tuple(x if x.requires_grad else x.detach().requires_grad_() for x in inputs)
        return torch.autograd.grad(outputs_of(*inputs), inputs, grads, create_graph=True, allow_unused=True)
