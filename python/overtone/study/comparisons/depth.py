"""Depth: post-norm, post-norm with de-escalation, and pre-norm, beside what Yu and Zhang say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from overtone.report import figures as draw
from overtone.report.figures import Curve, Figure
from overtone.report.page import Section
from overtone.report.table import NONE, Cell, Table
from overtone.study.escalation import BLOCK_METRICS
from overtone.study.plan import FASTER
from overtone.study.results import Results
from overtone.study.stats import Difference, Finding, MeanStd, finding

SOURCE = "Yu and Zhang"
POST, PRE, RESCUED = "post-norm", "pre-norm", "post-norm, τ = 1"
# De-escalated post-norm counts as close to pre-norm if it is at most so many points of accuracy below it.
CLOSE = 5.0
# The deepest only: other strengths, and the learning rate times FASTER.
DEEPEST = ("post-norm, τ = 0.1", "post-norm, τ = 0.5")
COLORS = {
    POST: draw.SMOOTH,
    RESCUED: draw.SHARPEN,
    PRE: draw.THIRD,
    DEEPEST[0]: draw.UNDECIDED,
    DEEPEST[1]: draw.FOURTH,
}
# Of models with random weights, as at_init names them.
CLASSIC = {"post": POST, "de-escalated": RESCUED, "pre": PRE}

WORDS = """\
Yu and Zhang: in "classic" Transformers, with LayerNorm after each sublayer, tokens grow alike layer by layer at a
linear rate, which is why they do not train when they are deep; taking the similarity out, (I − τΠ) after every block,
makes them train, nearly as well as pre-norm ones, which suppress attention's update instead. They train ViTs on
CIFAR-10 and Transformer-XL on WikiText-103. Here all variants have one learning rate, chosen on validation images for
all of them together; the deepest are also trained at a higher one, which is where they part."""
BLOCKS = """\
As in their figures, by block. Before training, noise through classic models with Xavier's weights: gradients (figure
1), the rate t_div(X)/t_div(Y) at which attention and its residual make tokens alike with ξ₁/ξ₂, by how much more the
tokens' mean grows than the rest, and the rate that |λ₂| of attention lets one expect of random weights (figures 2 and
3); token similarity is below, with de-escalation. After training, the deepest models of the table: token similarity,
and the norms of stream and update in pre-norm (figure 4). The estimate is this project's derivation (docs/math.md): the
paper's constants are not in our sources. Medians over images, means over seeds."""


def tables(results: Results) -> dict[str, Table]:
    return {
        "depth-accuracy": accuracy_table(results),
        "depth-differences": difference_table(results),
        "depth-blocks": block_table(results),
    }


def accuracy_table(results: Results) -> Table:
    depths = results.plan.depths
    rows: list[list[Cell]] = []
    for variant in results.variants("depth"):
        found = [_accuracies(results, variant, depth) for depth in depths]
        rows.append([variant, results.plan.seeds, *(MeanStd.of(values) if values else NONE for values in found)])
    columns = ["model", "n", *(f"{depth} layers" for depth in depths)]
    rate = next(run.config.optim.learning_rate for run in results.plan.runs_of("depth"))
    note = f"n seeds; mean ± standard deviation. The learning rate is {rate:g}; {FASTER} × rate is {FASTER} times that."
    return Table("Test accuracy in % over depth", columns, rows, note)


def difference_table(results: Results) -> Table:
    rows: list[list[Cell]] = []
    for suffix in ("", f", {FASTER} × rate"):
        for variant, base in ((RESCUED, POST), (RESCUED, PRE), (POST, PRE)):
            first, second = variant + suffix, base + suffix
            found = [
                str(_difference(results, first, second, depth)) if _accuracies(results, first, depth) else NONE
                for depth in results.plan.depths
            ]
            rows.append([f"({first}) − ({second})", results.plan.seeds, *found])
    columns = ["difference", "n", *(f"{depth} layers" for depth in results.plan.depths)]
    note = "Points of accuracy, paired by seed, with the 95 % confidence interval of the mean over seeds."
    return Table("Differences of accuracy over depth", columns, rows, note)


