"""Tables, figures and pages, and the page of an analysis in a real browser."""

from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from support import browser
from support.attention_models import Model, tokens

from overtone.analysis import analyze
from overtone.report import figures
from overtone.report.figures import Curve, Region
from overtone.report.page import Page, Section
from overtone.report.table import Mean, Table, shown

pytest.importorskip("matplotlib", reason="needs matplotlib")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An analysis, and the folder with its report."""
    torch.manual_seed(0)
    model = Model(depth=3)
    model.other_attention = torch.nn.MultiheadAttention(4, 2)  # never called
    folder = tmp_path_factory.mktemp("report")
    analysis = analyze(model, tokens(), name="a <small> model")
    assert analysis.save(folder) == folder / "report.html"
    return analysis, folder


def page_with(table: Table) -> str:
    return Page("t", sections=[Section("s", tables=[table])]).html()


class TestTable:
    TABLE = Table("Two rows", ["name", "value"], [["a & b", 0.123456], ["c", float("nan")]], note="A note.")

    def test_text_is_aligned(self):
        assert self.TABLE.text().splitlines() == [
            "Two rows", "name    value", "─────  ──────", "a & b  0.1235", "c           –", "A note.",
        ]  # fmt: skip

    def test_csv_has_all_digits(self):
        assert list(csv.reader(io.StringIO(self.TABLE.csv())))[1] == ["a & b", "0.123456"]

    @pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", " =", "\r="])
    def test_text_of_a_csv_is_no_formula(self, start):
        """Names of modules come from others: a spreadsheet must not run them. Numbers stay numbers."""
        text = f"{start}1+cmd|'/c calc'!A0"
        rows = list(csv.reader(io.StringIO(Table("c", ["name", text], [[text, -1.5], ["a", -2]]).csv())))
        text = text.replace("\r", " ")
        assert rows == [["name", f"'{text}"], [f"'{text}", "-1.5"], ["a", "-2"]]

    def test_a_mean_and_its_deviation_are_two_columns(self):
        table = Table("c", ["name", "value", "note"], [["a", Mean(1.25, 0.5), "x"], ["b", 2.0, "y"]])
        assert list(csv.reader(io.StringIO(table.csv()))) == [
            ["name", "value", "value std", "note"], ["a", "1.25", "0.5", "x"], ["b", "2.0", "", "y"],
        ]  # fmt: skip
        assert table.text().splitlines()[3].split() == ["a", "1.25", "x"]
        assert '<td class="number">1.25</td>' in page_with(table)

    def test_a_page_escapes_it_and_names_its_rows_and_columns(self):
        html = page_with(self.TABLE)
        assert '<th scope="row">a &amp; b</th>' in html and '<th scope="col">value</th>' in html
        assert "<caption><span>Two rows</span></caption>" in html and '<p class="note">A note.</p>' in html

    def test_a_page_puts_text_to_the_left(self):
        html = page_with(Table("t", ["a", "b", "c"], [["x", "short", 1], ["y", "word " * 9, 2.0]]))
        assert re.findall(r'<th scope="col"( class="text")?>', html) == [' class="text"', ' class="text"', ""]
        assert re.findall(r'<td class="(.*?)">', html) == ["text", "number", "text long", "number"]

    def test_a_short_row_is_an_error(self):
        with pytest.raises(ValueError, match="got a row of 1 cells, wanted 2"):
            Table("x", ["a", "b"], [[1]])

    @pytest.mark.parametrize(
        "cell, text", [(0.0, "0"), (1e-5, "1.00e-05"), (123456.0, "1.23e+05"), (12, "12"), (-0.5, "-0.5")]
    )
    def test_numbers_as_people_read_them(self, cell, text):
        assert shown(cell) == text


class TestFigures:
    def test_colors_follow_the_theme(self):
        figure = figures.line_plot(
            "x", "t", [Curve("a", [0, 1], [1, 100], [1, 90], [2, 110])], x="x", y="y", alt="a", log=True
        )
        assert figure.svg.startswith("<svg ") and "var(--sharpen)" in figure.svg
        assert not [color for color in figures.THEME if color in figure.svg.lower()]
        assert figure.png.startswith(b"\x89PNG")

    def test_the_same_figure_twice_is_the_same(self):
        def draw():
            points = {"λ": np.exp(1j * np.arange(2000.0))}
            region = Region(np.eye(5), (-1, 1, -1, 1), "share")
            return figures.complex_plane("p", "t", points, x="x", y="y", alt="a", region=region, unit_circle=True)

        assert draw() == draw()

    def test_ids_differ_between_figures(self):
        def ids(name):
            figure = figures.heat_map(name, "t", np.array([[0.0, np.nan], [1, -2]]), x="x", y="y", bar="b", alt="a")
            return set(re.findall(r'id="(\w{8,})"', figure.svg)) - {"pcolormesh"}

        clips = {name: {each for each in ids(name) if each.startswith("p")} for name in ("one", "two")}
        assert not clips["one"] & clips["two"]

    def test_extreme_values_are_drawn(self):
        figures.histograms("h", "t", {"1": np.zeros(3), "2": np.array([])}, x="x", y="y", alt="a", marks=(0,))
        figures.heat_map("m", "t", np.full((1, 1), np.nan), x="x", y="y", bar="b", alt="a", diverging=True)
        figures.line_plot("c", "t", [Curve("a", [0], [0.0])], x="x", y="y", alt="a", log=True)
        figures.stacked_bars("s", "t", {"1": {}}, y="y", alt="a", colors={"all": "#000000"})


class TestLegends:
    """No legend covers a point of a curve, or leaves the figure, whatever the curves and their names are."""

    @pytest.fixture
    def canvases(self, monkeypatch):
        """Every figure's canvas."""
        seen = []
        finish = figures._finish
        monkeypatch.setattr(figures, "_finish", lambda canvas, *words: (seen.append(canvas), finish(canvas, *words))[1])
        return seen

    def check(self, canvas):
        canvas.draw_without_rendering()
        boxes = [
            legend.get_window_extent() for legend in (*canvas.legends, *(a.get_legend() for a in canvas.axes)) if legend
        ]
        for axes in canvas.axes:
            for line in axes.get_lines():
                points = axes.transData.transform(np.column_stack([line.get_xdata(), line.get_ydata()]).astype(float))
                # Between the points too: a curve is drawn through them.
                steps = np.linspace(0, 1, 20)[:, None, None]
                points = (points[:-1] + steps * np.diff(points, axis=0)).reshape(-1, 2)
                for box in boxes:
                    inside = (box.x0 < points[:, 0]) & (points[:, 0] < box.x1)
                    assert not (inside & (box.y0 < points[:, 1]) & (points[:, 1] < box.y1)).any()
            for bar in axes.patches:
                assert not any(box.overlaps(bar.get_window_extent()) for box in boxes)
        for box in boxes:
            assert canvas.bbox.x0 <= box.x0 and box.x1 <= canvas.bbox.x1 and box.y1 <= canvas.bbox.y1
        return boxes

    @pytest.mark.parametrize("count", [2, 4, 6])
    def test_of_curves_that_fill_the_axes(self, canvases, count):
        generator = np.random.default_rng(count)
        for length in (2, 24):
            x = list(range(1, 13))
            lines = [Curve("n" * length + str(i), x, generator.uniform(0.01, 1, 12).tolist()) for i in range(count)]
            figures.line_plot("c", "t", lines, x="x", y="y", alt="a")
            figures.line_plot("c", "t", lines, x="x", y="y", alt="a", log=True)
            figures.log_log("l", "t", lines, x="x", y="y", alt="a")
            points = {line.label: np.array(line.y) * np.exp(1j * np.arange(12)) for line in lines}
            figures.complex_plane("p", "t", points, x="x", y="y", alt="a", unit_circle=True)
            rows = {str(i): dict(zip(points, generator.dirichlet(np.ones(count)), strict=True)) for i in range(3)}
            colors = dict(zip(points, figures.SERIES, strict=False))
            figures.stacked_bars("s", "t", rows, y="y", alt="a", colors=colors)
        assert all(self.check(canvas) for canvas in canvases) and len(canvases) == 10

    def test_of_an_analysis(self, canvases):
        analyze(Model(depth=3), tokens()).figures()
        assert len([canvas for canvas in canvases if self.check(canvas)]) == 3


