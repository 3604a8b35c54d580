"""Random numbers that are a function of their keys, such as (seed, epoch, sample).

There is no state to save: a resumed run, or one with another number of processes, draws the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The first key says what the numbers are for, so that no two uses share any.
ORDER, SHIFT_ROWS, SHIFT_COLUMNS, FLIP, CROP_AREA, CROP_ROW, CROP_COLUMN = range(7)
SPLIT, FRACTION, LAYERS, CORRUPTION, VALIDATION, WINDOWS = range(7, 13)

_INCREMENT = 0x9E3779B97F4A7C15 - 2**64  # splitmix64's constants, as signed numbers
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def hashed(*keys: int | Tensor) -> Tensor:
    """A 64-bit number per combination of keys (ints, or int64 tensors that broadcast), by splitmix64's mixing."""
    return torch.as_tensor(_hashed(*keys))


def uniform(*keys: int | Tensor) -> Tensor:
    """float64 in [0, 1)."""
    return _shifted(hashed(*keys), 11).double() * 2.0**-53


def permutation(size: int, *keys: int) -> Tensor:
    """The numbers 0 … size − 1 in an order that the keys decide."""
    return hashed(*keys, torch.arange(size)).argsort(stable=True)


def seed(*keys: int) -> int:
    """A seed for torch's own generators."""
    return _shifted(_hashed(*keys), 1)  # type: ignore[return-value]


def _hashed(*keys: int | Tensor) -> int | Tensor:
    state: int | Tensor = 0
    for key in keys:
        state = _mixed(state ^ key)
    return state


def _mixed(state: int | Tensor) -> int | Tensor:
    state = _wrapped(state + _INCREMENT)
    state = _wrapped((state ^ _shifted(state, 30)) * _MULTIPLIERS[0])
    state = _wrapped((state ^ _shifted(state, 27)) * _MULTIPLIERS[1])
    return state ^ _shifted(state, 31)


def _wrapped(value: int | Tensor) -> int | Tensor:
    """To 64 bits with a sign, as tensors do by themselves."""
    return value if isinstance(value, Tensor) else (value + 2**63) % 2**64 - 2**63


def _shifted(state: Any, bits: int) -> Any:
    """To the right, with zeros coming in; torch's shift copies the sign, as Python's does."""
    return (state >> bits) & (2 ** (64 - bits) - 1)
