"""timm and transformers, imported when first needed: a baseline of theirs is skipped where its library is missing."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch


class MissingLibrary(Exception):
    """A package that is needed is not installed; the message names it."""


@cache
def _torchvision_ops() -> torch.library.Library | None:
    """torchvision has no build for the CPU build of torch: there it does not import without these two schemas."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return None
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    else:
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def imported(name: str) -> ModuleType:
    """The module, or MissingLibrary."""
    try:
        _torchvision_ops()
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingLibrary(f"the package {error.name} is not installed: pip install 'overtone[models]'") from error
