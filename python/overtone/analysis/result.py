"""What `analyze` returns: the measurements, and their tables, figures and page."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from overtone.analysis.measure import METRICS, Layer
from overtone.analysis.words import measured, predicted
from overtone.reference.dominance import Dominance, Verdict
from overtone.report.table import Cell, Mean, Table

if TYPE_CHECKING:
    from overtone.report.figures import Figure
    from overtone.report.page import Section


@dataclass(frozen=True)
class Analysis:
    """The measurements of a model. `print` it for a summary; `save` writes tables, figures and the page."""

    name: str
    samples: int
    layers: list[Layer]
    skipped: dict[str, str]  #: modules that look like attention but could not be read, and why
    subject: str = ""  #: a sentence: which weights, which inputs
    unit: str = "samples"  #: what `samples` counts: "images", or "samples" of anything else

    @property
    def unread(self) -> dict[str, str]:
        """Deprecated: `skipped`."""
        warnings.warn("Analysis.unread is deprecated, use Analysis.skipped", DeprecationWarning, stacklevel=2)
        return self.skipped

    def __str__(self) -> str:
        words = [self.subject, measured(self), predicted(self)]
        tables = [self.layer_table().text(), self.dominance_table().text()]
        return "\n\n".join(["\n".join(words), *tables, *self._skipped_lines()])

    def _skipped_lines(self) -> list[str]:
        return [f"not read: {name}: {why}" for name, why in self.skipped.items()]

    def curve(self, metric: str) -> Tensor:
        """A metric (see METRICS) over depth, [L + 1, B]: before the first block, then after each."""
        if metric not in METRICS:
            raise ValueError(f"curve: metric: got {metric!r}, wanted one of {', '.join(METRICS)}")
        return torch.stack([self.layers[0].before[metric], *(layer.after[metric] for layer in self.layers)])

    def verdicts(self) -> dict[str, int]:
        """How many cases (a case per image, layer and head) have which verdict, by name."""
        return _total(layer.dominance for layer in self.layers)

    def layer_table(self) -> Table:
        """A row per layer: means over the samples (and heads), after the layer's block."""
        columns = ["layer", *METRICS.values(), "escalation rate", "spectral gap", "Perron %", "other %", "undecided %"]
        rows: list[list[Cell]] = []
        for place, layer in enumerate(self.layers, start=1):
            metrics: list[Cell] = [Mean.of(layer.after[metric]) for metric in METRICS]
            shares = _percentages([layer.dominance])
            rows.append([place, *metrics, Mean.of(layer.escalation), Mean.of(layer.gap), *shares])
        start = [Mean.of(self.layers[0].before[metric]) for metric in METRICS]
        rows.insert(0, [0, *start, *[float("nan")] * 5])
        return Table(f"{self.name}: tokens after each layer, means over {self.samples} {self.unit}", columns, rows)

    def head_table(self) -> Table:
        """A row per layer and head, both counted from 1; the module's name is the model's own."""
        columns = ["layer", "head", "module", *(f"{name} of A V" for name in METRICS.values()), "spectral gap"]
        columns += [verdict.name.lower() for verdict in Verdict] + ["smallest |margin|", "its error bound"]
        rows = [
            [place, head + 1, layer.name, *_head_cells(layer, head)]
            for place, layer in enumerate(self.layers, start=1)
            for head in range(layer.gap.shape[1])
        ]
        return Table(f"{self.name}: heads, means over {self.samples} {self.unit}", columns, rows)

    def dominance_table(self) -> Table:
        """DBK's Table 1 for this model, counted per head and, also, with the heads' mean attention and the whole H."""
        columns = ["cases", "number", "Perron %", "other %", "undecided %", *(f"of these {n}" for n in _UNDECIDED)]
        one = self.unit.removesuffix("s")
        counted = {
            f"{one} × layer × head": [layer.dominance for layer in self.layers],
            f"{one} × layer, mean of heads": [layer.mean_dominance for layer in self.layers],
        }
        rows: list[list[Cell]] = []
        for label, cases in counted.items():
            counts = _total(cases)
            rows.append([label, sum(counts.values()), *_percentages(cases), *(counts[name] for name in _UNDECIDED)])
        note = (
            "Perron: the eigenvalue of A whose eigenvector makes all tokens equal; where it dominates, depth smooths."
        )
        return Table(f"{self.name}: which eigenvalue dominates (Table 1 of Dovonon et al.)", columns, rows, note)

    def tables(self) -> dict[str, Table]:
        return {"layers": self.layer_table(), "dominance": self.dominance_table(), "heads": self.head_table()}

    def figures(self) -> list[Figure]:
        """Every figure of the report (needs matplotlib)."""
        from overtone.analysis.figures import all_figures

        return all_figures(self)

    def sections(self, figures: list[Figure]) -> list[Section]:
        """The report's sections, from its figures: parts for other pages."""
        from overtone.analysis.page import sections

        return sections(self, figures)

    def save(self, folder: str | Path) -> Path:
        """Write report.html, a CSV per table and a PNG per figure; returns the path of the page (needs matplotlib)."""
        from overtone.analysis.page import page

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        figures = self.figures()
        for name, table in self.tables().items():
            (folder / f"{name}.csv").write_text(table.csv(), encoding="utf-8")
        for figure in figures:
            (folder / f"{figure.name}.png").write_bytes(figure.png)
        page(self, figures).write(folder / "report.html")
        return folder / "report.html"


_UNDECIDED = [verdict.name.lower() for verdict in Verdict if verdict > Verdict.PERRON]


def _total(cases: Iterable[Dominance]) -> dict[str, int]:
    counts = [each.counts() for each in cases]
    return {verdict.name.lower(): sum(each[verdict.name.lower()] for each in counts) for verdict in Verdict}


def _percentages(cases: list[Dominance]) -> list[float]:
    """Perron, other, undecided."""
    counts = _total(cases)
    number = max(1, sum(counts.values()))
    undecided = sum(counts[name] for name in _UNDECIDED)
    return [100 * count / number for count in (counts["perron"], counts["other"], undecided)]


def _head_cells(layer: Layer, head: int) -> list[Cell]:
    case = Dominance(*(field[:, head] for field in layer.dominance))
    closest = int(case.margin.abs().nan_to_num(nan=float("inf")).argmin())
    return [
        *(Mean.of(layer.heads[metric][:, head]) for metric in METRICS),
        Mean.of(layer.gap[:, head]),
        *case.counts().values(),
        abs(float(case.margin[closest])),
        float(case.error[closest]),
    ]
