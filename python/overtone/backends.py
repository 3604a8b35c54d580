"""Which machine runs what: the backends, whether they are available here, and the choice for one call.

A backend asked for by name runs or raises; only the default (None) chooses.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from overtone import _extension, _transforms

BACKENDS = ("reference", "cpu", "triton", "cuda")

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# Which backend has kernels for an op, and for which dtypes. The reference has every op in every floating dtype.
KERNELS: dict[str, dict[str, tuple[torch.dtype, ...]]] = {
    "frequency_norms": {"cpu": FLOATS, "triton": FLOATS},
    "frequency_filter": {"cpu": FLOATS, "triton": FLOATS},
    "spectral_attention": {"cpu": FLOATS, "triton": (torch.float32, torch.bfloat16, torch.float16)},
    # Products of halves are torch's: it has instructions for them.
    "linear": {"cpu": (torch.float32, torch.float64)},
    "mlp": {"cpu": (torch.float32, torch.float64)},
    "eig": {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32, torch.float64)},
    "eigh": {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32, torch.float64)},
    "qr": {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32, torch.float64)},
    "compose_symmetric": {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32, torch.float64)},
    "compose_general": {"cpu": (torch.float32, torch.float64), "cuda": (torch.float32, torch.float64)},
}

# What backend "cuda" runs by torch's batched products (overtone.ops.linalg.batched): any size, no compiled kernel.
BY_PRODUCTS = ("compose_symmetric", "compose_general")


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
    """What `use_backend` forces. A plain attribute: torch.compile guards on it, which it cannot do for context
    variables or thread locals. Like torch's own global switches it holds for the whole process."""

    forced: str | None = None


_HAS_TRITON = importlib.util.find_spec("triton") is not None
_NO_TRITON = "the package triton is not installed"


def triton_interprets() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on CPU tensors, in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _cpu_status() -> BackendStatus:
    if _extension.native is None:
        return BackendStatus(False, _extension.why_missing)
    levels = ", ".join(_extension.native.available_isas())
    return BackendStatus(True, f"C++ kernels at level {_extension.native.isa()} (this machine has {levels})")


def _triton_status() -> BackendStatus:
    if not _HAS_TRITON:
        return BackendStatus(False, _NO_TRITON)
    if triton_interprets():
        return BackendStatus(True, "Triton's interpreter on CPU tensors (TRITON_INTERPRET=1): for tests, slow")
    if not torch.cuda.is_available():
        return BackendStatus(False, "torch sees no CUDA or ROCm device")
    return BackendStatus(True, f"Triton kernels on {torch.cuda.get_device_name()}")


_NO_CUDA_KERNELS = (
    "the extension was built without its CUDA kernels: reinstall overtone where nvcc and a CUDA build of torch are"
    " (OVERTONE_CUDA=1 makes it an error if they cannot be built)"
)


def _has_cuda_kernels() -> bool:
    return getattr(_extension.native, "has_cuda", False)


def _cuda_status() -> BackendStatus:
    if torch.version.cuda is None or not torch.cuda.is_available():
        return BackendStatus(False, "torch sees no CUDA device")
    gpu = torch.cuda.get_device_name()
    if not _has_cuda_kernels():
        return BackendStatus(True, f"composed weights by batched products on {gpu}; linalg: {_NO_CUDA_KERNELS}")
    largest = {op: _cuda_limit(op, torch.float32, torch.device("cuda")) for op in ("eigh", "eig", "qr")}
    return BackendStatus(
        True,
        f"CUDA kernels on {gpu}: eigh to n = {largest['eigh']}, eigvals to {largest['eig']}, qr to {largest['qr']}"
        " (float32); larger matrices and eig's eigenvectors go to torch.linalg; composed weights by batched products",
    )


