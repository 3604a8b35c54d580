"""One HTML page made of sections. It needs nothing but itself: style and figures are inside, there is no script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from overtone.report.style import STYLE
from overtone.report.table import Table

if TYPE_CHECKING:
    from overtone.report.figures import Figure


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs of plain text, then figures and tables. Tables of a `folded` section open on a click."""

    title: str
    text: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    folded: bool = False

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    def html(self) -> str:
        parts = [f'<section id="{self.anchor}"><h2>{escape(self.title)}</h2>']
        parts += [f"<p>{escape(paragraph)}</p>" for paragraph in self.text]
        if self.figures:
            parts += ['<div class="figures">', *map(_figure, self.figures), "</div>"]
        tables = "\n".join(table.html() for table in self.tables)
        if self.tables and self.folded:
            count = f"{len(self.tables)} tables" if len(self.tables) > 1 else "the table"
            tables = f"<details><summary>Show {count}</summary>\n{tables}</details>"
        return "\n".join([*parts, tables, "</section>"])


@dataclass(frozen=True)
class Page:
    """A title, one sentence that says the result, key figures, and sections."""

    title: str
    lead: str = ""
    facts: Sequence[tuple[str, str]] = ()  # (number, what it is)
    sections: Sequence[Section] = field(default_factory=tuple)
    footer: str = ""

    def html(self) -> str:
        facts = "".join(f"<div><dt>{escape(what)}</dt><dd>{escape(number)}</dd></div>" for number, what in self.facts)
        links = "".join(
            f'<li><a href="#{section.anchor}">{escape(section.title)}</a></li>' for section in self.sections
        )
        return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(self.title)}</title>
<style>
{STYLE}</style>
</head>
<body>
<header><p class="brand">overtone</p><h1>{escape(self.title)}</h1><p class="lead">{escape(self.lead)}</p>
<dl class="facts">{facts}</dl></header>
<nav aria-label="Sections"><ul>{links}</ul></nav>
<main>
{chr(10).join(section.html() for section in self.sections)}
</main>
<footer><p>{escape(self.footer)}</p></footer>
</body>
</html>
"""

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.html(), encoding="utf-8")


def _figure(figure: Figure) -> str:
    """The SVG stands as an image with words of its own; what is inside it is not read out."""
    svg = figure.svg.replace("<svg", f'<svg role="img" aria-label="{escape(figure.alt)}"', 1)
    return f'<figure id="figure-{figure.name}">{svg}<figcaption>{escape(figure.title)}</figcaption></figure>'
