"""The study's page: what it says in words, around its tables and figures."""

from __future__ import annotations

from overtone.report.figures import Figure
from overtone.report.page import Page, Section
from overtone.report.table import Table
from overtone.study import papers
from overtone.study.comparisons import chosen
from overtone.study.corruptions import SEVERITIES, STRENGTHS
from overtone.study.plan import FRACTIONS, REGIMES
from overtone.study.results import Results
from overtone.study.tables import ranking

# The pictures a newcomer remembers, which come first.
LEAD = ("depth-ratio", "depth-accuracy", "text")
OVER_DEPTH = ("cosine", "effective-rank", "similarity")
ALL = ("runs", "depth", "depth-blocks", "untrained")

VERDICTS = """\
What the papers prove must come out, whatever the data, and is the second table. What they found by experiment may come
out, may not, or may stay undecided with so few seeds of small models on small data: the first table says which."""
IDEA = """\
A layer of a Transformer adds attention times a weight H to its tokens. If A and H were repeated for ever, tokens would
be a sum of terms (1 + λᴴλᴬ)ᴸ. Where the largest belongs to A's Perron eigenvalue, 1, whose eigenvector is the same for
all tokens, they become equal: oversmoothing. ViT has ordinary weights; ViT⁺ has H = VΛVᵀ with positive eigenvalues,
which always smooths; ViT⁻ has eigenvalues in [−1, 0), which never does."""
TOKENS = """\
Tokens split into their mean (LFC) and the rest (HFC). Where ‖HFC‖/‖LFC‖ falls to zero, the cosine between tokens rises
to one, or the rank falls to one, tokens become equal. Lines are means over images and seeds."""
CONFOUNDED = """\
A caution. The spectra of ViT⁺ and ViT⁻ start larger than the free weights of ViT do, so their lead over ViT, largest
with little data, may be one of the start and not of the sign: overtone study --methods has the control for it."""
SIGN = """\
A stream of attention layers alone, the same tokens, bases and |λ| in every curve; only signs differ. Before attention,
a negative LayerNorm weight multiplies the eigenvalues by −1: a smoothing spectrum sharpens, a sharpening one smooths.
After attention it flips all tokens, and nothing else. SignedLayerNorm keeps the sign that was asked for.
Where two curves should be one, the dashed lies on the other."""
SIMILARITY = """\
No data and no training: noise through deep ViTs with Xavier's weights. Similarity escalates layer by layer, faster
where LayerNorm comes after each update; (I − τΠ) after every block takes a share τ of the tokens' mean off. The paper
prints these as figures without numbers: what can be compared is the shape. Ours agrees: up to one without
de-escalation, flat with τ = 0.5, zero with τ = 1."""
SOURCES = """\
Dovonon, Bronstein, Kusner, Setting the Record Straight on Transformer Oversmoothing, arXiv 2401.04301; Yu, Zhang, Why
"classic" Transformers are shallow and how to make them go deep, arXiv 2312.06182"""


def page(results: Results, tables: dict[str, Table], figures: dict[str, Figure], where: str) -> Page:
    def pick(*names: str) -> list[Figure]:
        return [figures[name] for name in names]

    config = results.plan.config
    lead = pick(*(name for name in LEAD if name in figures))
    return Page(
        title=f"Smoothing and sharpening Transformers on {config.data.name}",
        summary=_lead(results),
        key_figures=_key_figures(results),
        sections=[
            Section("In pictures", [IDEA], lead),
            Section("What came out", [VERDICTS], tables=[tables["findings"], tables["claims"]]),
            Section(
                "Which eigenvalue dominates",
                [_dominance_words(results)],
                pick("dominance", "eigenvalues"),
                [tables["table1-dominance"]],
            ),
            Section("Tokens over depth", [TOKENS], pick(*(f"depth-{name}" for name in OVER_DEPTH))),
            *(section for module in chosen(results) for section in module.sections(results, tables, figures)),
            Section("With less data", _less_data_words(results), pick("less-data"), [tables["table2-less-data"]]),
            Section(
                "With corrupted images",
                _corruption_words(results),
                pick("corruptions", "corrupted-examples"),
                [tables["table3-corruptions"], tables["corruption-kinds"]],
            ),
            Section("The sign of LayerNorm", [SIGN], pick("norm-sign-pre", "norm-sign-post")),
            Section("Similarity and de-escalation", [SIMILARITY], pick("similarity-at-first", "de-escalation")),
            Section("All numbers", tables=[tables[name] for name in ALL if name in tables], collapsed=True),
            Section("How it was done", _method(results, where)),
        ],
        footer=f"Written by overtone study. The mathematics is that of {SOURCES}.",
    )


