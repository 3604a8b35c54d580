"""Depth: post-norm, post-norm with de-escalation, and pre-norm, beside what Yu and Zhang say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from overtone.report import figures as draw
from overtone.report.figures import Curve, Figure
from overtone.report.page import Section
from overtone.report.table import Cell, Table
from overtone.study.escalation import BLOCK_METRICS
from overtone.study.results import Results
from overtone.study.stats import Difference, Finding, MeanStd, finding

SOURCE = "Yu and Zhang"
POST, PRE, RESCUED = "post-norm", "pre-norm", "post-norm, τ = 1"
# De-escalated post-norm counts as close to pre-norm if it is at most so many points of accuracy below it.
CLOSE = 5.0
DOTS = {POST: draw.SMOOTH, PRE: draw.THIRD, RESCUED: draw.SHARPEN}

WORDS = """\
Yu and Zhang: in "classic" Transformers, with LayerNorm after each sublayer, tokens grow alike layer by layer at a
linear rate, which is why they do not train when they are deep; taking the similarity out, (I − τΠ) after every block,
makes them train, nearly as well as pre-norm ones, which suppress attention's update instead. They train ViTs on
CIFAR-10 and Transformer-XL on WikiText-103."""
BLOCKS = """\
The blocks of the deepest models, as in their figures: token similarity and gradients by block (figure 1), the rate at
which attention and its residual make tokens alike, t_div(X)/t_div(Y), with ξ₁/ξ₂, by how much more the tokens' mean
grows than the rest, and the rate that |λ₂| of attention lets one expect of random weights (figures 2 and 3), and the
norms of stream and update in pre-norm models (figure 4). The estimate is this project's derivation (docs/math.md): the
paper's constants are not in our sources. Medians over images, means over seeds."""


def tables(results: Results) -> dict[str, Table]:
    return {
        "depth-accuracy": accuracy_table(results),
        "depth-differences": difference_table(results),
        "depth-blocks": block_table(results),
    }


def accuracy_table(results: Results) -> Table:
    depths = results.plan.depths
    rows: list[list[Cell]] = [
        [variant, results.plan.seeds, *(MeanStd.of(_accuracies(results, variant, depth)) for depth in depths)]
        for variant in results.variants("depth")
    ]
    columns = ["model", "n", *(f"{depth} layers" for depth in depths)]
    return Table("Test accuracy in % over depth", columns, rows, "n seeds; mean ± standard deviation.")


def difference_table(results: Results) -> Table:
    rows: list[list[Cell]] = []
    for variant in results.variants("depth"):
        for base in (POST, PRE):
            if variant != base:
                found = [_difference(results, variant, base, depth) for depth in results.plan.depths]
                rows.append([f"({variant}) − ({base})", results.plan.seeds, *map(str, found)])
    columns = ["difference", "n", *(f"{depth} layers" for depth in results.plan.depths)]
    note = "Points of accuracy, paired by seed, with the 95 % confidence interval of the mean over seeds."
    return Table("Differences of accuracy over depth", columns, rows, note)


def block_table(results: Results) -> Table:
    rows: list[list[Cell]] = []
    for variant in results.variants("depth"):
        for state in ("init", "trained"):
            curves = {name: _curve(results, variant, state, name) for name in BLOCK_METRICS}
            for block in range(results.plan.depths[-1]):
                rows.append([variant, state, block + 1, *(curve[block] for curve in curves.values())])
    caption = f"Blocks of the models with {results.plan.depths[-1]} layers: medians over images, means over seeds"
    return Table(caption, ["model", "state", "block", *BLOCK_METRICS.values()], rows)


def figures(results: Results) -> dict[str, Figure]:
    found = [
        accuracy_figure(results),
        block_figure(results, "similarity", "Token similarity by block (their figure 1)", "init"),
        block_figure(results, "similarity", "Token similarity by block after training", "trained"),
        block_figure(results, "gradient", "Gradient norm by block, before training (their figure 1)", "init"),
        rate_figure(results),
        component_figure(results),
        norms_figure(results),
    ]
    return {figure.name: figure for figure in found}


