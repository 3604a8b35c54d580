"""The scaling curves as a table for a terminal and as one HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from overtone.benchmarks.harness.scaling import TIME, Curve, Measured
from overtone.report.figures import SERIES, Figure, log_log
from overtone.report.figures import Curve as Line
from overtone.report.page import Page, Section
from overtone.report.table import Table

UNITS = {TIME: (1e3, "ms"), "memory": (1e-6, "MB")}
COLUMNS = ("op", "against", "of", "implementation", "from", "to", "smallest", "largest", "slope", "±", "theory")
NOTE = (
    "slope: the exponent fitted over the points from which on the leading term is most of the work; theory: its own. "
    "Times in ms, memory in MB. Below the theory: fixed costs still count; above it: caches are exceeded."
)


def slopes(measured: Sequence[Measured]) -> Table:
    """A row per curve."""
    return Table("Growth", COLUMNS, [_row(curve) for each in measured for curve in each.curves()], NOTE)


def _row(curve: Curve) -> list[Any]:
    factor, _ = UNITS[curve.quantity]
    slope, points = curve.slope, curve.asymptotic
    first = points[0][0] if points else curve.x[0]
    return [
        curve.sweep.op,
        curve.sweep.axis,
        curve.quantity,
        curve.implementation,
        first,
        curve.x[-1],
        factor * curve.y[0],
        factor * curve.y[-1],
        round(slope.value, 2) + 0.0 if slope else math.nan,  # no −0
        round(slope.error, 2) if slope else math.nan,
        math.nan if curve.theory is None else curve.theory,
    ]


def figures(measured: Measured) -> list[Figure]:
    """Time, and memory where it is measured, with the theoretical slope as dashes."""
    found = []
    for quantity, (factor, unit) in UNITS.items():
        curves = [curve for curve in measured.curves() if curve.quantity == quantity and any(curve.y)]
        lines = [line for curve, color in zip(curves, SERIES, strict=False) for line in _lines(curve, factor, color)]
        if lines:
            title = f"{quantity.capitalize()} of {measured.sweep.title}"
            name = "".join(letter if letter.isalnum() else "-" for letter in title.lower())
            alt = f"{title}: {'; '.join(map(_in_words, curves))}."
            found.append(log_log(name, title, lines, x=measured.sweep.axis, y=f"{quantity}, {unit}", alt=alt))
    return found


def _lines(curve: Curve, factor: float, color: str) -> list[Line]:
    """The points, and dashes of the theoretical slope through the last of them."""
    lines = [Line(f"{curve.implementation}{_exponent(curve)}", curve.x, [factor * y for y in curve.y], color=color)]
    points = curve.asymptotic
    if curve.theory is not None and len(points) > 1 and points[-1][1] > 0:
        end, height = points[-1]
        x = [value for value, _ in points]
        label = f"slope {curve.theory:g}"
        y = [factor * height * (value / end) ** curve.theory for value in x]
        lines.append(Line(label, x, y, color=color, dashed=True))
    return lines


def _exponent(curve: Curve) -> str:
    return f": {curve.slope.value:.2f}" if curve.slope else ""


def _in_words(curve: Curve) -> str:
    return f"{curve.implementation} grows with exponent{_exponent(curve)}, {curve.theory} in theory"


def page(measured: Sequence[Measured], machine: Mapping[str, Any]) -> Page:
    """One page that needs nothing but itself."""
    noisy = sum(each.noisy for each in measured)
    points = sum(len(each.results) for each in measured)
    failures = [failure for each in measured for failure in each.failures]
    warnings = [f"OTHER PROCESSES USED THE MACHINE in {noisy} of {points} points."] if noisy else []
    warnings += [f"A wrong result, which has no point: {failure}" for failure in failures]
    sections = [Section("Slopes", text=warnings, tables=[slopes(measured)])]
    sections += [Section(each.sweep.title, figures=figures(each)) for each in measured]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return Page(
        title="How cost grows",
        summary="Time and memory against the sizes of a problem, and the exponent of each beside the theoretical one.",
        key_figures=[
            (str(points), "points, each checked against float64"),
            (str(points - noisy), "of them clean"),
            (str(machine["threads"]), "threads"),
        ],
        sections=sections,
        footer=f"{machine['cpu']}, kernels at {machine['isa']}; {versions}; commit {machine['commit']}",
    )


def as_json(measured: Sequence[Measured], machine: Mapping[str, Any]) -> dict[str, Any]:
    """The curves for a program: seconds and bytes."""
    curves = [
        {
            "op": curve.sweep.op,
            "axis": curve.sweep.axis,
            "quantity": curve.quantity,
            "implementation": curve.implementation,
            "x": curve.x,
            "y": curve.y,
            "since": curve.sweep.since,
            "slope": curve.slope.value if curve.slope else None,
            "theory": curve.theory,
        }
        for each in measured
        for curve in each.curves()
    ]
    return {"machine": machine, "noisy": sum(each.noisy for each in measured), "curves": curves}
