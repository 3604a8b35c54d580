"""Figures, drawn by matplotlib once as SVG for a page, whose colors follow the reader's theme, and once as PNG.

Every figure says in words what it shows (`alt`), for those who cannot see it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

# Colors as PNG shows them, and the page's variables that take their place.
THEME = {
    "#1d2330": "ink",
    "#5c6475": "muted",
    "#dfe3ea": "grid",
    "#c2410c": "smooth",
    "#1d4ed8": "sharpen",
    "#8a90a0": "undecided",
    "#0f766e": "third",
    "#9333ea": "fourth",
}
INK, MUTED, GRID, SMOOTH, SHARPEN, UNDECIDED, THIRD, FOURTH = THEME
SERIES = (SHARPEN, SMOOTH, THIRD, FOURTH, UNDECIDED, INK)
# What a color means in every figure.
COLORS = {"free": THIRD, "smooth": SMOOTH, "sharpen": SHARPEN}
VERDICTS = {
    "perron": ("Perron: smooths", SMOOTH),
    "other": ("other: does not", SHARPEN),
    "undecided": ("undecided", UNDECIDED),
}

# Small enough that a phone shows the letters at their own size.
SIZE = (4.6, 3.0)
# More points than this are drawn as an image: a page of a hundred thousand circles is slow.
MAX_VECTOR_POINTS = 1500


@dataclass(frozen=True)
class Figure:
    """A finished figure."""

    name: str  # of its file
    title: str
    alt: str
    svg: str
    png: bytes


@dataclass(frozen=True)
class Curve:
    """y over x, and a band from low to high. Without a label it is not in the legend."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    color: str | None = None  # default: the next one of SERIES
    dashed: bool = False


@dataclass(frozen=True)
class Region:
    """A share between zero and one over a rectangle of the plane, [rows from bottom to top, columns]."""

    share: np.ndarray
    extent: tuple[float, float, float, float]  # left, right, bottom, top
    label: str


def line_plot(
    name: str,
    title: str,
    lines: Sequence[Curve],
    *,
    x: str,
    y: str,
    alt: str,
    log: bool = False,
    mark: float | None = None,
) -> Figure:
    """Curves with bands over whole numbers; log: on a logarithmic axis if they span a decade; mark: a dotted line."""
    with _style():
        canvas, axes = _canvas()
        for line, next_color in zip(lines, _colors(len(lines)), strict=True):
            color, dashes = line.color or next_color, "--" if line.dashed else "-"
            axes.plot(line.x, line.y, dashes, color=color, linewidth=2, label=line.label, marker="o", markersize=3)
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.15, linewidth=0)
        values = [value for line in lines for value in line.y]
        if log and min(values) > 0 and max(values) >= 10 * min(values):
            _logarithmic(axes)
        if mark is not None:
            axes.axhline(mark, color=INK, linewidth=0.8, linestyle=":")
        axes.set(xlabel=x, ylabel=y)
        axes.locator_params(axis="x", integer=True)
        if len(lines) > 1:
            _legend(canvas)
        return _finish(canvas, name, title, alt)


def log_log(name: str, title: str, lines: Sequence[Curve], *, x: str, y: str, alt: str) -> Figure:
    """Curves of positive numbers on two logarithmic axes, on which a power is a straight line."""
    with _style():
        canvas, axes = _canvas()
        axes.set_xscale("log")
        axes.set_yscale("log")
        for line, next_color in zip(lines, _colors(len(lines)), strict=True):
            marker = "" if line.dashed else "o"
            axes.plot(
                line.x, line.y, "--" if line.dashed else "-", color=line.color or next_color, label=line.label,
                marker=marker, markersize=3, linewidth=1.2 if line.dashed else 2,
            )  # fmt: skip
        places = sorted({value for line in lines for value in line.x})
        axes.set_xticks(places, [f"{value:g}" for value in places], fontsize=7)
        axes.minorticks_off()
        axes.set(xlabel=x, ylabel=y)
        _legend(canvas)
        return _finish(canvas, name, title, alt)


def ratio_bars(name: str, title: str, ratios: Mapping[str, float], *, x: str, alt: str) -> Figure:
    """A bar per ratio on a logarithmic axis, from one: wins to the right and blue, losses to the left and orange."""
    with _style():
        canvas, axes = _canvas(height=0.8 + 0.16 * max(1, len(ratios)))
        values = list(ratios.values())
        colors = [SMOOTH if value < 1 else SHARPEN for value in values]
        axes.barh(range(len(values)), [value - 1 for value in values], left=1, color=colors, height=0.75)
        axes.set_xscale("log")
        ticks = [tick for tick in (0.25, 0.5, 1, 2, 5, 10, 20, 50) if min([0.5, *values]) <= tick <= max([2, *values])]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.axvline(1, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(values)), list(ratios), fontsize=6)
        axes.set(xlabel=x)
        axes.margins(y=0.01)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        return _finish(canvas, name, title, alt)