def accuracy_figure(results: Results) -> Figure:
    lines, ends = [], []
    for variant in results.variants("depth"):
        found = [MeanStd.of(_accuracies(results, variant, depth)) for depth in results.plan.depths]
        means = [each.mean for each in found]
        stds = [0.0 if math.isnan(each.std) else each.std for each in found]
        lines.append(
            Curve(
                variant, results.plan.depths, means, [m - s for m, s in zip(means, stds, strict=True)],
                [m + s for m, s in zip(means, stds, strict=True)], DOTS.get(variant, draw.UNDECIDED),
                dashed=variant not in DOTS,
            )
        )  # fmt: skip
        ends.append(f"{variant} {means[-1]:.1f}")
    return draw.line_plot(
        "depth-accuracy",
        "Depth, and de-escalation: test accuracy over the number of layers; bands: ± one deviation of the seeds",
        lines,
        x="layers",
        y="test accuracy, %",
        alt=f"Test accuracy over depth; in % with {results.plan.depths[-1]} layers: {', '.join(ends)}.",
    )


def block_figure(results: Results, metric: str, title: str, state: str) -> Figure:
    lines = [
        _line(variant, _curve(results, variant, state, metric), DOTS.get(variant), first=int(metric != "similarity"))
        for variant in results.variants("depth")
    ]
    ends = ", ".join(f"{line.label} {line.y[-1]:.3g}" for line in lines if line.y)
    return draw.line_plot(
        f"depth-{metric}-{state}",
        f"{title}, {results.plan.depths[-1]} layers",
        lines,
        x="block",
        y=BLOCK_METRICS[metric],
        log=metric == "gradient",
        alt=f"{BLOCK_METRICS[metric]} by block; at the last one: {ends}.",
    )


def rate_figure(results: Results) -> Figure:
    lines = [
        _line(f"{variant}, {word}", _curve(results, variant, "init", name), color, first=1, dashed=name == "estimate")
        for variant, color in ((POST, draw.SMOOTH), (PRE, draw.THIRD))
        for name, word in (("rate", "measured"), ("estimate", "from |λ₂|"))
    ]
    return draw.line_plot(
        "depth-escalation-rate",
        "Rate at which attention makes tokens alike, before training; dashed: estimated from |λ₂| (their figure 3)",
        lines,
        x="block",
        y="escalation rate",
        mark=1.0,
        alt=f"Escalation rate by block, measured and estimated; correlation {_agreement(results)[0]:.2f} in post-norm.",
    )


def component_figure(results: Results) -> Figure:
    lines = [
        _line(variant, _curve(results, variant, "init", "components"), color, first=1)
        for variant, color in ((POST, draw.SMOOTH), (PRE, draw.THIRD))
    ]
    return draw.line_plot(
        "depth-components",
        "ξ₁/ξ₂ before training: above 1, the tokens' mean grows more than the rest (their figure 2)",
        lines,
        x="block",
        y="ξ₁/ξ₂",
        mark=1.0,
        alt="The ratio of the growth of the tokens' mean to that of the rest, by block, in post-norm and pre-norm.",
    )


def norms_figure(results: Results) -> Figure:
    lines = [
        _line(f"{name}, {word}", _curve(results, PRE, state, name), color, first=1, dashed=state == "init")
        for name, color in (("stream", draw.SMOOTH), ("update", draw.SHARPEN))
        for state, word in (("init", "at first"), ("trained", "trained"))
    ]
    return draw.line_plot(
        "depth-norms",
        "Frobenius norms of the stream and of each block's update, pre-norm (their figure 4)",
        lines,
        x="block",
        y="Frobenius norm",
        log=True,
        alt="Norms of stream and update by block in the pre-norm model, before and after training.",
    )