class Checker(HTMLParser):
    """Every element that is opened is closed, in order."""

    VOID = ("meta", "link", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("href", "src", "xlink:href") and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("href", "src", "xlink:href") and value]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_page_is_made_of_sections(tmp_path):
    figure = figures.line_plot("one", "A title", [Curve("a", [0, 1], [1, 2])], x="x", y="y", alt="says <it>")
    page = Page("Title & more", "Lead.", [("1", "fact")], [Section("First part", ["Text."], [figure])], "End.")
    page.write(tmp_path / "folder" / "page.html")
    html = (tmp_path / "folder" / "page.html").read_text()
    assert "<title>Title &amp; more</title>" in html and 'id="first-part"' in html
    assert 'aria-label="says &lt;it&gt;"' in html


def test_the_page_of_an_analysis_stands_alone(saved):
    html = (saved[1] / "report.html").read_text()
    checker = Checker()
    checker.feed(html)
    assert checker.open == []
    assert all(link.startswith(("#", "data:")) for link in checker.links)
    assert "<script" not in html and "a &lt;small&gt; model" in html
    assert "Not read: other_attention: it was not called." in html


def test_files_of_an_analysis(saved):
    analysis, folder = saved
    rows = list(csv.DictReader((folder / "layers.csv").open()))
    assert [row["layer"] for row in rows] == ["0", "1", "2", "3"]
    assert float(rows[3]["‖HFC‖/‖LFC‖"]) == pytest.approx(analysis.curve("ratio")[3].mean().item())
    assert float(rows[3]["‖HFC‖/‖LFC‖ std"]) == pytest.approx(analysis.curve("ratio")[3].std().item())
    heads = list(csv.DictReader((folder / "heads.csv").open()))
    assert [(row["layer"], row["head"]) for row in heads] == [(str(i), str(j)) for i in (1, 2, 3) for j in (1, 2, 3)]
    for row in (*rows, *heads):  # numbers, but for the names
        assert all(float(value) is not None for name, value in row.items() if name != "module" and value)
    html = (folder / "report.html").read_text()
    assert {path.stem for path in folder.glob("*.png")} == set(re.findall('id="figure-([a-z-]+)"', html))
    assert "which eigenvalue dominates" in str(analysis)


