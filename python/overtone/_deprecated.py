"""Renamed keywords and values: the old name works for one release, with a DeprecationWarning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def renamed_keywords(
    function: str, options: Mapping[str, Any], renames: Mapping[str, str], *, stacklevel: int = 3
) -> dict[str, Any]:
    """`options` under their new names.

    Args:
        function: as users call it, for messages.
        options: keyword arguments as they were given.
        renames: old names and what replaces each.
        stacklevel: of the warning; 3 is the caller of the function that calls this one.
    """
    result = dict(options)
    for old, new in renames.items():
        if old not in result:
            continue
        if new in result:
            raise TypeError(f"{function}: got both {old} and {new}, wanted {new} alone: {old} is its old name")
        _warn(f"{function}: {old} is deprecated, use {new}", stacklevel)
        result[new] = result.pop(old)
    return result


def renamed_value(function: str, argument: str, value: Any, renames: Mapping[str, Any], *, stacklevel: int = 3) -> Any:
    """`value`, or what replaces it. Arguments as in `renamed_keywords`."""
    if not isinstance(value, str) or value not in renames:
        return value
    _warn(f"{function}: {argument}={value!r} is deprecated, use {renames[value]!r}", stacklevel)
    return renames[value]


def accepts_renamed(function: str, **renames: str) -> Callable[[_Function], _Function]:
    """A decorator for signatures without **options: callers may use the old keywords, old=new."""

    def decorate(decorated: _Function) -> _Function:
        @functools.wraps(decorated)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return decorated(*args, **renamed_keywords(function, kwargs, renames, stacklevel=3))

        return wrapper  # type: ignore[return-value]

    return decorate


def _warn(message: str, stacklevel: int) -> None:
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel + 1)