def block_table(results: Results) -> Table:
    sources = {(f"{label}, random weights", ""): results.untrained.blocks[name] for name, label in CLASSIC.items()}
    for variant in results.variants("depth"):
        found = results.select("depth", variant, depth=results.plan.depths[-1])
        sources |= {(variant, state): [m[state] for m in found] for state in ("init", "trained")}
    rows: list[list[Cell]] = []
    for (label, state), seeds in sources.items():
        curves = [_means(seeds, name) for name in BLOCK_METRICS]
        for block, values in enumerate(zip(*(curve[-len(curves[-1]) :] for curve in curves), strict=True), 1):
            rows.append([label, state or NONE, block, *values])
    caption = "By block: medians over images, means over seeds; token similarity is that after the block"
    return Table(caption, ["model", "state", "block", *BLOCK_METRICS.values()], rows)


def figures(results: Results) -> dict[str, Figure]:
    found = [
        accuracy_figure(results),
        gradient_figure(results),
        rate_figure(results),
        component_figure(results),
        similarity_figure(results),
        norms_figure(results),
    ]
    return {figure.name: figure for figure in found}


def accuracy_figure(results: Results) -> Figure:
    depths, lines, ends = results.plan.depths, [], []
    for suffix, dashed in (("", False), (f", {FASTER} × rate", True)):
        for variant in (POST, RESCUED, PRE):
            places = [depth for depth in depths if _accuracies(results, variant + suffix, depth)]
            found = [MeanStd.of(_accuracies(results, variant + suffix, depth)) for depth in places]
            low, high = ([m.mean + sign * (0.0 if math.isnan(m.std) else m.std) for m in found] for sign in (-1, 1))
            means = [m.mean for m in found]
            lines.append(Curve(variant + suffix, places, means, low, high, COLORS[variant], dashed))
            ends.append(f"{variant}{suffix} {means[-1]:.1f}")
    return draw.line_plot(
        "depth-accuracy",
        "Depth, with and without de-escalation: test accuracy; bands: ± one deviation of the seeds",
        lines,
        x="layers",
        y="test accuracy, %",
        alt=f"Test accuracy over depth; in % with {depths[-1]} layers: {', '.join(ends)}.",
    )


def gradient_figure(results: Results) -> Figure:
    lines = [_line(label, _classic(results, name, "gradient"), COLORS[label]) for name, label in CLASSIC.items()]
    ends = ", ".join(f"{line.label} {line.y[0]:.3g}" for line in lines)
    return draw.line_plot(
        "depth-gradient",
        "Gradient norm by block with random weights (their figure 1)",
        lines,
        x="block",
        y=BLOCK_METRICS["gradient"],
        log=True,
        alt=f"Gradient norms by block; of the first one: {ends}.",
    )


def rate_figure(results: Results) -> Figure:
    lines = [
        _line(
            f"{CLASSIC[norm]}, {word}", _classic(results, norm, name), COLORS[CLASSIC[norm]], dashed=name == "estimate"
        )
        for norm in ("post", "pre")
        for name, word in (("rate", "measured"), ("estimate", "from |λ₂|"))
    ]
    return draw.line_plot(
        "depth-escalation-rate",
        "Rate at which attention makes tokens alike, random weights; dashed: estimated from |λ₂| (their figure 3)",
        lines,
        x="block",
        y="escalation rate",
        mark=1.0,
        alt=f"Escalation rate by block, measured and estimated; correlation {_agreement(results)[0]:.2f} in post-norm.",
    )


def component_figure(results: Results) -> Figure:
    lines = [
        _line(CLASSIC[norm], _classic(results, norm, "components"), COLORS[CLASSIC[norm]]) for norm in ("post", "pre")
    ]
    return draw.line_plot(
        "depth-components",
        "ξ₁/ξ₂ with random weights: above 1, the tokens' mean grows more than the rest (their figure 2)",
        lines,
        x="block",
        y="ξ₁/ξ₂",
        mark=1.0,
        alt="The ratio of the growth of the tokens' mean to that of the rest, by block, in post-norm and pre-norm.",
    )


def similarity_figure(results: Results) -> Figure:
    lines = [
        _line(variant, _curve(results, variant, "trained", "similarity"), color, first=0)
        for variant, color in COLORS.items()
    ]
    ends = ", ".join(f"{line.label} {line.y[-1]:.3g}" for line in lines)
    return draw.line_plot(
        "depth-similarity-trained",
        f"Token similarity by block after training, {results.plan.depths[-1]} layers",
        lines,
        x="block",
        y=BLOCK_METRICS["similarity"],
        alt=f"Token similarity by block after training; at the last one: {ends}.",
    )


