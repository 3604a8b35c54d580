"""Renamed keywords and values: the old name works for one release, with a DeprecationWarning."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def renamed_keywords(function: str, options: Mapping[str, Any], renames: Mapping[str, str]) -> dict[str, Any]:
    """`options` under their new names.

    Args:
        function: as users call it, for messages.
        options: keyword arguments as they were given.
        renames: old names and what replaces each.
    """
    result = dict(options)
    for old, new in renames.items():
        if old not in result:
            continue
        if new in result:
            raise TypeError(f"{function}: got both {old} and {new}, wanted {new} alone: {old} is its old name")
        deprecated(f"{function}: {old} is deprecated, use {new}")
        result[new] = result.pop(old)
    return result


def renamed_value(function: str, argument: str, value: Any, renames: Mapping[str, Any]) -> Any:
    """`value`, or what replaces it."""
    if not isinstance(value, str) or value not in renames:
        return value
    deprecated(f"{function}: {argument}={value!r} is deprecated, use {renames[value]!r}")
    return renames[value]


def accepts_renamed(function: str, **renames: str) -> Callable[[_Function], _Function]:
    """A decorator for signatures without **options: callers may use the old keywords, old=new."""

    def decorate(decorated: _Function) -> _Function:
        @functools.wraps(decorated)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return decorated(*args, **renamed_keywords(function, kwargs, renames))

        return wrapper  # type: ignore[return-value]

    return decorate


def deprecated(message: str) -> None:
    """Warn at the first line outside this package: Python shows DeprecationWarnings of a user's own lines only."""
    frame: FrameType | None = sys._getframe()
    level = 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "overtone":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, DeprecationWarning, stacklevel=level + 1)
