"""The figures of an `Analysis`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from overtone.analysis.measure import METRICS
from overtone.report import figures as draw
from overtone.report.figures import Curve, Figure, Region

if TYPE_CHECKING:
    from overtone.analysis.result import Analysis

# Spectra of A over which the shares of the plane are counted, and the plane's points along each side.
MAX_SPECTRA, GRID_POINTS = 60, 81


def all_figures(analysis: Analysis) -> list[Figure]:
    """All figures, in the page's order."""
    return [*_depth_figures(analysis), *_dominance_figures(analysis), *_attention_figures(analysis), *_heads(analysis)]


def _depth_figures(analysis: Analysis) -> list[Figure]:
    def over_depth(name: str, *metrics: str, log: bool = False) -> Figure:
        lines = [_band(METRICS[metric], analysis.curve(metric)) for metric in metrics]
        label = " and ".join(METRICS[metric] for metric in metrics)
        first, last = (_list(analysis.curve(metrics[0]).double().mean(1))[i] for i in (0, -1))
        alt = f"{METRICS[metrics[0]]} over depth: from {first:.3g} before the first layer to {last:.3g} after the last."
        y = METRICS[metrics[0]] if len(metrics) == 1 else ""
        title = f"{label[0].upper()}{label[1:]} over depth"
        return draw.line_plot(name, title, lines, x="layer", y=y, alt=alt, log=log)

    rates = torch.stack([layer.escalation for layer in analysis.layers])
    above = int((rates.double().mean(1) > 1).sum())
    escalation = draw.line_plot(
        "escalation",
        "Escalation rate of every layer: above one, it makes tokens more similar",
        [_band("escalation rate", rates, start=1)],
        x="layer",
        y="escalation rate",
        mark=1.0,
        alt=f"Escalation rate per layer; {above} of {len(rates)} layers are above one and make tokens more similar.",
    )
    return [
        over_depth("ratio", "ratio", log=True),
        over_depth("cosine", "cosine"),
        over_depth("rank", "effective_rank", "stable_rank"),
        over_depth("similarity", "similarity", "diversity"),
        escalation,
    ]


def _band(label: str, values: Tensor, start: int = 0) -> Curve:
    """The mean over samples [depth, B], and where 80 % of them are."""
    values = values.double()
    low, high = (values.nanquantile(q, dim=1) for q in (0.1, 0.9))
    depth = range(start, start + len(values))
    return Curve(label, list(depth), _list(values.nanmean(1)), _list(low), _list(high))


def _list(values: Tensor) -> list[float]:
    return values.tolist()


def _dominance_figures(analysis: Analysis) -> list[Figure]:
    rows = {}
    for place, layer in enumerate(analysis.layers, start=1):
        counts, cases = layer.dominance.counts(), layer.dominance.verdict.numel()
        rows[str(place)] = {verdict: counts[verdict] / cases for verdict in ("perron", "other")}
    perron, total = analysis.verdicts()["perron"], sum(analysis.verdicts().values())
    weights = [layer.weight_eigenvalues.flatten() for layer in analysis.layers]
    every = torch.cat(weights).numpy()
    negative = 100 * float((every.real < 0).mean())
    return [
        draw.verdict_bars(
            "dominance",
            "Share of cases by verdict, layer by layer",
            rows,
            y="layer",
            alt=f"Bars per layer: the Perron eigenvalue dominates in {perron} of {total} cases.",
        ),
        draw.complex_plane(
            "weight-plane",
            "Eigenvalues of the heads' weights over the regions where they smooth (orange) or do not (blue)",
            {"λ of H": every},
            x="Re λ",
            y="Im λ",
            region=_smoothing_region(analysis, every),
            alt=f"{len(every)} eigenvalues of the weights in the complex plane; {negative:.3g} % left of zero.",
        ),
        draw.histograms(
            "weight-histogram",
            "Real parts of the weights' eigenvalues, layer by layer; below zero blue",
            {str(place): values.real.numpy() for place, values in enumerate(weights, start=1)},
            x="Re λ of H",
            y="layer",
            marks=(0.0,),
            alt=f"A histogram per layer of the real parts of the weights' eigenvalues; {negative:.3g} % are negative.",
        ),
    ]


