"""A table: text for a terminal, CSV for a program, rows for a page (page.html.j2)."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias


class HasMean(Protocol):
    """A mean and a standard deviation: one cell for people, as it writes itself, and two columns of a CSV."""

    @property
    def mean(self) -> float: ...
    @property
    def std(self) -> float: ...


class Mean(NamedTuple):
    """A mean of which people see no deviation."""

    mean: float
    std: float  # nan for one value

    @classmethod
    def of(cls, values: Any) -> Mean:
        """Of a tensor."""
        values = values.double()
        return cls(float(values.mean()), float(values.std()) if values.numel() > 1 else math.nan)

    def __str__(self) -> str:
        return shown(self.mean)


Cell: TypeAlias = str | int | float | HasMean

NONE = "–"  # where there is no number

# What a spreadsheet takes for the beginning of a formula.
FORMULA = ("=", "+", "-", "@", "\t")


@dataclass(frozen=True)
class Table:
    """Rows under columns. Numbers stay numbers: CSV has all their digits, people see four."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"Table {self.caption!r}: got a row of {len(row)} cells, wanted {len(self.columns)}")

    def text(self) -> str:
        """Aligned columns for a terminal."""
        is_number = [all(not isinstance(row[i], str) for row in self.rows) for i in range(len(self.columns))]
        rows = [list(self.columns), *([shown(cell) for cell in row] for row in self.rows)]
        header, *lines = aligned(rows, is_number)
        rule = "  ".join("─" * max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join([self.caption, header, rule, *lines, *([self.note] if self.note else [])])

    def csv(self) -> str:
        """Numbers with all their digits, a mean and its deviation in two columns; text cannot be a formula."""
        has_mean = [any(_is_mean(row[i]) for row in self.rows) for i in range(len(self.columns))]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for row in ([*self.columns], *self.rows):
            cells = zip(row, has_mean, self.columns, strict=True)
            writer.writerow([value for cell, means, name in cells for value in _csv_cells(cell, means, cell is name)])
        return text.getvalue()

    def has_text(self, column: int) -> bool:
        """Whether text stands in the column, which is then aligned to the left on a page."""
        return any(isinstance(row[column], str) for row in self.rows)


def aligned(rows: Sequence[Sequence[str]], to_the_right: Sequence[bool] | None = None) -> list[str]:
    """A line per row, in columns that are as wide as their widest cell; every text table is printed by this."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    justify = [str.rjust if right else str.ljust for right in to_the_right or [False] * len(widths)]
    return [
        "  ".join(put(cell, width) for put, cell, width in zip(justify, row, widths, strict=True)).rstrip()
        for row in rows
    ]


def shown(cell: Cell) -> str:
    """A cell as people read it."""
    if not isinstance(cell, float):
        return str(cell)
    if math.isnan(cell):
        return NONE
    if cell != 0 and (abs(cell) < 1e-3 or abs(cell) >= 1e5) and math.isfinite(cell):
        return f"{cell:.2e}"
    return f"{cell:.4g}"


def _is_mean(cell: Cell) -> bool:
    return hasattr(cell, "mean") and hasattr(cell, "std")


def _csv_cells(cell: Any, has_mean: bool, is_header: bool) -> list[str | int | float]:
    """One cell, or the two of a column that holds means."""
    if _is_mean(cell):
        return [cell.mean, cell.std]
    if isinstance(cell, str):
        cell = re.sub(r"[\r\n]", " ", cell)
        cell = f"'{cell}" if cell.lstrip(" ").startswith(FORMULA) else cell
    if not has_mean:
        return [cell]
    cell = "" if cell == NONE else cell
    return [cell, f"{cell} std" if is_header else ""]
