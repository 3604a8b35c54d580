"""One HTML page made of sections. It needs nothing but itself: style and figures are inside, there is no script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from overtone.report.table import Cell, Table, shown

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

    from overtone.report.figures import Figure

FOLDER = Path(__file__).parent
LONG_TEXT = 32  # letters; longer cells may take several lines


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs of plain text, then figures and tables. Tables of a `collapsed` section open on a click."""

    title: str
    text: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    collapsed: bool = False

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class Page:
    """A title, a summary of the result, key figures, and sections."""

    title: str
    summary: str = ""
    key_figures: Sequence[tuple[str, str]] = ()  # (number, what it is)
    sections: Sequence[Section] = ()
    footer: str = ""

    def html(self) -> str:
        return _template().render(page=self)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.html(), encoding="utf-8")


@cache
def _template() -> Template:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise ImportError("pages need jinja2: pip install 'overtone[report]'") from error
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"shown": shown, "kind": _kind}
    environment.globals |= {"style": Markup((FOLDER / "page.css").read_text(encoding="utf-8")), "labeled_svg": _svg}
    return environment.get_template("page.html.j2")


def _svg(figure: Figure) -> Markup:
    """The SVG stands as an image with words of its own; what is inside it is not read out."""
    from markupsafe import Markup

    opening = Markup('<svg role="img" aria-label="{}"').format(figure.alt)
    return Markup(figure.svg.replace("<svg", opening, 1))


def _kind(cell: Cell) -> str:
    """The class of a cell."""
    if not isinstance(cell, str):
        return "number"
    return "text long" if len(cell) > LONG_TEXT else "text"