def _smoothing_region(analysis: Analysis, weights: np.ndarray) -> Region:
    """For every λ of the plane: with which share of the attention matrices |1 + λ| is above every |1 + λ z|.

    |1 + λ| is what equal tokens grow by; a method may change that (see update.py).
    """
    side = 1.15 * max(1e-6, float(np.abs(weights.real).max()), float(np.abs(weights.imag).max()))
    axis = torch.linspace(-side, side, GRID_POINTS, dtype=torch.float64)
    grid = torch.complex(axis[None, :].expand(GRID_POINTS, -1), axis[:, None].expand(-1, GRID_POINTS))
    spectra = [
        (layer.update, spectrum)
        for layer in analysis.layers
        for spectrum in layer.attention_eigenvalues.flatten(0, 1)
        if spectrum.isfinite().all()
    ]
    spectra = spectra[:: max(1, -(-len(spectra) // MAX_SPECTRA))]
    smooths = torch.zeros(GRID_POINTS, GRID_POINTS, dtype=torch.float64)
    for update, spectrum in spectra:
        others = torch.ones(GRID_POINTS, GRID_POINTS, dtype=torch.float64) * -math.inf
        for value in _outermost(spectrum[1:]):
            others = torch.maximum(others, (1 + grid * value).abs())
        smooths += (update.of_equal_tokens((1 + grid).abs()) > others).double()
    share = (smooths / max(1, len(spectra))).numpy()
    return Region(share, (-side, side, -side, side), "share of attention that smooths")


def _outermost(values: Tensor) -> list[complex]:
    """The largest value in each of 32 directions: |1 + λz| has its maximum at a corner of the convex hull."""
    if not len(values):
        return []
    angles = torch.arange(32, dtype=torch.float64) * (2 * math.pi / 32)
    directions = torch.polar(torch.ones_like(angles), -angles)
    corners = (values.to(torch.complex128) * directions[:, None]).real.argmax(-1).unique()
    return values[corners].tolist()


def _attention_figures(analysis: Analysis) -> list[Figure]:
    spectra = torch.cat([layer.attention_eigenvalues.flatten(0, 1)[:, 1:].flatten() for layer in analysis.layers])
    second = 1 - torch.cat([layer.gap.flatten() for layer in analysis.layers])
    middle = float(second.nanmedian())
    plane = draw.complex_plane(
        "attention-plane",
        "Eigenvalues of the attention matrices, all layers and heads, the Perron ones left out",
        {"λ of A": spectra.numpy()},
        x="Re λ",
        y="Im λ",
        unit_circle=True,
        alt=f"Eigenvalues of attention inside the unit circle; the second largest modulus has the median {middle:.3g}.",
    )
    return [plane, _head_map(analysis, "gap", "Spectral gap 1 − |λ₂| of attention", "spectral gap")]


def _heads(analysis: Analysis) -> list[Figure]:
    return [
        _head_map(analysis, "margin", "Margin of dominance: orange smooths, blue does not", "margin", diverging=True),
        _head_map(analysis, "head-ratio", "‖HFC‖/‖LFC‖ of the heads' outputs A V", "‖HFC‖/‖LFC‖"),
        _head_map(analysis, "head-rank", "Effective rank of the heads' outputs A V", "effective rank"),
    ]


def _head_map(analysis: Analysis, name: str, title: str, bar: str, diverging: bool = False) -> Figure:
    sources = {
        "gap": lambda layer: layer.gap,
        "margin": lambda layer: layer.dominance.margin,
        "head-ratio": lambda layer: layer.heads["ratio"],
        "head-rank": lambda layer: layer.heads["effective_rank"],
    }
    rows = [sources[name](layer).double().nanmean(0).numpy() for layer in analysis.layers]
    values = np.full((len(rows), max(map(len, rows))), np.nan)
    for place, row in enumerate(rows):
        values[place, : len(row)] = row
    finite = values[np.isfinite(values)]
    span = f"between {finite.min():.3g} and {finite.max():.3g}" if finite.size else "not finite"
    alt = f"{title}: a map of {values.shape[0]} layers by {values.shape[1]} heads, {span}."
    return draw.heat_map(name, title, values, x="head", y="layer", bar=bar, alt=alt, diverging=diverging)