def _cuda_limit(op: str, dtype: torch.dtype, device: torch.device) -> int:
    """The most rows or columns of matrices that the CUDA kernels of `op` take on this device."""
    index = -1 if device.index is None else device.index
    assert _extension.native is not None  # _has_cuda_kernels
    return _extension.native.cuda_limit(op, str(dtype).removeprefix("torch."), index)


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

    It holds for the whole process, not for one thread, like torch's own global switches.
    """
    if name is not None:
        _check_name(name)
    before = _Choice.forced
    _Choice.forced = name
    try:
        yield
    finally:
        _Choice.forced = before


def forced_backend() -> str | None:
    """What `use_backend` has set, for other processes to set too."""
    return _Choice.forced


def device_backend(tensor: Tensor, op: str | None = None) -> str:
    """The backend whose kernels torch's dispatcher would call for this tensor (and op)."""
    if tensor.device.type == "cpu":
        return "triton" if triton_interprets() else "cpu"
    return "cuda" if op is not None and "cuda" in KERNELS[op] else "triton"


def _obstacle(op: str, name: str, tensor: Tensor) -> str | None:
    """Why backend `name` cannot run `op` on `tensor`, or None if it can."""
    if name == "reference":
        return None
    dtypes = KERNELS[op].get(name)
    if dtypes is None:
        have = ", ".join(repr(other) for other in ("reference", *KERNELS[op]))
        return f"this version has no {name} kernel for {op}; it has {have}"
    devices = {"cpu": ("cpu",), "triton": ("cpu",) if triton_interprets() else ("cuda",), "cuda": ("cuda",)}[name]
    if tensor.device.type not in devices:
        return f"it takes tensors on {' or '.join(devices)}, got one on {tensor.device.type}"
    if tensor.dtype not in dtypes:
        return f"it takes {', '.join(map(str, dtypes))}, got {tensor.dtype}"
    if name == "cpu" and _extension.native is None:
        return _extension.why_missing
    if name == "triton" and not _HAS_TRITON:
        return _NO_TRITON
    if name == "cuda":
        return _cuda_obstacle(op, tensor)
    return _triton_obstacle(op, tensor) if name == "triton" else None


def _cuda_obstacle(op: str, tensor: Tensor) -> str | None:
    """What the CUDA kernels do not have goes to torch.linalg."""
    if op in BY_PRODUCTS:
        return None
    if not _has_cuda_kernels():
        return _NO_CUDA_KERNELS
    size, limit = max(tensor.shape[-2:]), _cuda_limit(op, tensor.dtype, tensor.device)
    if size > limit:
        return f"on this device it takes matrices of up to {limit} rows and columns, got {size}"
    if op == "eig" and _transforms.needs_gradient(tensor):
        return "it has eigenvalues without gradient only"
    return None


def _triton_obstacle(op: str, tensor: Tensor) -> str | None:
    if op != "spectral_attention":
        return None
    from overtone.triton_kernels.attention.config import unsupported_reason
    from overtone.triton_kernels.runtime import architecture

    return unsupported_reason(architecture(tensor.device), tensor.dtype, tensor.shape[-1])


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=4)


def select(op: str, requested: str | None, tensor: Tensor) -> str:
    """The backend that runs `op` on `tensor`. Raises if it was asked for by name and cannot."""
    name = requested if requested is not None else _Choice.forced
    if name is not None:
        obstacle = _obstacle(op, _check_name(name), tensor)
        if obstacle is None and name != "reference" and _transforms.differentiating():
            obstacle = NOT_BY_KERNELS
        if obstacle is not None:
            raise BackendError(f"{op}: backend {name!r} cannot run this call: {obstacle}")
        return name
    name = device_backend(tensor, op)
    if name not in KERNELS[op]:
        return "reference"
    obstacle = _obstacle(op, name, tensor)
    if obstacle is None:
        return name
    # That torch.linalg takes what the CUDA kernels do not is no surprise: backends() says so.
    if name != "cuda" and tensor.dtype in KERNELS[op][name] and not torch.compiler.is_compiling():
        _warn_once(f"overtone runs on its PyTorch reference, slower than its kernels: {obstacle}")
    return "reference"
