"""Which precision PyTorch's products have: autocast and torch's switches for float32, old and new."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


def autocast_disabled(x: Tensor) -> AbstractContextManager:
    """Keeps autocast from narrowing products of tensors on x's device."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def products_are_short() -> bool:
    """Whether torch may multiply float32 matrices in TensorFloat-32 or bfloat16, which have 8 to 11 bits of 24.

    Not get_float32_matmul_precision, which raises once the newer settings are used.
    """
    settings = (torch.backends, torch.backends.mkldnn, *_products())  # type: ignore[attr-defined]
    return any(setting.fp32_precision not in ("none", "ieee") for setting in settings)


@contextmanager
def full_float32() -> Iterator[None]:
    """float32 products in float32, whatever the process allows elsewhere.

    torch refuses to mix its old switch (set_float32_matmul_precision) with its new ones (fp32_precision), so the one
    that was used is turned off, and back on.
    """
    if not products_are_short():
        yield
        return
    switches = _products()
    before, legacy = [switch.fp32_precision for switch in switches], _legacy_precision()
    if legacy is None:
        for switch in switches:
            switch.fp32_precision = "ieee"
    else:
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if legacy is not None:
            torch.set_float32_matmul_precision(legacy)
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


def _products() -> tuple[Any, Any]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def _legacy_precision() -> str | None:
    """What the old switch is set to, or None where it is not what shortens products."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # the new switches were used
        return None
    return None if precision == "highest" else precision


def autocast(x: Any) -> Any:
    """A tensor in autocast's dtype where that is on; float64 stays, as in autocast itself."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return x
    device = x.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return x
    return x.to(torch.get_autocast_dtype(device))
