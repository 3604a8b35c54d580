"""A table that can be printed, written as CSV and put on a page."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
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

    def html(self) -> str:
        is_text = [any(isinstance(row[i], str) for row in self.rows) for i in range(len(self.columns))]
        head = "".join(
            f'<th scope="col"{" class=text" if text else ""}>{escape(column)}</th>'
            for column, text in zip(self.columns, is_text, strict=True)
        )
        body = "\n".join(f"<tr>{_cells(row)}</tr>" for row in self.rows)
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(self.caption)}"><table>'
            f"<caption><span>{escape(self.caption)}</span></caption><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
            f"</div>{note}"
        )


def aligned(rows: Sequence[Sequence[str]], to_the_right: Sequence[bool] | None = None) -> list[str]:
    """A line per row, in columns that are as wide as their widest cell; every text table is printed by this."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    justify = [str.rjust if right else str.ljust for right in to_the_right or [False] * len(widths)]
    return ["  ".join(each(*cell) for each, *cell in zip(justify, row, widths, strict=True)).rstrip() for row in rows]


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


def _cells(row: Sequence[Cell]) -> str:
    """The first cell names the row."""
    first, *others = row
    cells = "".join(f'<td class="{_kind(cell)}">{escape(shown(cell))}</td>' for cell in others)
    return f'<th scope="row">{escape(shown(first))}</th>{cells}'


def _kind(cell: Cell) -> str:
    """The class of a cell; sentences may take several lines."""
    if not isinstance(cell, str):
        return "number"
    return "text long" if len(cell) > 32 else "text"
