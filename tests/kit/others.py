"""Other people's packages: imported where they are installed, otherwise the test says what is missing."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch


def timm() -> Any:
    _declare_torchvision_ops()
    return pytest.importorskip("timm", reason="needs timm")


def transformers() -> Any:
    _declare_torchvision_ops()
    return pytest.importorskip("transformers", reason="needs transformers")


_KEPT: list[torch.library.Library] = []  # a library's definitions live as long as it does


def _declare_torchvision_ops() -> None:
    """A torchvision without compiled ops, as there is none for a CPU build of torch, wants the schemas of two."""
    if _KEPT:
        return
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # a torchvision with ops has them
            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _KEPT.append(library)
