"""The inputs of `analyze`, cut into batches along the dimension that counts samples.

That is the first one, but for modules of torch.nn: they take sequences first by default (batch_first=False), or one
sample without a batch dimension. A model may turn its tokens before they get there, so the first attention module is
asked: the model runs up to it with one and with two entries along the first dimension, and what changes there is
what that dimension counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from overtone.analysis.sites import Site

# Masks of torch.nn that belong to the sequence, not to its samples.
SHARED_MASKS = ("mask", "src_mask", "tgt_mask", "memory_mask", "attn_mask")


class _Reached(BaseException):
    """Ends a run at the first attention module; no `except Exception` of a model stops it."""


def sample_dimension(model: nn.Module, sites: list[Site], batch: Any, device: torch.device) -> int | None:
    """The dimension of the inputs that counts samples; None where they are one sample without such a dimension."""
    site = next((site for site in sites if hasattr(site.module, "batch_first")), None)
    first = _first_tensor(batch)
    if site is None or first is None or first.dim() > 3 or 0 in first.shape:  # images: samples first
        return 0
    one, two = (_shape_at(model, site, _entries(batch, count), device) for count in (1, 2))
    if one is None and two is None:
        return 0  # it is not reached, or the run itself will say what is wrong
    if one is None or two is None:  # sequences of another length do not fit the model
        return 1
    if len(one) == 2:
        return None
    length = 1 if site.module.batch_first else 0
    return 1 if one[length] != two[length] and one[1 - length] == two[1 - length] else 0


def in_batches(inputs: Any, size: int, dimension: int | None) -> Iterable[Any]:
    """A tensor or a dict of tensors in pieces of `size` samples."""
    if isinstance(inputs, Tensor):
        return [inputs] if dimension is None else inputs.split(size, dimension)
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    if dimension is None:
        return [tensors]
    shared = {name: value for name, value in tensors.items() if name in SHARED_MASKS}
    parts = {
        name: value.split(size, 0 if "padding_mask" in name else dimension)
        for name, value in tensors.items()
        if name not in shared
    }
    return [dict(zip(parts, values, strict=True)) | shared for values in zip(*parts.values(), strict=True)]


def count(batch: Any, dimension: int | None) -> int:
    """How many samples a batch has."""
    first = _first_tensor(batch)
    return 0 if first is None else 1 if dimension is None else first.shape[dimension]


def unit_of(batch: Any) -> str:
    """What the samples of a batch are called."""
    first = _first_tensor(batch)
    return "images" if first is not None and first.dim() == 4 else "samples"


def call(model: nn.Module, batch: Any, device: torch.device) -> None:
    """Run the model on one batch."""
    if isinstance(batch, tuple | list):
        batch = batch[0]
    if isinstance(batch, Tensor):
        model(batch.to(device))
    else:
        model(**{name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()})


def require_batch(batch: Any) -> None:
    """Refuses what cannot be a batch, and padding: tokens that mean nothing would be measured."""
    if isinstance(batch, tuple | list):
        batch = batch[0] if batch else None
    if not isinstance(batch, Tensor | Mapping):
        raise TypeError(f"analyze: inputs: got a batch of {type(batch).__name__}, wanted a tensor, a dict or a tuple")
    if isinstance(batch, Tensor):
        return
    for name, mask in batch.items():
        # torch.nn's padding masks hide where they are true, or not zero; Hugging Face's where they are zero.
        is_hiding = isinstance(mask, Tensor) and (
            ("padding_mask" in name and bool((mask != 0).any())) or (name == "attention_mask" and not bool(mask.all()))
        )
        if is_hiding:
            raise ValueError(f"analyze: inputs: {name} hides tokens; wanted sequences of one length without padding")


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Mapping):
        return next((value for name, value in batch.items() if isinstance(value, Tensor) and "mask" not in name), None)
    if isinstance(batch, tuple | list):
        batch = batch[0] if batch else None
    return batch if isinstance(batch, Tensor) else None


def _entries(batch: Any, wanted: int) -> Any:
    """So many entries along the first dimension, the first one repeated where there are too few; no masks."""
    if isinstance(batch, Mapping):
        return {name: _entries(value, wanted) for name, value in batch.items() if "mask" not in name}
    if isinstance(batch, tuple | list):
        return _entries(batch[0], wanted)
    if not isinstance(batch, Tensor) or batch.dim() == 0:
        return batch
    return batch[torch.arange(wanted, device=batch.device).clamp(max=len(batch) - 1)]


def _shape_at(model: nn.Module, site: Site, batch: Any, device: torch.device) -> tuple[int, ...] | None:
    """The shape of the queries at a module of torch.nn; None where a run does not get there."""
    shapes: list[tuple[int, ...]] = []

    def stop(module: nn.Module, args: tuple, kwargs: dict) -> None:
        shapes.append(tuple((args[0] if args else kwargs["query"]).shape))
        raise _Reached

    handle = site.module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        call(model, batch, device)
    except _Reached:
        pass
    except Exception:  # whatever a model says to inputs that do not fit it
        return None
    finally:
        handle.remove()
    return shapes[0] if shapes else None
