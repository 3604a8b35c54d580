"""Which machine runs what: the backends, whether they are available here, and the choice for one call.

A backend asked for by name runs or raises; only the default (None) chooses.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from overtone import _extension, _transforms

__all__ = [
    "BACKENDS",
    "SUPPORT",
    "BackendError",
    "BackendStatus",
    "Support",
    "active_backend",
    "backend_for",
    "backends",
    "default_backend",
    "select",
    "triton_interpreter_enabled",
    "unsupported_reason",
    "use_backend",
]

BACKENDS = ("reference", "cpu", "triton", "cuda")


class Support(NamedTuple):
    """What a backend's kernels take of an op: dtypes, and what `limit` says of a tensor, a reason why not or None."""

    dtypes: tuple[torch.dtype, ...]
    limit: Callable[[Tensor], str | None] = lambda tensor: None


NO_CUDA_KERNELS = (
    "the extension was built without its CUDA kernels: reinstall overtone where nvcc and a CUDA build of torch are"
    " (OVERTONE_CUDA=1 makes it an error if they cannot be built)"
)


def _triton_attention(query: Tensor) -> str | None:
    from overtone.triton_kernels.attention import config
    from overtone.triton_kernels.runtime import architecture

    return config.unsupported_reason(architecture(query.device), query.dtype, query.shape[-1])


def _cuda_solver(solver: str) -> Callable[[Tensor], str | None]:
    """The limit of a compiled CUDA solver: the device's shared memory."""

    def limit(A: Tensor) -> str | None:
        if not _has_cuda_kernels():
            return NO_CUDA_KERNELS
        largest = _cuda_limit(solver, str(A.dtype).removeprefix("torch."), A.device.index)
        n = max(A.shape[-2:])
        if n > largest:
            return f"supports n ≤ {largest} on this device, got {n}"
        if solver == "eig" and _transforms.needs_gradient(A):
            return "computes eigenvalues only, without gradient"
        return None

    return limit


FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WIDE = (torch.float32, torch.float64)

# Which backend has kernels for an op. The reference has every op in every floating dtype. On CUDA "inverse" and
# "orthonormal_basis" are torch's batched products (overtone.ops.linalg.batched): any size, no compiled kernel.
SUPPORT: dict[str, dict[str, Support]] = {
    "frequency_norms": {"cpu": Support(FLOATS), "triton": Support(FLOATS)},
    "frequency_filter": {"cpu": Support(FLOATS), "triton": Support(FLOATS)},
    "spectral_attention": {
        "cpu": Support(FLOATS),
        "triton": Support((torch.float32, torch.bfloat16, torch.float16), _triton_attention),
    },
    "linear": {"cpu": Support(FLOATS)},
    "mlp": {"cpu": Support(FLOATS)},
    "rounded_layer_norm": {"cpu": Support((torch.float32,))},
    "eig": {"cpu": Support(WIDE)},
    "eigvals": {"cpu": Support(WIDE), "cuda": Support(WIDE, _cuda_solver("eig"))},
    "eigh": {"cpu": Support(WIDE), "cuda": Support(WIDE, _cuda_solver("eigh"))},
    "qr": {"cpu": Support(WIDE), "cuda": Support(WIDE, _cuda_solver("qr"))},
    "inverse": {"cpu": Support(WIDE), "cuda": Support(WIDE)},
    "orthonormal_basis": {"cpu": Support(WIDE), "cuda": Support(WIDE)},
}


NOT_BY_KERNELS = (
    "forward-mode AD and torch.func's grad, vjp, jvp, … differentiate the PyTorch reference, which kernels are not:"
    " leave the backend to None, or ask for 'reference'"
)


class BackendError(RuntimeError):
    """The backend asked for cannot run this call."""


class BackendStatus(NamedTuple):
    """One line of `backends()`: `detail` says what runs, or why the backend is not available here."""

    available: bool
    detail: str


class _Choice:
    """What `use_backend` names. A plain attribute: torch.compile guards on it, which it cannot do for context
    variables or thread locals. Like torch's own global switches it holds for the whole process."""

    active: str | None = None


_HAS_TRITON = importlib.util.find_spec("triton") is not None
_NO_TRITON = "the package triton is not installed"


def triton_interpreter_enabled() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on CPU tensors, in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _cpu_status() -> BackendStatus:
    if _extension.module is None:
        return BackendStatus(False, _extension.load_error)
    isas = ", ".join(_extension.module.available_isas())
    return BackendStatus(True, f"C++ kernels for {_extension.module.isa()} (this machine has {isas})")


def _triton_status() -> BackendStatus:
    if not _HAS_TRITON:
        return BackendStatus(False, _NO_TRITON)
    if triton_interpreter_enabled():
        return BackendStatus(True, "Triton's interpreter on CPU tensors (TRITON_INTERPRET=1): for tests, slow")
    if not torch.cuda.is_available():
        return BackendStatus(False, "torch sees no CUDA or ROCm device")
    return BackendStatus(True, f"Triton kernels on {torch.cuda.get_device_name()}")


def _has_cuda_kernels() -> bool:
    return getattr(_extension.module, "has_cuda", False)


def _cuda_limit(solver: str, dtype: str, device: int | None) -> int:
    """The most rows or columns of matrices that a compiled CUDA solver takes on this device, None being the current."""
    assert _extension.module is not None  # _has_cuda_kernels
    return _extension.module.cuda_limit(solver, dtype, -1 if device is None else device)