def findings(results: Results) -> list[Finding]:
    shallow, deep = results.plan.depths[0], results.plan.depths[-1]
    worse = Difference.of(_accuracies(results, POST, shallow), _accuracies(results, POST, deep))
    rescue, gap = (_difference(results, RESCUED, base, deep) for base in (POST, PRE))
    similarity = Difference.of(_ends(results, POST, "similarity", -1), _ends(results, POST, "similarity", 0))
    first = {v: [math.log10(max(g, 1e-45)) for g in _ends(results, v, "gradient", 0)] for v in (POST, RESCUED)}
    agreement = _agreement(results)
    shrinking = [_update_share(m, 0) - _update_share(m, -1) for m in results.select("depth", PRE, depth=deep)]
    zero = [0.0] * results.plan.seeds
    return [
        finding(f"Post-norm with {deep} layers is worse than with {shallow}", SOURCE, worse),
        finding(f"De-escalation (τ = 1) makes post-norm with {deep} layers better", SOURCE, rescue),
        finding(f"... and brings it to within {CLOSE:g} points of pre-norm", SOURCE, gap, above=-CLOSE),
        finding("Token similarity rises from the first to the last block of untrained post-norm models", SOURCE,
                similarity, unit=""),
        finding("De-escalation makes the gradients of the first block larger, before training", SOURCE,
                Difference.of(first[RESCUED], first[POST]), unit="decades"),
        finding("The rate estimated from |λ₂| follows the measured one from block to block", SOURCE,
                Difference.of(agreement, zero), unit="(correlation)"),
        finding("In trained pre-norm models the last update is smaller, relative to the stream, than the first", SOURCE,
                Difference.of(shrinking, zero), unit="decades"),
    ]  # fmt: skip


def sections(results: Results, tables: dict[str, Table], figures: dict[str, Figure]) -> list[Section]:
    names = [name for name in figures if name.startswith("depth-") and name in _FIGURES]
    return [
        Section(
            "Depth",
            [WORDS, BLOCKS],
            [figures[name] for name in names],
            [tables["depth-accuracy"], tables["depth-differences"]],
        )
    ]


_FIGURES = (
    "depth-similarity-init", "depth-similarity-trained", "depth-gradient-init", "depth-escalation-rate",
    "depth-components", "depth-norms",
)  # fmt: skip


def _accuracies(results: Results, variant: str, depth: int) -> list[float]:
    return results.accuracies("depth", variant, depth=depth)


def _difference(results: Results, variant: str, base: str, depth: int) -> Difference:
    return Difference.of(_accuracies(results, variant, depth), _accuracies(results, base, depth))


def _blocks(results: Results, variant: str, state: str, metric: str) -> list[list[float]]:
    """Of the deepest models: a list by block for every seed."""
    return [m[state][metric] for m in results.select("depth", variant, depth=results.plan.depths[-1])]


def _curve(results: Results, variant: str, state: str, metric: str) -> list[float]:
    return [statistics.fmean(values) for values in zip(*_blocks(results, variant, state, metric), strict=True)]


def _ends(results: Results, variant: str, metric: str, place: int) -> list[float]:
    return [blocks[place] for blocks in _blocks(results, variant, "init", metric)]


def _agreement(results: Results) -> list[float]:
    """The correlation of measured and estimated rate over blocks, before training, for every seed."""
    pairs = zip(*(_blocks(results, POST, "init", name) for name in ("rate", "estimate")), strict=True)
    return [statistics.correlation(measured, estimated) for measured, estimated in pairs]


def _update_share(measures: dict, block: int) -> float:
    """log₁₀ of a block's update relative to the stream, after training."""
    return math.log10(measures["trained"]["update"][block] / measures["trained"]["stream"][block])


def _line(label: str, values: Sequence[float], color: str | None, *, first: int, dashed: bool = False) -> Curve:
    """Without what is not finite: a rate is not where tokens have no mean left."""
    points = [(first + place, value) for place, value in enumerate(values) if math.isfinite(value)]
    return Curve(label, [x for x, _ in points], [y for _, y in points], color=color, dashed=dashed)
