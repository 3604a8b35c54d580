"""The one place where ops are registered with torch: schema, fake, gradient and the GPU kernels in Python of each op.

The C++ and CUDA kernels register themselves when overtone._C is loaded. In a process with TRITON_INTERPRET=1
that extension is not loaded, and CPU tensors go to the Triton kernels instead.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config
from torch import _C, Tensor
from torch._library.autograd import Info, make_autograd_impl

from overtone import _transforms as transforms
from overtone.backends import NOT_BY_KERNELS, BackendError, forced_backend, triton_interprets
from overtone.reference.linalg import raise_unsolved

LIBRARY = torch.library.Library("overtone", "DEF")


def contracts_digest(folder: Path) -> str:
    """A name for what the sources in `folder` say."""
    sources = [path.read_bytes() for path in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()[:16]


# torch.compile keeps compiled graphs on disk, under keys that name our ops but do not know their fakes. A graph of
# another overtone, whose fakes had other strides, would be taken for this one's.
torch.compiler.config.cache_key_tag += f"overtone {contracts_digest(Path(__file__).parent)};"


def define(schema: str, *, fake: Callable, triton: str | None = None, batched: str | None = None) -> None:
    """Define an op once: `triton` names its launcher as 'module.function' of overtone.triton_kernels, `batched` its
    implementation for CUDA tensors in overtone.ops.linalg.batched, if it has one."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"overtone::{name}", fake, lib=LIBRARY)
    if triton is not None:
        LIBRARY.impl(name, _imported("overtone.triton_kernels", triton), "CPU" if triton_interprets() else "CUDA")
    if batched is not None:
        LIBRARY.impl(name, _imported("overtone.ops.linalg.batched", batched), "CUDA")


def define_raising(schema: str, *, solver: str, fake: Callable) -> None:
    """Define a solver's strict form: op `solver` (…) -> (…, info), but a matrix that was not solved raises.

    It takes the solver's arguments and, last, the function to name in the error. An op of its own, opaque to
    torch.compile, so that it raises there too.
    """
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    torch.library.register_fake(f"overtone::{name}", lambda *args: fake(*args[:-1]), lib=LIBRARY)
    LIBRARY.impl(name, raising(getattr(torch.ops.overtone, solver)), "CompositeExplicitAutograd")


def _imported(package: str, path: str) -> Callable:
    module, _, function = path.rpartition(".")

    def call(*args):
        # Imported at the first call: importing overtone must not import Triton, let alone touch a device.
        return getattr(importlib.import_module(f"{package}.{module}"), function)(*args)

    return call


def differentiable(
    name: str,
    *,
    setup: Callable,
    backward: Callable,
    reference: Callable,
    batched: tuple[int, ...],
    merges: bool = False,
    contiguous: tuple[int, ...] = (),
    forward: Callable | None = None,
) -> None:
    """Give op `name` its gradient, and a meaning under forward-mode AD and the transforms of torch.func.

    Args:
        setup, backward: as torch.library.register_autograd's, for gradients by the kernels.
        reference: takes the op's arguments and returns its results, in differentiable PyTorch. It runs where a
            derivative is wanted that the kernels have not: forward mode, and torch.func's. Results that are for
            backward alone may be empty there.
        batched: the places of the arguments with dimensions of a batch, in which torch.vmap puts the one it maps.
        merges: these arguments have exactly one such dimension, which the mapped one is merged with; otherwise they
            take any number.
        contiguous: the places of the arguments that the kernels take contiguous only.
        forward: takes the op and its arguments, the first of them dual, and returns dual results; or None where it
            leaves them to the reference.
    """
    op = getattr(torch.ops.overtone, name).default
    by_kernels = make_autograd_impl(op, Info(backward, setup))

    def differentiate(keyset, *args):
        if not transforms.tracked(args):
            return by_kernels(keyset, *args)
        results = None
        device = next(x.device.type for x in args if isinstance(x, Tensor))
        # Autocast has no say in what kernels compute either.
        with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
            # If a graph is made at this level, too, what it saves must be dual: the reference's is.
            if forward is not None and not (torch.is_grad_enabled() and args[0].requires_grad):
                results = forward(op, *args)
            return _by_reference(name, reference, args) if results is None else results

    LIBRARY.impl(name, differentiate, "Autograd", with_keyset=True)
    LIBRARY.impl(name, _mapping(op, batched, merges, contiguous), "FuncTorchBatched")


