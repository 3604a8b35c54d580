"""Language models beside vision models: free, smoothing, sharpening and mixed layers on text."""

from __future__ import annotations

import numpy as np

from overtone.analysis import METRICS
from overtone.report import figures as draw
from overtone.report.figures import COLORS, Curve, Figure
from overtone.report.page import Section
from overtone.report.table import NONE, Cell, Table
from overtone.study.measure import Measures
from overtone.study.plan import TEXT_MODELS
from overtone.study.results import Results, share_of
from overtone.study.stats import Difference, Finding, MeanStd, finding

SOURCE = "Dovonon et al. (version 2)"
FREE, SMOOTH, SHARPEN = (TEXT_MODELS[regime] for regime in ("free", "smooth", "sharpen"))
SHOWN = {FREE: "free", SMOOTH: "smooth", SHARPEN: "sharpen"}
WORDS = """\
Decoders over bytes, trained to say the next one. Dovonon et al. find that text generation is hurt by forcing either
sign, and that the eigenvalues of trained language models lie symmetrically around zero where those of vision models
lean to the negative. The text is Python's own documentation; the recipe was taken from the images' and not tuned. The
metrics are of all tokens of a window: nothing is computed from them, so that no token sees a later one."""


def tables(results: Results) -> dict[str, Table]:
    columns = ["model", "n", "bits per byte", "− free", "negative eigenvalues %", "‖HFC‖/‖LFC‖ at the end",
               "cosine at the end", "effective rank at the end", "Perron %"]  # fmt: skip
    rows: list[list[Cell]] = []
    for variant in results.variants("text"):
        found = _runs(results, variant)
        ends = [MeanStd.of([m["trained"]["curves"][name][-1] for m in found]) for name in _METRICS]
        rows.append([
            variant, len(found), MeanStd.of(_bits(results, variant)),
            NONE if variant == FREE else str(_difference(results, variant)),
            MeanStd.of([100 * _negative(m) for m in found]), *ends,
            MeanStd.of([share_of(m["trained"]["verdicts"], "perron") for m in found]),
        ])  # fmt: skip
    note = (
        "n seeds; mean ± standard deviation; fewer bits are better; differences are paired by seed, with a 95 % "
        "interval."
    )
    return {"text": Table("Language models on text", columns, rows, note)}


def figures(results: Results) -> dict[str, Figure]:
    groups = {
        "images: ViT, trained": results.eigenvalues("free", "trained").real,
        "text: GPT, trained": _eigenvalues(results, FREE).real,
    }
    shares = ", ".join(f"{100 * float((values < 0).mean()):.3g} % in {name}" for name, values in groups.items())
    found = [
        draw.histograms(
            "text",
            "Text against images: real parts of the eigenvalues of H in trained free models; below zero blue",
            groups,
            x="Re λ of H",
            y="",
            marks=(0.0,),
            alt=f"Histograms of eigenvalues; negative are {shares}.",
        )
    ]
    for metric in _METRICS:
        lines = [
            Curve(name, range(len(curve)), curve, color=COLORS[regime])
            for name, regime in SHOWN.items()
            for curve in [_curve(results, name, metric)]
        ]
        ends = ", ".join(f"{line.label} {line.y[-1]:.3g}" for line in lines)
        found.append(
            draw.line_plot(
                f"text-{metric.replace('_', '-')}",
                f"{METRICS[metric]} over depth in trained language models",
                lines,
                x="layer",
                y=METRICS[metric],
                log=metric == "ratio",
                alt=f"{METRICS[metric]} over depth; after the last layer: {ends}.",
            )
        )
    return {figure.name: figure for figure in found}


def findings(results: Results) -> list[Finding]:
    text = [_negative(m) for m in _runs(results, FREE)]
    images = [_negative(m) for m in results.of("free")]
    return [
        finding("On text, forced smoothing costs bits per byte", SOURCE, _difference(results, SMOOTH), unit="bits"),
        finding("On text, forced sharpening costs bits per byte", SOURCE, _difference(results, SHARPEN), unit="bits"),
        finding("More of the eigenvalues are negative on images than on text", SOURCE,
                Difference.of([100 * share for share in images], [100 * share for share in text])),
    ]  # fmt: skip


def sections(results: Results, tables: dict[str, Table], figures: dict[str, Figure]) -> list[Section]:
    pictures = [figures[f"text-{metric.replace('_', '-')}"] for metric in _METRICS]
    return [Section("Text", [WORDS], pictures, [tables["text"]])]


_METRICS = ("ratio", "cosine", "effective_rank")


def _runs(results: Results, variant: str) -> list[Measures]:
    """One per seed."""
    config = results.plan.runs_of("text")[0].config
    return results.select("text", variant, depth=config.model.depth, fraction=config.data.train_fraction)


def _bits(results: Results, variant: str) -> list[float]:
    return [m["bits"] for m in _runs(results, variant)]


def _difference(results: Results, variant: str) -> Difference:
    return Difference.of(_bits(results, variant), _bits(results, FREE))


def _curve(results: Results, variant: str, metric: str) -> list[float]:
    found = _runs(results, variant)
    return np.mean([m["trained"]["curves"][metric] for m in found], axis=0).tolist()


def _eigenvalues(results: Results, variant: str) -> np.ndarray:
    found = _runs(results, variant)
    pairs = np.array([pair for m in found for pair in m["trained"]["eigenvalues"]])
    return pairs[:, 0] + 1j * pairs[:, 1]


def _negative(measures: Measures) -> float:
    """The share of the trained eigenvalues with a negative real part."""
    return float((np.array(measures["trained"]["eigenvalues"])[:, 0] < 0).mean())
