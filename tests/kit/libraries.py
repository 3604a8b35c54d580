"""timm, transformers, peft and torchao, imported for tests; where one is missing the test is skipped and says so."""

from __future__ import annotations

from types import ModuleType

import pytest

from overtone.benchmarks.libraries import MissingLibrary, imported


def _import(name: str) -> ModuleType:
    try:
        return imported(name)
    except MissingLibrary as missing:
        pytest.skip(str(missing))


def timm() -> ModuleType:
    return _import("timm")


def transformers() -> ModuleType:
    return _import("transformers")


def peft() -> ModuleType:
    return _import("peft")


def torchao() -> ModuleType:
    return _import("torchao")
