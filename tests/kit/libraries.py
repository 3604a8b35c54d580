"""timm and transformers, imported for tests; where one is missing the test is skipped and says so."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import pytest
import torch


@cache
def _define_torchvision_ops() -> torch.library.Library:
    """torchvision has no build for the CPU build of torch: without these two schemas it does not import."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _import(name: str) -> ModuleType:
    try:
        torchvision_is_whole = hasattr(torch.ops.torchvision, "nms")
        if not torchvision_is_whole:
            _define_torchvision_ops()
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"the package {error.name} is not installed: pip install overtone[models]")


def timm() -> ModuleType:
    return _import("timm")


def transformers() -> ModuleType:
    return _import("transformers")
