"""Validation, in one place. Every error names the function and argument, what it got and what it wanted."""

from __future__ import annotations

import operator
from collections.abc import Sized
from numbers import Real

import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums are float32, or float64 for float64 tensors; so are λ and the gradients of weights."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def describe(value: object) -> str:
    """What was given, in a few words: never the elements of an array."""
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {list(value.shape)} on {value.device}"
    kind, text = type(value).__name__, repr(value)
    if len(text) <= _LONGEST and not any(sign in text for sign in ("\n", "tensor(", "array(")):
        return f"{kind} {text}"
    if hasattr(value, "shape"):
        return f"{kind} of shape {list(value.shape)}"
    return f"{kind} of length {len(value)}" if isinstance(value, Sized) else kind


# Characters of a value that an error shows.
_LONGEST = 100


def tokens(function: str, name: str, x: object) -> Tensor:
    """A floating-point tensor [..., N, C]."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
        raise _error(function, name, x, "a floating-point tensor [..., N, C]")
    if x.layout != torch.strided:
        raise _error(function, name, x, f"a dense (strided) tensor, not {x.layout}")
    return x


def token_mask(function: str, mask: object, x: Tensor) -> Tensor | None:
    """A bool tensor broadcastable to x's [..., N], expanded to it."""
    if mask is None:
        return None
    wanted = f"a bool tensor broadcastable to {list(x.shape[:-1])} on {x.device} (True = the token takes part)"
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.device != x.device:
        raise _error(function, "mask", mask, wanted)
    if not _broadcasts(mask.shape, x.shape[:-1]):
        raise _error(function, "mask", mask, wanted)
    return mask.expand(x.shape[:-1])


def channel_gain(function: str, name: str, gain: object, x: Tensor) -> Tensor:
    """A number, or a tensor with one element or one per channel; returned as [C] in the statistics' dtype."""
    channels = x.shape[-1]
    dtype = accumulate_dtype(x.dtype)
    if isinstance(gain, Real):
        return torch.full((), float(gain), dtype=dtype, device=x.device).expand(channels)
    if (
        isinstance(gain, Tensor)
        and gain.is_floating_point()
        and gain.device == x.device
        and gain.dim() <= 1
        and (gain.dim() == 0 or gain.shape[0] in (1, channels))
    ):
        return gain.to(dtype).expand(channels)
    raise _error(
        function, name, gain, f"a number, or a floating-point tensor of shape [] or [{channels}] on {x.device}"
    )


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    if len(shape) > len(target):
        return False
    return all(size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(target), strict=False))


def _error(function: str, name: str, got: object, wanted: str) -> Exception:
    kind = ValueError if isinstance(got, Tensor) else TypeError
    return kind(f"{function}: {name}: got {describe(got)}, wanted {wanted}")


def heads(function: str, name: str, x: object) -> Tensor:
    """A floating-point tensor [B, H, N, D]."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() != 4 or x.shape[-1] == 0:
        raise _error(function, name, x, "a floating-point tensor [B, H, N, D] with D ≥ 1")
    if x.layout != torch.strided:
        raise _error(function, name, x, f"a dense (strided) tensor, not {x.layout}")
    return x


def matching(
    function: str, name: str, x: object, shape: tuple[int | str, ...], like: Tensor, *, wide: bool = False
) -> Tensor:
    """A tensor of this shape (a letter is any size), on `like`'s device, in its dtype or, if wide, its statistics'."""
    dtypes = dict.fromkeys((like.dtype, accumulate_dtype(like.dtype)) if wide else (like.dtype,))
    if (
        isinstance(x, Tensor)
        and x.layout == torch.strided
        and x.dtype in dtypes
        and x.device == like.device
        and x.dim() == len(shape)
        and all(isinstance(wanted, str) or size == wanted for size, wanted in zip(x.shape, shape, strict=True))
    ):
        return x
    sizes = ", ".join(map(str, shape))
    raise _error(function, name, x, f"{' or '.join(map(str, dtypes))} of shape [{sizes}] on {like.device}")


def broadcastable(function: str, name: str, x: object, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    """A tensor broadcastable to `shape`, on `like`'s device, in its dtype or the accumulate dtype; or None."""
    if x is None:
        return None
    dtypes = dict.fromkeys((like.dtype, accumulate_dtype(like.dtype)))
    if (
        isinstance(x, Tensor)
        and x.layout == torch.strided
        and x.dtype in dtypes
        and x.device == like.device
        and _broadcasts(x.shape, torch.Size(shape))
    ):
        return x
    wanted = f"{' or '.join(map(str, dtypes))}, broadcastable to {list(shape)}, on {like.device}"
    raise _error(function, name, x, wanted)


def attention_mask(function: str, mask: object, query: Tensor, key: Tensor) -> Tensor | None:
    """A bool or float tensor broadcastable to [B, H, N, M]."""
    if mask is None:
        return None
    shape = query.shape[:-1] + key.shape[-2:-1]
    dtypes = dict.fromkeys((torch.bool, query.dtype, accumulate_dtype(query.dtype)))
    if (
        isinstance(mask, Tensor)
        and mask.layout == torch.strided
        and mask.dtype in dtypes
        and mask.device == query.device
        and _broadcasts(mask.shape, shape)
    ):
        return mask
    kinds = " or ".join(map(str, dtypes))
    wanted = f"{kinds}, broadcastable to {list(shape)}, on {query.device} (bool: True = attend; float: added)"
    raise _error(function, "attn_mask", mask, wanted)


def flag(function: str, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _error(function, name, value, "True or False")
    return value


def optional_number(function: str, name: str, value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, Real) or isinstance(value, bool):
        raise _error(function, name, value, "a number, or None")
    return float(value)


def matrices(function: str, name: str, A: object, *, square: bool = False) -> Tensor:
    """A floating-point or complex tensor [..., m, n], or [..., n, n] where it must be square."""
    shape = "[..., n, n]" if square else "[..., m, n]"
    if (
        not isinstance(A, Tensor)
        or not (A.is_floating_point() or A.is_complex())
        or A.dim() < 2
        or (square and A.shape[-1] != A.shape[-2])
    ):
        raise _error(function, name, A, f"a floating-point or complex tensor {shape}")
    if A.layout != torch.strided:
        raise _error(function, name, A, f"a dense (strided) tensor, not {A.layout}")
    return A


def one_of(function: str, name: str, value: object, wanted: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in wanted:
        got = repr(value) if isinstance(value, str) and len(value) <= _LONGEST else describe(value)
        raise ValueError(f"{function}: {name}: got {got}, wanted {' or '.join(map(repr, wanted))}")
    return value


def count(function: str, name: str, value: object) -> int:
    """An integer of at least 1, also numpy's."""
    try:
        number = None if isinstance(value, Tensor) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is not None and number >= 1:
        return number
    kind = TypeError if number is None else ValueError
    raise kind(f"{function}: {name}: got {describe(value)}, wanted an integer of at least 1")
