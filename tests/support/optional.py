"""timm, transformers, peft and torchao, imported as users import them; where one is missing the test is skipped."""

from __future__ import annotations

from types import ModuleType

import pytest


def _import(name: str) -> ModuleType:
    """A package that is there and does not import is a failure, not a skip."""
    return pytest.importorskip(name, reason=f"the package {name} is not installed", exc_type=ModuleNotFoundError)


def timm() -> ModuleType:
    return _import("timm")


def transformers() -> ModuleType:
    return _import("transformers")


def peft() -> ModuleType:
    return _import("peft")


def torchao() -> ModuleType:
    return _import("torchao")
