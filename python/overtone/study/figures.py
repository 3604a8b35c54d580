"""The study's figures."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overtone.analysis import METRICS
from overtone.report import figures as draw
from overtone.report.figures import COLORS, Curve, Figure
from overtone.study import papers
from overtone.study.comparisons import chosen
from overtone.study.corruptions import SEVERITIES, STRENGTHS, corrupted
from overtone.study.plan import FRACTIONS, REGIMES
from overtone.study.results import Results, share_of
from overtone.study.stats import MeanStd
from overtone.training import load_data


def all_figures(results: Results) -> dict[str, Figure]:
    """By the name of their PNG file."""
    figures = [
        dominance(results),
        eigenvalues(results),
        less_data(results),
        corruptions(results),
        corrupted_examples(results),
        *(over_depth(results, metric) for metric in ("ratio", "cosine", "effective_rank", "similarity")),
        *(norm_signs(results, norm) for norm in ("pre", "post")),
        similarity(results),
        de_escalation(results),
    ]
    others = {name: figure for module in chosen(results) for name, figure in module.figures(results).items()}
    return {figure.name: figure for figure in figures} | others


def dominance(results: Results) -> Figure:
    base = results.untrained.vit_base
    rows = {"ViT-B/16, random": {verdict: share_of(base, verdict) / 100 for verdict in ("perron", "other")}}
    for regime, label in REGIMES.items():
        for state, word in (("init", "at first"), ("trained", "trained")):
            shares = {verdict: results.share(regime, state, verdict).mean / 100 for verdict in ("perron", "other")}
            rows[f"{label}, {word}"] = shares
    free = results.share("free", "trained", "perron").mean
    return draw.verdict_bars(
        "dominance",
        "Table 1 as a picture: who dominates, in which share of the cases",
        rows,
        y="",
        alt=f"Bars: the Perron eigenvalue dominates in {free:.3g} % of the trained ViT's cases.",
    )


def eigenvalues(results: Results) -> Figure:
    groups = {"ViT, at first": results.eigenvalues("free", "init").real}
    groups |= {f"{label}, trained": results.eigenvalues(r, "trained").real for r, label in REGIMES.items()}
    negative = 100 * float((results.eigenvalues("free", "trained").real < 0).mean())
    return draw.histograms(
        "eigenvalues",
        "Real parts of the eigenvalues of H, all layers, heads and seeds; below zero blue",
        groups,
        x="Re λ of H",
        y="",
        marks=(0.0, -1.0),
        alt=f"Histograms: {negative:.3g} % of the trained ViT's eigenvalues are negative, all of ViT⁻'s, no ViT⁺'s.",
    )


def less_data(results: Results) -> Figure:
    lines = []
    for regime, label in REGIMES.items():
        spreads = [results.accuracy(regime, fraction) for fraction in FRACTIONS]
        lines.append(_curve(label, [100 * fraction for fraction in FRACTIONS], spreads, COLORS[regime]))
    return draw.line_plot(
        "less-data",
        "Test accuracy over the share of the training data; bands: ± one deviation of the seeds",
        lines,
        x="% of the training data",
        y="test accuracy, %",
        alt="Test accuracy of the three models with 10, 50 and 100 % of the data; Table 2 has the numbers.",
    )


def corruptions(results: Results) -> Figure:
    severities = (0, *SEVERITIES)
    lines = []
    for regime, label in REGIMES.items():
        spreads = [results.corrupted(regime, severity) for severity in severities]
        lines.append(_curve(label, severities, spreads, COLORS[regime]))
        paper = [papers.CORRUPTED[regime][severity] for severity in severities]
        lines.append(Curve(f"{label}, paper", severities, paper, color=COLORS[regime], dashed=True))
    return draw.line_plot(
        "corruptions",
        "Test accuracy over the severity of corruption; dashed: the paper's, on CIFAR-100",
        lines,
        x="severity",
        y="test accuracy, %",
        alt="Test accuracy of the three models falls with the severity of corruption; Table 3 has the numbers.",
    )


def corrupted_examples(results: Results) -> Figure:
    """One test image under everything."""
    image = load_data(results.plan.config).test.images(torch.tensor([0]))
    columns = ["none", *map(str, SEVERITIES)]
    rows = {
        kind: [_pixels(image), *(_pixels(corrupted(image, kind, severity)) for severity in SEVERITIES)]
        for kind in STRENGTHS
    }
    return draw.image_grid(
        "corrupted-examples",
        "A test image under every corruption, from none to severity 5",
        rows,
        columns=columns,
        alt=f"One test image under {', '.join(STRENGTHS)}, at five severities.",
    )


def _pixels(image: torch.Tensor):
    """[1, c, h, w] as matplotlib takes it."""
    return image[0, 0].numpy() if image.shape[1] == 1 else image[0].permute(1, 2, 0).numpy()


def over_depth(results: Results, metric: str) -> Figure:
    lines, ends = [], []
    for regime, label in REGIMES.items():
        for state in ("trained", "init"):
            spreads = results.curve(regime, state, metric)
            name = label if state == "trained" else f"{label} at first"
            lines.append(_curve(name, range(len(spreads)), spreads, COLORS[regime], dashed=state == "init"))
            ends += [f"{label} {spreads[-1].mean:.3g}"] if state == "trained" else []
    name = METRICS[metric]
    return draw.line_plot(
        f"depth-{metric.replace('_', '-')}",
        f"{name[0].upper()}{name[1:]} over depth: trained, and dashed at first",
        lines,
        x="layer",
        y=name,
        log=metric == "ratio",
        alt=f"{name} over depth; after the last layer of the trained models: {', '.join(ends)}.",
    )


def norm_signs(results: Results, norm: str) -> Figure:
    lines = []
    ends = []
    for regime in ("smooth", "sharpen"):
        for sign in (1, -1):
            curve = results.untrained.norm_signs[norm, regime, sign]
            label = f"{regime}, LayerNorm {'+' if sign == 1 else '−'}"
            lines.append(Curve(label, range(len(curve)), curve, color=COLORS[regime], dashed=sign == -1))
            ends.append(f"{label} {curve[-1]:.3g}")
    what = "a negative sign swaps the two" if norm == "pre" else "the sign changes nothing"
    return draw.line_plot(
        f"norm-sign-{norm}",
        f"LayerNorm {'before' if norm == 'pre' else 'after'} attention ({norm}-norm): {what}",
        lines,
        x="layer",
        y=METRICS["ratio"],
        log=True,
        alt=f"HFC/LFC over twelve layers of attention, {norm}-norm; at the end: {', '.join(ends)}.",
    )


def similarity(results: Results) -> Figure:
    curves = results.untrained.similarity
    lines = [Curve(f"{norm}-norm", range(len(curve)), curve) for norm, curve in curves.items()]
    ends = ", ".join(f"{norm}-norm {curve[-1]:.3g}" for norm, curve in curves.items())
    return draw.line_plot(
        "similarity-at-first",
        "Token similarity over depth with random weights (as figure 1 of Yu and Zhang)",
        lines,
        x="layer",
        y=METRICS["similarity"],
        alt=f"Token similarity of untrained models rises with depth, to {ends}.",
    )


def de_escalation(results: Results) -> Figure:
    curves = {"none": results.untrained.similarity["post"]}
    curves |= {f"τ = {tau:g}": curve for tau, curve in results.untrained.de_escalated.items()}
    lines = [Curve(label, range(len(curve)), curve) for label, curve in curves.items()]
    ends = ", ".join(f"{label} {curve[-1]:.2g}" for label, curve in curves.items())
    return draw.line_plot(
        "de-escalation",
        "Token similarity with de-escalation after every block, post-norm (as figure 5 of Yu and Zhang)",
        lines,
        x="layer",
        y=METRICS["similarity"],
        alt=f"Token similarity after the last layer by strength of de-escalation: {ends}.",
    )


def _curve(label: str, x: Sequence[float], spreads: list[MeanStd], color: str, dashed: bool = False) -> Curve:
    """Means, and a band of one deviation where it is known."""
    means = [spread.mean for spread in spreads]
    if any(spread.std != spread.std for spread in spreads):
        return Curve(label, x, means, color=color, dashed=dashed)
    low, high = ([spread.mean + sign * spread.std for spread in spreads] for sign in (-1, 1))
    return Curve(label, x, means, low, high, color, dashed)
