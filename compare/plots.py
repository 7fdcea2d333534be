"""Plots as plain data, and their drawing: the same data gives the same bytes of PNG and SVG.

A plot is a card with its own background, so that it reads on light and dark pages alike. Each file carries a
fingerprint of its data and of this module, by which `python -m compare.report --check` knows whether it is
current without drawing it again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMATS = ("png", "svg")
BACKGROUND, BORDER, TEXT, GRID = "#f6f8fa", "#d0d7de", "#1f2328", "#d8dee4"
COLOURS = {
    "lily_mlx": "#0969da",
    "mlx_lm": "#bc4c00",
    "mlx_lm+metal": "#8250df",
    "mlx_lm+lily_mlx": "#bf3989",
    "llama.cpp": "#57606a",
}
OTHER_COLOURS = ("#1a7f37", "#a40e26", "#7d4e00", "#0a7080")
MARKERS = ("o", "s", "^", "D", "v", "P")
WIDTH_INCHES, FONT_POINTS, PNG_DPI = 8.0, 11, 160
LEGEND_LETTERS, LETTERS_OF_A_HANDLE = 92, 8  # what fits into the width
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that every machine draws the same
    "font.size": FONT_POINTS,
    "figure.facecolor": BACKGROUND,
    "figure.edgecolor": BORDER,
    "axes.facecolor": BACKGROUND,
    "savefig.facecolor": BACKGROUND,
    "savefig.edgecolor": BORDER,
    "axes.edgecolor": BORDER,
    "axes.labelcolor": TEXT,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "lily_mlx",
}


@dataclass(frozen=True)
class Series:
    """One line. `low` and `high` are the slowest and the fastest round of each point, if known."""

    label: str
    engine: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    dashed: bool = False


@dataclass(frozen=True)
class LinePlot:
    """Lines over lengths, on a logarithmic x axis."""

    name: str
    title: str
    subtitle: str
    alt: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    level: float | None = None
    percent: bool = False


@dataclass(frozen=True)
class Bars:
    """One bar in each category; None leaves its place empty."""

    label: str
    colour: str
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class BarPlot:
    """Horizontal bars, grouped by category, with their values written beside them."""

    name: str
    title: str
    subtitle: str
    alt: str
    x_label: str
    categories: tuple[str, ...]
    bars: tuple[Bars, ...]
    value_format: str = "{:,.0f}"


Plot = LinePlot | BarPlot


def fingerprint(plot: Plot) -> str:
    """A hash of everything that the picture depends on, matplotlib's version aside."""
    content = json.dumps([type(plot).__name__, asdict(plot), Path(__file__).read_text()])
    return hashlib.sha256(content.encode()).hexdigest()


def stored_fingerprint(path: Path) -> str | None:
    """The fingerprint inside a PNG or SVG file; None where there is none."""
    if not path.exists():
        return None
    found = re.search(rb"lily_mlx plot ([0-9a-f]{64})", path.read_bytes())
    return found[1].decode() if found else None