@pytest.mark.parametrize("width, dark", [(1200, False), (390, True)])
def test_the_page_in_a_browser(saved, tmp_path, width, dark):
    """No complaint, nothing asked of the network, every figure shown, nothing wider than the window."""
    with browser.running(tmp_path) as tab:
        tab.open(saved[1] / "report.html", width, dark)
        sizes = tab.evaluate(
            "[...document.querySelectorAll('figure svg')].map(svg => { const box = svg.getBoundingClientRect();"
            " return [box.width, box.height, svg.querySelectorAll('path, image, text').length, svg.ariaLabel] })"
        )
        images = tab.evaluate("[...document.querySelectorAll('image')].every(i => i.getBoundingClientRect().width > 0)")
        overflow = tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        colors = tab.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        assert tab.complaints() == []
        assert tab.requests() == []
    assert len(sizes) == 13 and images
    for shown_width, height, parts, label in sizes:
        assert shown_width > 250 and height > 100 and parts > 10 and len(label) > 20
    assert overflow <= 0
    brightness = [sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors]
    assert (brightness[0] < brightness[1]) == dark


WIDE = Table("Accuracy of " + "many " * 20, ["model", *(f"a column with words, {i}" for i in range(14))],
             [["ViT-B/16, random weights", *(f"{i} ± 0.25" for i in range(14))]] * 3)  # fmt: skip


@pytest.mark.parametrize("width", [390, 1280])
def test_a_wide_table_in_a_browser(tmp_path, width):
    """It scrolls inside the page, its title wraps, and both its title and the names of its rows stay in sight."""
    Page("Tables", sections=[Section("Wide", tables=[WIDE])]).write(tmp_path / "page.html")
    with browser.running(tmp_path / "profile") as tab:
        tab.open(tmp_path / "page.html", width)
        overflow = tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        scrolled = tab.evaluate(
            "(() => { const box = document.querySelector('.scroll'); box.scrollLeft = 1e6; return box.scrollLeft })()"
        )
        edges = tab.evaluate(
            "['.scroll', 'tbody th', 'thead th', 'caption span'].map(name => {"
            " const box = document.querySelector(name).getBoundingClientRect(); return [box.left, box.right] })"
        )
    frame, *stay = edges
    assert overflow <= 0
    assert scrolled > 0
    for left, right in stay:
        assert frame[0] <= left and right <= frame[1], edges


def test_study_tables_fit_a_wide_screen(tmp_path):
    """Seven columns of numbers, and sentences in between, as the study has them."""
    numbers = Table("Table 1", ["model", "data", *(f"paper: another {i} %" for i in range(5))],
                    [["ViT-B/16, ImageNet", "not here: needs a download", *["99.12 ± 0.25"] * 5]])  # fmt: skip
    words = Table("Facts", ["came out", "fact", "here"], [["yes", "A sentence of many words. " * 8, "found: " * 9]])
    Page("Tables", sections=[Section("One", tables=[numbers, words])]).write(tmp_path / "page.html")
    with browser.running(tmp_path / "profile") as tab:
        tab.open(tmp_path / "page.html", 1280)
        cut = tab.evaluate("[...document.querySelectorAll('.scroll')].map(box => box.scrollWidth - box.clientWidth)")
    assert cut == [0, 0]
