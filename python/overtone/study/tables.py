"""The study's tables: the papers' Tables 1 to 3 with ours beside theirs, and all numbers."""

from __future__ import annotations

from collections.abc import Mapping

from overtone.analysis import METRICS
from overtone.report.table import NONE, Cell, Table
from overtone.study import papers
from overtone.study.comparisons import chosen
from overtone.study.corruptions import SEVERITIES, STRENGTHS
from overtone.study.plan import FRACTIONS, REGIMES
from overtone.study.results import Results, share_of
from overtone.study.stats import Difference, Finding, MeanStd, finding

UNDECIDED = ("tie", "close", "invalid")


def all_tables(results: Results) -> dict[str, Table]:
    """By the name of their CSV file."""
    return {
        "claims": claims_table(results),
        "table1-dominance": dominance_table(results),
        "table2-less-data": less_data_table(results),
        "table3-corruptions": corruptions_table(results),
        "corruption-kinds": kinds_table(results),
        "runs": runs_table(results),
        "depth": depth_table(results),
        "untrained": untrained_table(results),
        "findings": findings_table(results),
    } | {name: table for module in chosen(results) for name, table in module.tables(results).items()}


def findings_table(results: Results) -> Table:
    rows: list[list[Cell]] = [[each.verdict, each.text, each.source, each.found] for each in all_findings(results)]
    note = (
        "Differences are paired by seed, with the 95 % confidence interval of their mean over seeds; undecided where "
        "the interval holds the limit (zero, if not said otherwise). The intervals are about seeds: the test images "
        "are the same. They are not corrected for how many there are: of twenty, one misleads."
    )
    return Table("What was found, and what this data decides", ["verdict", "finding", "of", "here"], rows, note)


def all_findings(results: Results) -> list[Finding]:
    """Of the regimes and of every other comparison."""
    return [*regime_findings(results), *(each for module in chosen(results) for each in module.findings(results))]


def regime_findings(results: Results) -> list[Finding]:
    """The orders in Tables 2 and 3."""

    def less_data(a: str, b: str, fraction: float) -> Difference:
        return Difference.of(*(results.accuracies("regimes", REGIMES[each], fraction=fraction) for each in (a, b)))

    def corrupted(a: str, b: str) -> Difference:
        return Difference.of(*(results.corrupted_accuracies(each, SEVERITIES[-1]) for each in (a, b)))

    source = "Dovonon et al."
    return [
        finding("With all data, ViT is better than ViT⁺", source, less_data("free", "smooth", 1.0)),
        finding("With all data, ViT⁻ is better than ViT⁺", source, less_data("sharpen", "smooth", 1.0)),
        finding("With 10 % of the data, ViT⁻ is better than ViT", source, less_data("sharpen", "free", 0.1)),
        finding("With 10 % of the data, ViT⁻ is better than ViT⁺", source, less_data("sharpen", "smooth", 0.1)),
        finding("At corruption severity 5, ViT⁻ is better than ViT", source, corrupted("sharpen", "free")),
        finding("At corruption severity 5, ViT is better than ViT⁺", source, corrupted("free", "smooth")),
    ]


def claims_table(results: Results) -> Table:
    rows = [["yes" if claim.holds else "NO", claim.text, claim.found] for claim in results.claims()]
    return Table("What must come out", ["came out", "claim", "here"], rows)


def dominance_table(results: Results) -> Table:
    """Table 1."""
    columns = ["model", "data", "Perron %", "another %", "undecided %", "paper: Perron %", "paper: another %"]
    base = results.untrained.vit_base
    shares: list[Cell] = [f"{share_of(base, *v):.2f}" for v in (("perron",), ("other",), UNDECIDED)]
    rows: list[list[Cell]] = [["ViT-B/16, random weights", "noise", *shares, *_paper_share("ViT-B/16, random weights")]]
    for regime, label in REGIMES.items():
        for state, word in (("init", "at first"), ("trained", "trained")):
            shares = [results.share(regime, state, *v) for v in (("perron",), ("other",), UNDECIDED)]
            paper = _paper_share(regime) if state == "trained" else [NONE, NONE]
            rows.append([f"{label}, {word}", results.plan.config.data.name, *shares, *paper])
    for model in ("ViT-B/16, ImageNet", "DeiT-B/16, ImageNet"):
        rows.append([model, "not here: needs a download", NONE, NONE, NONE, *_paper_share(model)])
    note = "The paper's ViT, ViT⁺ and ViT⁻ are ViT-Ti on CIFAR-100. " + _spread_note(results)
    return Table("Table 1: which eigenvalue of attention dominates, % of (image, layer, head)", columns, rows, note)


def _paper_share(name: str) -> list[Cell]:
    return [f"{papers.PERRON[name]:.2f}", f"{100 - papers.PERRON[name]:.2f}"]