def intervals(name: str, title: str, rows: Mapping[str, tuple[float, float, float]], *, x: str, alt: str) -> Figure:
    """A dot per row with the interval it is known to: (value, low, high), low and high NaN where it is not known.

    Those above zero are blue, those below it orange, those whose interval holds it gray.
    """
    with _style():
        canvas, axes = _canvas(height=0.8 + 0.2 * max(1, len(rows)))
        for place, (value, low, high) in enumerate(rows.values()):
            color = SHARPEN if low > 0 else SMOOTH if high < 0 else UNDECIDED
            if low <= high:
                axes.plot([low, high], [place, place], color=color, linewidth=2)
            axes.plot([value], [place], "o", color=color, markersize=4)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(rows)), list(rows), fontsize=7)
        axes.set(xlabel=x)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        return _finish(canvas, name, title, alt)


def heat_map(
    name: str, title: str, values: np.ndarray, *, x: str, y: str, bar: str, alt: str, diverging: bool = False
) -> Figure:
    """A colored cell per value [rows, columns], counted from 1; diverging: blue below zero, orange above it."""
    with _style():
        canvas, axes = _canvas(height=max(2.2, min(4.6, 0.9 + 0.2 * len(values))))
        limit = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
        limits: dict[str, Any] = {"vmin": -limit, "vmax": limit} if diverging else {}
        mesh = axes.pcolormesh(values, cmap=_diverging() if diverging else "viridis", edgecolors="face", **limits)
        axes.set(xlabel=x, ylabel=y)
        axes.grid(False)
        for axis, count in ((axes.xaxis, values.shape[1]), (axes.yaxis, values.shape[0])):
            step = max(1, -(-count // 12))
            axis.set_ticks(np.arange(0, count, step) + 0.5, [str(i + 1) for i in range(0, count, step)])
        axes.invert_yaxis()
        canvas.colorbar(mesh, ax=axes, label=bar)
        return _finish(canvas, name, title, alt)


def histograms(
    name: str, title: str, groups: Mapping[str, np.ndarray], *, x: str, y: str, alt: str, marks: Sequence[float] = ()
) -> Figure:
    """One histogram above the other, on a common axis; what is below zero is blue, above it orange."""
    with _style():
        canvas, axes = _canvas(height=max(2.4, min(6.0, 0.9 + 0.3 * len(groups))))
        every = np.concatenate([np.asarray(values, dtype=float) for values in groups.values()])
        edges = _edges(every[np.isfinite(every)])
        middles = (edges[1:] + edges[:-1]) / 2
        for place, values in enumerate(groups.values()):
            counts, _ = np.histogram(values, bins=edges)
            heights = 0.9 * counts / max(1, counts.max())
            bottom = len(groups) - 1 - place
            for color, side in ((SHARPEN, middles < 0), (SMOOTH, middles >= 0)):
                axes.fill_between(
                    edges.repeat(2)[1:-1],
                    bottom,
                    bottom + np.where(side, heights, 0).repeat(2),
                    color=color,
                    alpha=0.75,
                    linewidth=0,
                )
            axes.axhline(bottom, color=MUTED, linewidth=0.5)
        for mark in marks:
            axes.axvline(mark, color=INK, linewidth=0.8, linestyle=":")
        axes.set(xlabel=x, ylabel=y)
        axes.set_yticks(range(len(groups)), list(groups)[::-1])
        axes.grid(False, axis="y")
        return _finish(canvas, name, title, alt)


def complex_plane(
    name: str,
    title: str,
    points: Mapping[str, np.ndarray],
    *,
    x: str,
    y: str,
    alt: str,
    region: Region | None = None,
    unit_circle: bool = False,
) -> Figure:
    """Complex numbers in the plane, over a shaded region or inside the unit circle."""
    with _style():
        canvas, axes = _canvas(height=3.6)
        if region is not None:
            shade = axes.imshow(
                region.share, extent=region.extent, origin="lower", cmap=_diverging(), vmin=0, vmax=1, alpha=0.45,
                interpolation="bilinear",
            )  # fmt: skip
            canvas.colorbar(shade, ax=axes, label=region.label)
        if unit_circle:
            angle = np.linspace(0, 2 * np.pi, 181)
            axes.plot(np.cos(angle), np.sin(angle), color=MUTED, linewidth=1)
        colors = _colors(len(points)) if len(points) > 1 else (INK,)
        for (label, values), color in zip(points.items(), colors, strict=True):
            is_many = len(values) > MAX_VECTOR_POINTS
            axes.plot(
                values.real, values.imag, linestyle="", marker=".", markersize=2.5, label=label, rasterized=is_many,
                color=MUTED if is_many and color == INK else color, alpha=0.5 if is_many else 0.8,
            )  # fmt: skip
        axes.set(xlabel=x, ylabel=y, aspect="equal")
        if region is not None:
            axes.set(xlim=region.extent[:2], ylim=region.extent[2:])
        if len(points) > 1:
            _legend(canvas)
        return _finish(canvas, name, title, alt)


def stacked_bars(
    name: str, title: str, rows: Mapping[str, Mapping[str, float]], *, y: str, alt: str, colors: Mapping[str, str]
) -> Figure:
    """A bar per row, divided into categories; the numbers are fractions of the row."""
    with _style():
        canvas, axes = _canvas(height=max(1.8, min(6.0, 1.1 + 0.2 * len(rows))))
        left = np.zeros(len(rows))
        for category, color in colors.items():
            values = np.array([100 * row.get(category, 0.0) for row in rows.values()])
            if values.any():
                axes.barh(range(len(rows)), values, left=left, color=color, label=category, height=0.8)
            left += values
        axes.set(xlabel="% of cases", ylabel=y, xlim=(0, 100))
        axes.set_yticks(range(len(rows)), list(rows))
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        if left.any():
            _legend(canvas)
        return _finish(canvas, name, title, alt)


def verdict_bars(name: str, title: str, rows: Mapping[str, Mapping[str, float]], *, y: str, alt: str) -> Figure:
    """A bar per row of the shares of "perron" and "other" among the verdicts; the rest is undecided."""
    shares = {
        label: {VERDICTS[verdict][0]: share for verdict, share in known.items()}
        | {VERDICTS["undecided"][0]: 1 - sum(known.values())}
        for label, known in rows.items()
    }
    return stacked_bars(name, title, shares, y=y, alt=alt, colors=dict(VERDICTS.values()))


def image_grid(
    name: str, title: str, rows: Mapping[str, Sequence[np.ndarray]], *, columns: Sequence[str], alt: str
) -> Figure:
    """Rows of images [h, w] or [h, w, 3] of bytes, with a name for every row and column."""
    with _style():
        canvas, axes = _canvas(height=0.5 * len(rows) + 0.5)
        height, width = next(iter(rows.values()))[0].shape[:2]
        gap = max(1, width // 8)
        for place, row in enumerate(rows.values()):
            for column, image in enumerate(row):
                left, top = column * (width + gap), place * (height + gap)
                extent = (left, left + width, top + height, top)
                axes.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="nearest", extent=extent)
        axes.set_xticks([column * (width + gap) + width / 2 for column in range(len(columns))], columns)
        axes.set_yticks([place * (height + gap) + height / 2 for place in range(len(rows))], list(rows))
        axes.set(xlim=(0, len(columns) * (width + gap) - gap), ylim=(len(rows) * (height + gap) - gap, 0))
        axes.tick_params(length=0)
        axes.xaxis.tick_top()
        axes.grid(False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return _finish(canvas, name, title, alt)


def _style() -> AbstractContextManager:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'overtone[report]'") from error
    return matplotlib.rc_context(
        {
            "font.size": 9,
            "svg.fonttype": "none",
            "text.color": INK,
            "axes.edgecolor": GRID,
            "axes.labelcolor": INK,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.unicode_minus": True,
            "grid.color": GRID,
            "grid.linewidth": 0.7,
            "xtick.color": MUTED,
            "ytick.color": MUTED,
            "legend.frameon": False,
            "figure.constrained_layout.use": True,
        }
    )


def _canvas(height: float = SIZE[1]) -> tuple[Canvas, Axes]:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(SIZE[0], height))
    return canvas, canvas.add_subplot()


def _legend(canvas: Canvas) -> None:
    """Above the axes, where it covers nothing, in as many columns as the figure is wide."""
    handles, labels = canvas.axes[0].get_legend_handles_labels()
    for columns in range(len(labels), 0, -1):
        legend = canvas.legend(
            handles, labels, loc="outside upper center", ncols=columns, handlelength=3, columnspacing=1.2
        )  # the handles are long enough to show dashes
        if columns == 1 or legend.get_window_extent().width <= canvas.bbox.width:
            return
        legend.remove()


def _logarithmic(axes: Axes) -> None:
    """With plain numbers at 1, 2 and 5 of every decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _colors(count: int) -> tuple[str, ...]:
    return tuple(SERIES[i % len(SERIES)] for i in range(count))


def _diverging() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("sharpen-smooth", [SHARPEN, "#f3f1ee", SMOOTH])


def _edges(values: np.ndarray) -> np.ndarray:
    """About fifty bins; zero is an edge."""
    low, high = (min(0.0, float(values.min())), max(0.0, float(values.max()))) if len(values) else (-1.0, 1.0)
    if low == high:
        low, high = -1.0, 1.0
    step = (high - low) / 50
    return np.arange(np.floor(low / step), np.ceil(high / step) + 1) * step


def _finish(canvas: Canvas, name: str, title: str, alt: str) -> Figure:
    png, svg = io.BytesIO(), io.StringIO()
    canvas.savefig(png, format="png", dpi=200, facecolor="white", metadata={"Software": None})
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": name}):  # ids that are the same in every run and differ on one page
        canvas.savefig(svg, format="svg", transparent=True, dpi=200, metadata={"Date": None, "Creator": None})
    return Figure(name, title, alt, _themed(svg.getvalue()), png.getvalue())


def _themed(svg: str) -> str:
    """The <svg> element alone, with the page's colors and without a fixed size."""
    svg = svg[svg.index("<svg") :]
    for color, variable in THEME.items():
        svg = re.sub(color, f"var(--{variable})", svg, flags=re.IGNORECASE)
    opening, rest = svg.split(">", 1)
    return re.sub(r' (width|height)="[^"]*"', "", opening) + ">" + rest