def _lead(results: Results) -> str:
    wrong = [claim.text for claim in results.claims() if not claim.holds]
    ends = {regime: results.curve(regime, "trained", "ratio")[-1].mean for regime in REGIMES}
    verdict = f"{len(wrong)} of the proven claims did not come out: {'; '.join(wrong)}." if wrong else (
        "Everything the papers prove came out."
    )  # fmt: skip
    return (
        f"{verdict} After the last layer, ‖HFC‖/‖LFC‖ is {ends['smooth']:.3g} in ViT⁺, {ends['free']:.3g} in ViT and "
        f"{ends['sharpen']:.3g} in ViT⁻."
    )


def _key_figures(results: Results) -> list[tuple[str, str]]:
    claims = results.claims()
    figures = [(f"{sum(claim.holds for claim in claims)} of {len(claims)}", "proven claims came out")]
    for regime, label in REGIMES.items():
        figures.append((f"{results.share(regime, 'trained', 'perron').mean:.4g} %", f"of {label}'s cases smooth"))
    for regime, label in REGIMES.items():
        figures.append((f"{results.accuracy(regime, 1.0).mean:.1f} %", f"of test images right with {label}"))
    return figures


def _dominance_words(results: Results) -> str:
    free, paper = results.share("free", "trained", "perron"), papers.PERRON["free"]
    return (
        "A case is one image, layer and head; every verdict has a certificate, its margin being larger than a bound "
        f"on its error. ViT⁺ and ViT⁻ must be 100 and 0 whatever they learn. What the free ViT learns is its own: "
        f"{free} % of its cases smooth here, {paper} % in the paper's ViT-Ti on CIFAR-100, which is another model on "
        "other data, and the paper does not say how it counts cases."
    )


def _less_data_words(results: Results) -> list[str]:
    epochs = {f"{100 * run.fraction:g} %": run.epochs for run in results.plan.runs_of("regimes")}
    return [
        "Parts of the training images, the same of every class, nested; the test images are the same. Epochs: "
        + ", ".join(f"{count} with {share}" for share, count in epochs.items())
        + ". Accuracies on other data cannot be compared with the paper's; the order of the models can.",
        *([CONFOUNDED] if results.plan.config.model.init_eigenvalue else []),
        *(
            ranking(
                f"With {100 * fraction:g} % of the data",
                {regime: results.accuracy(regime, fraction) for regime in REGIMES},
                {regime: papers.ACCURACY[regime][fraction] for regime in REGIMES},
            )
            for fraction in FRACTIONS
        ),
    ]


def _corruption_words(results: Results) -> list[str]:
    return [
        f"Models trained on clean images, tested on corrupted ones: {', '.join(STRENGTHS)}, each at five severities; a "
        "column is the mean over kinds. The corruptions are overtone's own, the paper used another collection, so the "
        "levels differ; the order of the models can be compared.",
        *(
            ranking(
                f"At severity {severity}",
                {regime: results.corrupted(regime, severity) for regime in REGIMES},
                {regime: papers.CORRUPTED[regime][severity] for regime in REGIMES},
            )
            for severity in (SEVERITIES[0], SEVERITIES[-1])
        ),
    ]


def _method(results: Results, where: str) -> list[str]:
    plan, config = results.plan, results.plan.config
    seconds = sum(measures["seconds"] for measures in results.runs.values())
    return [
        f"{len(results.runs)} runs ({plan.seeds} {'seeds' if plan.seeds > 1 else 'seed'}), {seconds / 60:.1f} minutes "
        f"of training in all; attention and norms ran on {where}. Tokens, dominance and spectra were measured on "
        f"{plan.images} test images.",
        f"The configuration of the free model on all data: {config.as_text().replace(chr(10), '; ')}.",
        "ViT⁺ has H = VΛVᵀ with λ = ψ², ViT⁻ with λ = −1/(1 + ψ²), which stays in [−1, 0); both keep V orthonormal, "
        f"and |λ| starts around {config.model.init_eigenvalue or 'that of a plain ViT'}. "
        "Differences from the paper: data, size of the model, recipe, corruptions, and how cases are counted.",
        *(["This was a quick study: too little training for its accuracies to mean anything."] if plan.quick else []),
    ]
