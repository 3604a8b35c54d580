"""The documentation site: `make docs` writes it to build/docs as static HTML that needs no network."""

from __future__ import annotations

import overtone

project = "overtone"
author = "The overtone authors"
copyright = author
release = version = overtone.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"overtone {release}"
html_copy_source = False
html_show_copyright = False

# `name` in a docstring is a link where there is such a name, and code otherwise.
default_role = "py:obj"
smartquotes_action = "D"  # dashes only: "sharpen" is a string, not a quotation
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say dtypes and shapes, of which "Tensor" says nothing
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100


def keep_bars(app, what, name, obj, options, lines: list[str]) -> None:
    """|λ| in a docstring is a modulus; reStructuredText would look for something called λ."""
    lines[:] = [line.replace("|", "\\|") for line in lines]


def skip_undocumented_fields(app, what, name, obj, skip, options) -> bool | None:
    """namedtuple's own words, "Alias for field number 0", say nothing."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


def setup(app) -> None:
    app.connect("autodoc-process-docstring", keep_bars)
    app.connect("autodoc-skip-member", skip_undocumented_fields)