def norms_figure(results: Results) -> Figure:
    lines = [
        _line(f"{name}, {word}", _curve(results, PRE, state, name), color, dashed=state == "init")
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
    fast = f", {FASTER} × rate"
    worse = Difference.of(_accuracies(results, POST, shallow), _accuracies(results, POST, deep))
    classic = results.untrained.blocks
    similarity = [m["similarity"][-1] - m["similarity"][0] for m in classic["post"]]
    gradients = [[math.log10(max(m["gradient"][0], 1e-45)) for m in classic[name]] for name in ("de-escalated", "post")]
    shrinking = [_update_share(m, 0) - _update_share(m, -1) for m in results.select("depth", PRE, depth=deep)]
    zero = [0.0] * results.plan.seeds
    return [
        finding(f"Post-norm with {deep} layers is worse than with {shallow}", SOURCE, worse),
        finding(f"De-escalation (τ = 1) makes post-norm with {deep} layers better", SOURCE,
                _difference(results, RESCUED, POST, deep)),
        finding(f"... also at {FASTER} times the learning rate", SOURCE,
                _difference(results, RESCUED + fast, POST + fast, deep)),
        finding(f"... and brings it to within {CLOSE:g} points of pre-norm", SOURCE,
                _difference(results, RESCUED, PRE, deep), above=-CLOSE),
        finding("With random weights, post-norm blocks raise token similarity from the first to the last",
                SOURCE, Difference.of(similarity, zero), unit=""),
        finding("With random weights, de-escalation makes the gradients of the first block larger", SOURCE,
                Difference.of(*gradients), unit="decades"),
        finding("With random weights, the rate estimated from |λ₂| follows the measured one over blocks", SOURCE,
                Difference.of(_agreement(results), zero), unit="(correlation)"),
        finding("In trained pre-norm models the last update is smaller, relative to the stream, than the first", SOURCE,
                Difference.of(shrinking, zero), unit="decades"),
    ]  # fmt: skip


def sections(results: Results, tables: dict[str, Table], figures: dict[str, Figure]) -> list[Section]:
    names = ("gradient", "escalation-rate", "components", "similarity-trained", "norms")
    pictures = [figures[f"depth-{name}"] for name in names]
    return [Section("Depth", [WORDS, BLOCKS], pictures, [tables["depth-accuracy"], tables["depth-differences"]])]


def _accuracies(results: Results, variant: str, depth: int) -> list[float]:
    return results.accuracies("depth", variant, depth=depth)


def _difference(results: Results, variant: str, base: str, depth: int) -> Difference:
    return Difference.of(_accuracies(results, variant, depth), _accuracies(results, base, depth))


def _means(seeds: Sequence[dict], metric: str) -> list[float]:
    return [statistics.fmean(values) for values in zip(*(m[metric] for m in seeds), strict=True)]


def _curve(results: Results, variant: str, state: str, metric: str) -> list[float]:
    """By block of the deepest models."""
    return _means([m[state] for m in results.select("depth", variant, depth=results.plan.depths[-1])], metric)


def _classic(results: Results, name: str, metric: str) -> list[float]:
    """By block of models with random weights."""
    return _means(results.untrained.blocks[name], metric)


def _agreement(results: Results) -> list[float]:
    """The correlation of measured and estimated rate over blocks of random post-norm models, for every seed."""
    return [statistics.correlation(m["rate"], m["estimate"]) for m in results.untrained.blocks["post"]]


def _update_share(measures: dict, block: int) -> float:
    """log₁₀ of a block's update relative to the stream, after training."""
    return math.log10(measures["trained"]["update"][block] / measures["trained"]["stream"][block])


def _line(label: str, values: Sequence[float], color: str | None, *, first: int = 1, dashed: bool = False) -> Curve:
    """Without what is not finite: a rate is not where tokens have no mean left."""
    points = [(first + place, value) for place, value in enumerate(values) if math.isfinite(value)]
    return Curve(label, [x for x, _ in points], [y for _, y in points], color=color, dashed=dashed)
