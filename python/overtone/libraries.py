"""Other people's packages, imported when first needed, with a line that says what is missing."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch


class MissingLibrary(ImportError):
    """A package that is needed is not installed; the message names it."""


def imported(name: str, extra: str = "models") -> ModuleType:
    """The module, or MissingLibrary, which names the extra that brings it."""
    try:
        if name.partition(".")[0] in ("timm", "transformers"):
            _torchvision_schemas()
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # transformers raises one for a module of its own that does not import, without a name.
        missing = f"the package {error.name} is not installed" if error.name else str(error)
        raise MissingLibrary(f"{missing}: pip install 'overtone[{extra}]'") from error


@cache
def _torchvision_schemas() -> torch.library.Library | None:
    """Lets torchvision import where its compiled ops do not load, as those for another build of torch.

    It registers what two of them do on fake tensors whether they were loaded or not, which needs their schemas. They
    get schemas and nothing else: whoever calls an op of torchvision then is told that it is not there, as torchvision
    says it of all its other ops. Where the ops load, nothing is done.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return None
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise ImportError(f"torchvision does not import: {error}") from error
    else:
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