# What torch.compiler.assume_constant_result does; to call it would import the compiler, and Triton.
_cuda_limit._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _cuda_status() -> BackendStatus:
    if torch.version.cuda is None or not torch.cuda.is_available():
        return BackendStatus(False, "torch sees no CUDA device")
    gpu = torch.cuda.get_device_name()
    if not _has_cuda_kernels():
        return BackendStatus(True, f"bases and inverses by batched products on {gpu}; linalg: {NO_CUDA_KERNELS}")
    largest = {solver: _cuda_limit(solver, "float32", None) for solver in ("eigh", "eig", "qr")}
    return BackendStatus(
        True,
        f"CUDA kernels on {gpu}: eigh to n = {largest['eigh']}, eigvals to {largest['eig']}, qr to {largest['qr']}"
        " (float32); larger matrices and eig's eigenvectors go to torch.linalg; bases and inverses by batched products",
    )


_STATUS = {
    "reference": lambda: BackendStatus(True, "plain PyTorch, any device"),
    "cpu": _cpu_status,
    "triton": _triton_status,
    "cuda": _cuda_status,
}


def backends() -> dict[str, BackendStatus]:
    """What is available here, and why the rest is not."""
    return {name: _STATUS[name]() for name in BACKENDS}


def _check_name(name: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"backend: got {name!r}, wanted one of {', '.join(map(repr, BACKENDS))} or None")
    return name


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Make `name` the backend of every call inside that does not name one itself (None: choose again).

    It holds for the whole process, not for one thread, like torch's own global switches. Layers that PyTorch has too,
    linear ones and the MLP of this package's models, are PyTorch's own where `name` has no kernels for them.
    """
    if name is not None:
        _check_name(name)
    before = _Choice.active
    _Choice.active = name
    try:
        yield
    finally:
        _Choice.active = before


def active_backend() -> str | None:
    """What `use_backend` has named, for other processes to name too; None where it leaves the choice."""
    return _Choice.active


def default_backend(tensor: Tensor, op: str | None = None) -> str:
    """The backend whose kernels torch's dispatcher would call for this tensor (and op)."""
    return _default_backend(tensor.device.type, op)


def _default_backend(device: str, op: str | None) -> str:
    if device == "cpu":
        return "triton" if triton_interpreter_enabled() else "cpu"
    return "cuda" if op is not None and "cuda" in SUPPORT[op] else "triton"


def backend_for(op: str, device: torch.device | str) -> str:
    """The backend that runs `op` on ordinary float32 tensors of this device.

    Raises BackendError where `use_backend` names one that cannot run there.
    """
    device, name = torch.device(device).type, active_backend()
    if name is None:
        name = _default_backend(device, op)
        return "reference" if _absence(op, name, device, torch.float32) else name
    reason = _absence(op, name, device, torch.float32)
    if reason is not None:
        raise BackendError(f"{op}: backend {name!r} cannot run on {device}: {reason}")
    return name


def unsupported_reason(op: str, backend: str, tensor: Tensor) -> str | None:
    """Why `backend` cannot run `op` on `tensor`, or None if it can."""
    reason = _absence(op, backend, tensor.device.type, tensor.dtype)
    return reason if reason is not None or backend == "reference" else SUPPORT[op][backend].limit(tensor)


def _absence(op: str, backend: str, device: str, dtype: torch.dtype) -> str | None:
    """Why the backend has no kernels for the op, whatever the sizes."""
    if backend == "reference":
        return None
    support = SUPPORT[op].get(backend)
    if support is None:
        have = ", ".join(repr(other) for other in ("reference", *SUPPORT[op]))
        return f"this version has no {backend} kernel for {op}; it has {have}"
    wanted = "cpu" if backend == "cpu" or (backend == "triton" and triton_interpreter_enabled()) else "cuda"
    if device != wanted:
        return f"needs a tensor on {wanted}, got one on {device}"
    if dtype not in support.dtypes:
        return f"takes {', '.join(map(str, support.dtypes))}, got {dtype}"
    if backend == "cpu" and _extension.module is None:
        return _extension.load_error
    return _NO_TRITON if backend == "triton" and not _HAS_TRITON else None


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=4)


def select(op: str, requested: str | None, tensor: Tensor) -> str:
    """The backend that runs `op` on `tensor`. Raises if it was asked for by name and cannot."""
    name = requested if requested is not None else _Choice.active
    if name is not None:
        reason = unsupported_reason(op, _check_name(name), tensor)
        if reason is None and name != "reference" and _transforms.differentiating():
            reason = NOT_BY_KERNELS
        if reason is not None:
            raise BackendError(f"{op}: backend {name!r} cannot run this call: {reason}")
        return name
    name = default_backend(tensor, op)
    if name not in SUPPORT[op]:
        return "reference"
    reason = unsupported_reason(op, name, tensor)
    if reason is None:
        return name
    # That torch.linalg takes what the CUDA kernels do not is no surprise: backends() says so.
    if name != "cuda" and tensor.dtype in SUPPORT[op][name].dtypes and not torch.compiler.is_compiling():
        _warn_once(f"falling back to the PyTorch reference (slower): {reason}")
    return "reference"
