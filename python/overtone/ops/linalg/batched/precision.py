"""float32 products in float32, whatever the process allows elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch


def in_full_precision(function: Callable) -> Callable:
    """`function` with torch's switches for TensorFloat-32 and bfloat16 products off: they keep 8 to 11 bits of 24."""

    @wraps(function)
    def call(*args):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            return function(*args)
        finally:
            torch.set_float32_matmul_precision(before)

    return call
