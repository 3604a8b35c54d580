"""The methods of the field against the plain ViT, with the control for how weights start."""

from __future__ import annotations

import statistics

from overtone.report import figures as draw
from overtone.report.figures import Figure
from overtone.report.page import Section
from overtone.report.table import NONE, Cell, Table
from overtone.study.results import Results
from overtone.study.stats import Difference, Finding, MeanStd

PLAIN = "plain"
WORDS = """\
Every method at its usual strength, with one recipe and the same seeds, each against the plain ViT of the same seed.
"Mimetic start" is the control: ordinary weights that merely start at W_V W_proj = −βI + noise (Trockman and Kolter).
Where it does what ViT⁻ does, the credit belongs to the start and not to the parametrization. Formulas: docs/math.md."""


def tables(results: Results) -> dict[str, Table]:
    columns = ["method", "n", "accuracy %", "− plain", "decided", "time per step, relative",
               "‖HFC‖/‖LFC‖ at the end", "cosine at the end"]  # fmt: skip
    seconds = {
        name: statistics.median(m["step_seconds"] for m in results.select("methods", name))
        for name in results.variants("methods")
    }
    rows: list[list[Cell]] = []
    for name in seconds:
        found = results.select("methods", name)
        difference = _difference(results, name)
        rows.append([
            name, len(found), MeanStd.of(results.accuracies("methods", name)),
            NONE if name == _base(results) else str(difference), NONE if name == _base(results) else _words(difference),
            f"{seconds[name] / seconds[_base(results)]:.2f}",
            *(MeanStd.of([m["trained"]["curves"][metric][-1] for m in found]) for metric in ("ratio", "cosine")),
        ])  # fmt: skip
    note = (
        "n seeds; mean ± standard deviation; differences are paired by seed, with a 95 % interval that is not "
        "corrected for the number of methods. Steps were timed while other runs shared the machine."
    )
    return {"methods": Table("Methods", columns, rows, note)}


def figures(results: Results) -> dict[str, Figure]:
    base = _base(results)
    rows = {name: _difference(results, name) for name in results.variants("methods") if name != base}
    best = max(rows, key=lambda name: rows[name].mean)
    figure = draw.intervals(
        "methods",
        f"Test accuracy minus that of {base}, paired by seed; bars: 95 % intervals",
        {name: (each.mean, each.low, each.high) for name, each in rows.items()},
        x="points of test accuracy",
        alt=f"Differences of accuracy with intervals; the largest mean is that of {best}, {rows[best]} points.",
    )
    return {figure.name: figure}


def findings(results: Results) -> list[Finding]:
    """The control against the sharpening spectrum."""
    spectrum = results.accuracies("methods", "ViT⁻")
    found = []
    for name in results.variants("methods"):
        if name.startswith("mimetic"):
            difference = Difference.of(spectrum, results.accuracies("methods", name))
            words = _words(difference)
            text = f"ViT⁻ against ordinary weights with a {name}: no claim of a paper"
            found.append(Finding(text, NONE, f"{difference} points, n = {difference.n}", words))
    return found


def sections(results: Results, tables: dict[str, Table], figures: dict[str, Figure]) -> list[Section]:
    return [Section("Methods", [WORDS], [figures["methods"]], [tables["methods"]])]


def _base(results: Results) -> str:
    return PLAIN if PLAIN in results.variants("methods") else results.variants("methods")[0]


def _difference(results: Results, name: str) -> Difference:
    return Difference.of(results.accuracies("methods", name), results.accuracies("methods", _base(results)))


def _words(difference: Difference) -> str:
    if difference.low > 0:
        return "better"
    return "worse" if difference.high < 0 else "undecided"