def less_data_table(results: Results) -> Table:
    """Table 2."""
    ours = {regime: {f: results.accuracy(regime, f) for f in FRACTIONS} for regime in REGIMES}
    columns = [f"{100 * fraction:g} % of the data" for fraction in FRACTIONS]
    return _beside_paper("Table 2: test accuracy in % with less data", columns, ours, papers.ACCURACY, results)


def corruptions_table(results: Results) -> Table:
    """Table 3."""
    severities = (0, *SEVERITIES)
    ours = {regime: {s: results.corrupted(regime, s) for s in severities} for regime in REGIMES}
    columns = [f"severity {severity}" for severity in severities]
    return _beside_paper("Table 3: test accuracy in % with corrupted images", columns, ours, papers.CORRUPTED, results)


def _beside_paper(
    caption: str, columns: list[str], ours: Mapping[str, Mapping], paper: Mapping[str, Mapping], results: Results
) -> Table:
    rows: list[list[Cell]] = []
    for regime, label in REGIMES.items():
        rows.append([label, results.plan.config.data.name, *ours[regime].values()])
    for regime, label in REGIMES.items():
        rows.append([label, "paper, CIFAR-100", *(f"{paper[regime][key]:.2f}" for key in ours[regime])])
    return Table(caption, ["model", "data", *columns], rows, _spread_note(results))


def _spread_note(results: Results) -> str:
    seeds = results.plan.seeds
    return f"Mean ± standard deviation of n = {seeds} seeds." if seeds > 1 else "One seed: no deviation is known."


def kinds_table(results: Results) -> Table:
    rows: list[list[Cell]] = []
    for regime, label in REGIMES.items():
        rows.append([label, *(results.corrupted_by(regime, kind) for kind in STRENGTHS)])
    caption = "Test accuracy in % by kind of corruption, mean over severities 1 to 5"
    return Table(caption, ["model", *STRENGTHS], rows, _spread_note(results))


def runs_table(results: Results) -> Table:
    columns = ["comparison", "model", "layers", "% of data", "seed", "epochs", "accuracy %", "seconds"]
    rows: list[list[Cell]] = [
        [run.part, run.variant, run.depth, 100 * run.fraction, run.seed, run.epochs,
         100 * measures["accuracy"], measures["seconds"]]
        for run, measures in results.runs.items()
    ]  # fmt: skip
    return Table("All runs", columns, rows, "Comparisons share the trainings that they have in common.")


def depth_table(results: Results) -> Table:
    """Tokens over depth, means over seeds."""
    rows: list[list[Cell]] = []
    for regime, label in REGIMES.items():
        for state in ("init", "trained"):
            curves = [results.curve(regime, state, metric) for metric in METRICS]
            for layer, spreads in enumerate(zip(*curves, strict=True)):
                rows.append([label, state, layer, *(spread.mean for spread in spreads)])
    caption = "Tokens before the first layer (0) and after each, means over images and seeds"
    return Table(caption, ["model", "state", "layer", *METRICS.values()], rows)


def untrained_table(results: Results) -> Table:
    """What was measured without training, a row per curve and layer."""
    untrained = results.untrained
    curves = {("token similarity", f"{norm}-norm"): curve for norm, curve in untrained.similarity.items()}
    curves |= {("token similarity", f"post-norm, τ = {tau:g}"): c for tau, c in untrained.de_escalated.items()}
    curves |= {
        ("‖HFC‖/‖LFC‖", f"{norm}-norm, {regime}, LayerNorm {sign:+d}"): curve
        for (norm, regime, sign), curve in untrained.norm_signs.items()
    }
    rows: list[list[Cell]] = [
        [*names, layer, value] for names, curve in curves.items() for layer, value in enumerate(curve)
    ]
    return Table("Without training: random weights and tokens", ["metric", "model", "layer", "value"], rows)


def ranking(what: str, ours: Mapping[str, MeanStd], paper: Mapping[str, float]) -> str:
    """A sentence: is our order of the regimes the paper's, and is it more than the seeds' spread?"""
    order = sorted(ours, key=lambda regime: -ours[regime].mean)
    theirs = sorted(paper, key=lambda regime: -paper[regime])
    names, their_names = (" > ".join(REGIMES[regime] for regime in each) for each in (order, theirs))
    gap = ours[order[0]].mean - ours[order[-1]].mean
    noise = max(spread.std for spread in ours.values())  # nan for one seed
    text = f"{what}, ours are {names}" + (
        ", as in the paper" if order == theirs else f"; the paper's are {their_names}"
    )
    if noise != noise:
        return f"{text}. With one seed, the {gap:.2f} points between first and last prove nothing."
    if gap < 2 * noise:
        return f"{text}. But first and last are {gap:.2f} points apart and seeds deviate by {noise:.2f}: not resolved."
    return f"{text}; first and last are {gap:.2f} points apart, seeds deviate by at most {noise:.2f}."
