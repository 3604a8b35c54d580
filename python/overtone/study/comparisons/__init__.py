"""What a study compares besides the three regimes: one module each, with its tables, figures, findings and section."""

from __future__ import annotations

from types import ModuleType

from overtone.study.comparisons import depth, kinds, methods, text
from overtone.study.results import Results

MODULES: dict[str, ModuleType] = {"depth": depth, "kinds": kinds, "methods": methods, "text": text}


def chosen(results: Results) -> list[ModuleType]:
    """Those in the plan."""
    return [module for part, module in MODULES.items() if part in results.plan.parts]