def call(name: str, tensor: Tensor, *args) -> Any:
    """torch.ops.overtone.<name>(tensor, …), whose products are as wide in a transform as the kernels'."""
    with transforms.without_autocast(tensor):
        return getattr(torch.ops.overtone, name)(tensor, *args)


def _by_reference(name: str, reference: Callable, args: tuple) -> Any:
    forced = forced_backend()
    if forced not in (None, "reference"):
        raise BackendError(f"{name}: backend {forced!r} cannot run this call: {NOT_BY_KERNELS}")
    return reference(*args)


def raising(solver: Callable) -> Callable:
    """A solver's strict form: (…) -> (…, info), but a matrix that was not solved raises."""

    def solve(*args):
        *inputs, function = args
        results = solver(*inputs)
        raise_unsolved(function, results[-1])
        return results

    return solve


def _mapping(
    op: torch._ops.OpOverload, batched: tuple[int, ...], merges: bool, contiguous: tuple[int, ...]
) -> Callable:
    """torch.vmap of an op: one call with the mapped dimension in the batch, or, where an argument is mapped that has no
    batch (weights), a call for each of its members."""

    def run(*args):
        return op(*(x.contiguous() if place in contiguous and x is not None else x for place, x in enumerate(args)))

    def call(*args):
        level = _C._functorch.peek_interpreter_stack().level()
        pairs = [_C._functorch._unwrap_batched(x, level) if isinstance(x, Tensor) else (x, None) for x in args]
        size = next((x.shape[dim] for x, dim in pairs if dim is not None), None)
        with _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(_C.DispatchKey.FuncTorchBatched)):
            if size is None:  # nothing is mapped at this level
                return op(*args)
            if any(dim is not None for place, (_, dim) in enumerate(pairs) if place not in batched):
                results, dims = _one_by_one(run, pairs, size)
            else:
                results, dims = _in_one_call(run, pairs, size, batched, merges)
        wrapped = tuple(
            x if dim is None else _C._functorch._add_batch_dim(x, dim, level)
            for x, dim in zip(results, dims, strict=True)
        )
        return wrapped[0] if len(op._schema.returns) == 1 else wrapped

    return call


def _one_by_one(run: Callable, pairs: list, size: int) -> tuple[tuple, tuple]:
    members = [run(*(x if dim is None else x.select(dim, i) for x, dim in pairs)) for i in range(size)]
    columns = zip(*members, strict=True) if isinstance(members[0], tuple) else [members]
    results = tuple(torch.stack(tuple(column)) for column in columns)
    return results, (0,) * len(results)


def _in_one_call(run: Callable, pairs: list, size: int, batched: tuple[int, ...], merges: bool) -> tuple[tuple, tuple]:
    args = [x for x, _ in pairs]
    for place in batched:
        x, dim = pairs[place]
        if x is not None:
            x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            args[place] = x.flatten(0, 1) if merges else x
    results = run(*args)
    results = results if isinstance(results, tuple) else (results,)
    batch = args[batched[0]].shape[0]
    # What was not wanted came back empty.
    dims = tuple(0 if x.dim() > 0 and x.shape[0] == batch else None for x in results)
    if merges:
        results = tuple(
            x if dim is None else x.unflatten(0, (size, batch // size)) for x, dim in zip(results, dims, strict=True)
        )
    return results, dims


def differentiable_gradient(function: Callable, inputs: tuple, grads: tuple) -> tuple:
    """The gradients of the reference `function` at `inputs`, as a graph that can be differentiated again."""

    def outputs_of(*inputs):
        outputs = function(*inputs)
        return tuple(outputs) if isinstance(outputs, tuple) else (outputs,)

    if _C._are_functorch_transforms_active():  # grads may be wrapped: only a transform can take them
        return torch.func.vjp(outputs_of, *inputs)[1](tuple(grads))
    with torch.enable_grad():
        inputs = tuple(x if x.requires_grad else x.detach().requires_grad_() for x in inputs)
        return torch.autograd.grad(outputs_of(*inputs), inputs, grads, create_graph=True, allow_unused=True)


def between_eigenvalues(inner: Tensor, values: Tensor) -> Tensor:
    """M_ij / (λ_j − λ_i) of M [..., n, n], zero on the diagonal: how a change turns eigenvectors into one another."""
    diagonal = torch.eye(values.shape[-1], dtype=torch.bool, device=values.device)
    gaps = values[..., None, :] - values[..., :, None]
    return (inner / gaps.masked_fill(diagonal, 1)).masked_fill(diagonal, 0)
