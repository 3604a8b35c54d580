"""V Λ V⁻¹ beside V Λ Vᵀ, and models whose layers have different regimes."""

from __future__ import annotations

import math
import statistics

from overtone.report import figures as draw
from overtone.report.figures import Curve, Figure
from overtone.report.page import Section
from overtone.report.table import NONE, Cell, Table
from overtone.study.measure import Measures
from overtone.study.results import Results, share_of
from overtone.study.stats import Difference, Finding, MeanStd

SYMMETRIC, GENERAL = "V Λ Vᵀ", "V Λ V⁻¹"
WORDS = """\
H = VΛVᵀ has orthogonal eigenvectors, H = VΛV⁻¹ any that are independent. The general kind is kept well-conditioned by
its parametrization (docs/math.md): V = Q(I + tN) with Q orthogonal and N strictly triangular, of which t takes back as
much as keeps the condition number of V within its limit, whatever the optimizer does. Mixed models give the first or
the last half of their layers a sharpening spectrum and leave the others free, as the first paper does when it reverts
layers."""


def tables(results: Results) -> dict[str, Table]:
    columns = ["model", "n", "accuracy %", f"− {SYMMETRIC} of the same", "largest condition number of V",
               "time per step, relative", "‖HFC‖/‖LFC‖ at the end", "Perron %"]  # fmt: skip
    first = results.variants("kinds")[0]
    base = statistics.median(m["step_seconds"] for m in results.select("kinds", first))
    rows = [_row(results, variant, base) for variant in results.variants("kinds")]
    limit = results.plan.config.model.condition_limit
    note = (
        "n seeds; mean ± standard deviation; differences are paired by seed, with a 95 % interval. The condition "
        f"number is the largest of all layers, epochs and seeds; its limit is {limit:g}. Steps were timed while other "
        "runs shared the machine."
    )
    return {"kinds": Table("Kinds of spectra, and mixed layers", columns, rows, note)}


def _row(results: Results, variant: str, base: float) -> list[Cell]:
    found = results.select("kinds", variant)
    other = variant.replace(GENERAL, SYMMETRIC)
    difference = "" if other == variant else str(_difference(results, variant))
    conditions = _conditions(found)
    seconds = statistics.median(m["step_seconds"] for m in found)
    return [
        variant,
        len(found),
        MeanStd.of(results.accuracies("kinds", variant)),
        difference or NONE,
        f"{max(conditions):.1f}" if conditions else NONE,
        f"{seconds / base:.2f}",
        MeanStd.of([m["trained"]["curves"]["ratio"][-1] for m in found]),
        MeanStd.of([share_of(m["trained"]["verdicts"], "perron") for m in found]),
    ]


def figures(results: Results) -> dict[str, Figure]:
    lines = []
    for variant in results.variants("kinds"):
        found = [m["conditions"] for m in results.select("kinds", variant)]
        if found[0]:
            means = [max(values) for values in zip(*found, strict=True)]
            lines.append(Curve(variant, range(1, len(means) + 1), means))
    figure = draw.line_plot(
        "kinds-condition",
        "Condition number of V in training, the largest of all layers and seeds",
        lines,
        x="epoch",
        y="condition number of V",
        alt=f"Condition numbers over epochs; the largest is {max(max(line.y) for line in lines):.3g}.",
    )
    return {figure.name: figure}


def findings(results: Results) -> list[Finding]:
    """No paper orders the two kinds; what is asked is whether the data can."""
    general = [variant for variant in results.variants("kinds") if GENERAL in variant]
    found = []
    for variant in general:
        difference = _difference(results, variant)
        words = "different" if difference.low > 0 or difference.high < 0 else "undecided"
        text = f"{variant} against {SYMMETRIC}: no claim of a paper"
        found.append(Finding(text, NONE, f"{difference} points, n = {difference.n}", words))
    return found


def sections(results: Results, tables: dict[str, Table], figures: dict[str, Figure]) -> list[Section]:
    return [Section("Kinds of spectra and mixed layers", [WORDS], [figures["kinds-condition"]], [tables["kinds"]])]


def _difference(results: Results, variant: str) -> Difference:
    other = variant.replace(GENERAL, SYMMETRIC)
    return Difference.of(results.accuracies("kinds", variant), results.accuracies("kinds", other))


def _conditions(found: list[Measures]) -> list[float]:
    return [value for m in found for value in m["conditions"] if math.isfinite(value)]
