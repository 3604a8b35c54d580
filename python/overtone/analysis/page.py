"""The page of an `Analysis`: what it says in words, around its figures and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overtone.analysis.words import measured, percent, predicted
from overtone.report.page import Page, Section

if TYPE_CHECKING:
    from overtone.analysis.result import Analysis
    from overtone.report.figures import Figure

TOKENS = """\
The tokens of every layer split into their mean (low frequency, LFC) and the rest (high frequency, HFC). Where the ratio
of their norms falls towards zero, the cosine between tokens rises to one or the rank drops to one, the tokens become
equal. Lines are means over samples, bands hold 80 % of them."""
WHY = """\
If a layer's attention A and weight H were repeated for ever, tokens would be a sum of terms (1 + λᴴλᴬ)ᴸ. If the
largest belongs to A's Perron eigenvalue, 1, whose eigenvector is the same for all tokens, they become equal; if it
belongs to another eigenvalue, they do not. With centered attention equal tokens pass unchanged, with de-escalation they
are multiplied by 1 − τ: the verdict is on that. It is a prediction from A and H; what else acts between the tokens is
not in it, and the figures above show what was measured. A case is one sample, layer and head. Every verdict has a
certificate: its margin is larger than the bound on the margin's error."""
PLANE = """\
In the plane of λᴴ, orange is where a single eigenvalue smooths with most of this model's attention matrices, blue where
it does not; the dots are the eigenvalues of the model's weights."""
ATTENTION = """\
All lie in the unit disk; 1 is the Perron eigenvalue. The spectral gap 1 − |λ₂| says how fast attention alone would
average tokens: near one, in a single layer; near zero, hardly ever."""
HEADS = "Rows are layers, columns heads; each cell is a mean over samples."
CERTIFICATES = """\
A verdict rests on bounds: a disk that encloses A's eigenvalues, from norms of its powers, or eigenvalues with their
condition numbers. Where the two sides are equal, or closer than the bound, the case is undecided and is counted as
such. Norms are Frobenius norms."""
SOURCES = "Dovonon, Bronstein, Kusner, arXiv 2401.04301; Yu, Zhang, arXiv 2312.06182"


def page(analysis: Analysis, figures: list[Figure]) -> Page:
    """The whole report, from its figures."""
    counts = analysis.verdicts()
    cases = sum(counts.values())
    undecided = cases - counts["perron"] - counts["other"]
    ratio = analysis.curve("ratio").double().mean(1).tolist()
    layers = analysis.layers
    return Page(
        title=f"Does {analysis.name} oversmooth?",
        summary=f"{analysis.subject} {measured(analysis)} {predicted(analysis)}",
        key_figures=[
            (
                f"{ratio[0]:.3g} → {ratio[-1]:.3g}",
                "measured: ‖HFC‖/‖LFC‖ of the tokens, before the first to after the last layer",
            ),
            (percent(counts["perron"], cases), "of cases: by eigenvalues alone, equal tokens win (Perron)"),
            (percent(counts["other"], cases), "of cases: by eigenvalues alone, they do not"),
            (percent(undecided, cases), "of cases: undecided, counted by reason below"),
            (f"{len(layers)} × {layers[0].gap.shape[1]}", "layers × heads"),
            (f"{analysis.samples}", f"{analysis.unit} of {layers[0].tokens} tokens"),
        ],
        sections=sections(analysis, figures),
        footer=f"Written by overtone. The mathematics is that of {SOURCES}.",
    )


def sections(analysis: Analysis, figures: list[Figure]) -> list[Section]:
    """The parts of the report."""
    by_name = {figure.name: figure for figure in figures}
    tables = analysis.tables()

    def pick(*names: str) -> list[Figure]:
        return [by_name[name] for name in names]

    return [
        Section("What happens to the tokens", [TOKENS], pick("ratio", "cosine", "rank", "similarity", "escalation")),
        Section(
            "Why: which eigenvalue dominates",
            [WHY, PLANE],
            pick("dominance", "weight-plane", "weight-histogram"),
            [tables["dominance"]],
        ),
        Section("Attention's own eigenvalues", [ATTENTION], pick("attention-plane", "gap")),
        Section("Head by head", [HEADS], pick("margin", "head-ratio", "head-rank")),
        Section("All numbers", tables=[tables["layers"], tables["heads"]], collapsed=True),
        Section("How it was measured", _method(analysis)),
    ]


def _method(analysis: Analysis) -> list[str]:
    causal = " Attention is causal: its eigenvalues are its diagonal." if analysis.layers[0].is_causal else ""
    kinds = ", ".join(sorted({layer.reader for layer in analysis.layers}))
    return [
        analysis.subject,
        f"{analysis.samples} {analysis.unit} ran through the model. Its attention was read as {kinds}, each matrix as "
        f"it was computed.{causal} H is W_V W_proj, per head its non-zero part W_proj W_V; LayerNorm's weights are not "
        "in it. Layers and heads are counted from 1.",
        CERTIFICATES,
        *(f"Not read: {name}: {why}." for name, why in analysis.skipped.items()),
    ]