def save(plot: Plot, directory: Path) -> list[Path]:
    """Draws a plot and writes `<name>.png` and `<name>.svg`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    mark = f"lily_mlx plot {fingerprint(plot)}"
    paths = []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's own settings do not count
        matplotlib.rcParams.update(STYLE)
        columns, rows = _legend_shape(plot)
        header = 0.72 + 0.26 * rows
        bars = 0 if isinstance(plot, LinePlot) else len(plot.categories) * (len(plot.bars) + 0.7)
        height = header + (0.7 + 0.26 * bars if bars else 3.6)
        figure = Figure(figsize=(WIDTH_INCHES, height), linewidth=2)
        figure.set_layout_engine("constrained", rect=(0.012, 0.02, 0.973, 1 - header / height - 0.02))
        axes = figure.add_subplot()
        figure.text(0.02, 1 - 0.15 / height, plot.title, va="top", fontsize=FONT_POINTS + 2, fontweight="bold")
        figure.text(0.02, 1 - 0.45 / height, plot.subtitle, va="top", fontsize=FONT_POINTS - 1)
        if isinstance(plot, LinePlot):
            _draw_lines(axes, plot)
        else:
            _draw_bars(axes, plot)
        figure.legend(
            loc="upper left",
            bbox_to_anchor=(0.012, 1 - 0.64 / height),
            ncols=columns,
            borderaxespad=0,
            columnspacing=1.4,
        )
        for form in FORMATS:
            # Dates and versions in the files would differ from run to run.
            metadata: dict[str, Any] = {"Description": mark}
            metadata |= {"Software": None} if form == "png" else {"Date": None, "Creator": None}
            path = directory / f"{plot.name}.{form}"
            figure.savefig(path, format=form, dpi=PNG_DPI, metadata=metadata)
            paths.append(path)
    return paths


def _legend_shape(plot: Plot) -> tuple[int, int]:
    """Columns and rows of the legend: one row where the labels fit, else two or more."""
    labels = [entry.label for entry in (plot.series if isinstance(plot, LinePlot) else plot.bars)]
    rows = 1
    letters = sum(len(label) + LETTERS_OF_A_HANDLE for label in labels)
    while letters > LEGEND_LETTERS * rows and rows < len(labels):
        rows += 1
    columns = -(-len(labels) // rows)
    return columns, -(-len(labels) // columns)


def colours(engines: Sequence[str]) -> dict[str, str]:
    """A colour for each engine, the same in every plot."""
    others = iter(OTHER_COLOURS * len(engines))
    return {engine: COLOURS.get(engine) or next(others) for engine in engines}


def tokens_label(length: float) -> str:
    """256, 512, 1K, ..., 128K."""
    return f"{length / 1024:g}K" if length >= 1024 else f"{length:g}"


def _draw_lines(axes: Any, plot: LinePlot) -> None:
    palette = colours([series.engine for series in plot.series])
    if plot.level is not None:
        axes.axhline(plot.level, color=TEXT, linewidth=1)
    for marker, series in zip(MARKERS * len(plot.series), plot.series, strict=False):
        errors = None
        if series.low:
            below = [y - low for y, low in zip(series.y, series.low, strict=True)]
            errors = [below, [high - y for y, high in zip(series.y, series.high, strict=True)]]
        axes.errorbar(
            series.x,
            series.y,
            yerr=errors,
            label=series.label,
            color=palette[series.engine],
            linestyle="--" if series.dashed else "-",
            marker=marker,
            markerfacecolor=BACKGROUND if series.dashed else None,
            markersize=6,
            linewidth=2,
            capsize=3,
        )
    lengths = sorted({x for series in plot.series for x in series.x})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [tokens_label(x) for x in lengths])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter((lambda y, _: f"{100 * y:.4g}%") if plot.percent else (lambda y, _: f"{y:,.6g}"))
    axes.grid(axis="y")
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)


def _draw_bars(axes: Any, plot: BarPlot) -> None:
    thickness = 0.8 / len(plot.bars)
    # Within a category the bars that exist stand together, without gaps for those that do not.
    present = [
        [i for i, bars in enumerate(plot.bars) if bars.values[row] is not None] for row in range(len(plot.categories))
    ]
    for index, bars in enumerate(plot.bars):
        known = [(row, value) for row, value in enumerate(bars.values) if value is not None]
        places = [row + (present[row].index(index) - (len(present[row]) - 1) / 2) * thickness for row, _ in known]
        values = [value for _, value in known]
        drawn = axes.barh(places, values, height=thickness * 0.9, color=bars.colour, label=bars.label)
        axes.bar_label(drawn, [plot.value_format.format(value) for value in values], padding=4)
    axes.set_yticks(range(len(plot.categories)), plot.categories)
    axes.set_ylim(len(plot.categories) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.axvline(0, color=BORDER, linewidth=1)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.6g}")
    axes.grid(axis="x")
    axes.set_xlabel(plot.x_label)
