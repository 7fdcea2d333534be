"""Which plots the measurements allow, as data for `compare.plots`; and what is missing for the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ..plots import BarPlot, Bars, LinePlot, Plot, Series, tokens_label
from .sources import OWN_ENGINE, Entry, Group, Measurements, Point, Row, Speeds, engines, least_bytes_at

ELSEWHERE = "measured elsewhere"
HOW = {
    "sweep": "python -m compare.sweep",
    "kernels": "python -m compare.kernels",
    "ablations": "python -m compare.ablations",
    "batch": "python -m compare.batch",
    "consistency": "python -m compare.consistency",
    "launches": "python -m compare.launches",
    "peer": "python -m compare.peers FILE",
}
ARTICLE_COLOUR, CONTROL_COLOUR, STAGES_COLOUR = "#8c959f", "#54aeff", "#54aeff"
LAUNCHES_COLOUR = EFFECT_COLOUR = "#0969da"


@dataclass
class Figures:
    """Plots, and a message for each one that lacks its data."""

    plots: list[Plot] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def lacks(self, plot: str, kind: str, what: str = "") -> None:
        self.missing.append(
            f"no plot of {plot}: there is no green result of kind '{kind}'{what}; make one with `{HOW[kind]}`"
        )


def figures(measurements: Measurements) -> Figures:
    """Every plot that the measurements allow."""
    found = Figures()
    speeds = measurements.speeds()
    for group, points in speeds.items():
        for phase in ("prefill", "decode"):
            _speed_plot(found, group, points, phase)
        _ratio_plot(found, group, points)
        if group.model.is_full_size:
            _floor_plot(found, measurements, group, points)
    if not speeds:
        for plot in ("prefill against length", "decode against length", "the ratio to mlx-lm", "the floor's share"):
            found.lacks(plot, "sweep")
    _launches_plot(found, measurements)
    _ablation_plots(found, measurements)
    return found


def slug(*words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def group_slug(group: Group) -> str:
    layers = f"{group.model.layers}-layers" if group.model.layers else ""
    return slug(group.device, "" if group.model.name == "synthetic" else group.model.name, layers)


def label(engine: str, is_peer: bool) -> str:
    return f"{engine} ({ELSEWHERE})" if is_peer else engine


def is_peer(speeds: Speeds, engine: str) -> bool:
    """Whether every figure of an engine was measured elsewhere."""
    return all(entries[engine].result.is_peer for entries in speeds.values() if engine in entries)


def on_axis(speeds: Speeds, phase: str) -> Speeds:
    """The points of a phase that have a place on a logarithmic axis and are no special case."""
    return {point: e for point, e in speeds.items() if point.phase == phase and point.length > 0 and not point.after}


def measured_lengths(speeds: Speeds) -> set[Point]:
    """The points at which an engine was measured by this harness."""
    return {point for point, entries in speeds.items() if any(not e.result.is_peer for e in entries.values())}


def _series(speeds: Speeds, engine: str, value: Callable[[Point, Entry, float], float | None]) -> Series | None:
    """A line of `value(point, entry, tokens per second)`, with the slowest and fastest round where all are known."""
    points = [
        (p.length, e[engine], y)
        for p, e in speeds.items()
        if engine in e and (y := value(p, e[engine], e[engine].row["tokens_per_s"])) is not None
    ]
    if not points:
        return None
    lengths, entries, values = zip(*points, strict=True)
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    if all(entry.row.get("rounds") for entry in entries):
        scales = [y / entry.row["tokens_per_s"] for entry, y in zip(entries, values, strict=True)]
        low = tuple(s * min(e.row["rounds"]) for s, e in zip(scales, entries, strict=True))
        high = tuple(s * max(e.row["rounds"]) for s, e in zip(scales, entries, strict=True))
    peer = is_peer(speeds, engine)
    return Series(label(engine, peer), engine, lengths, values, low, high, dashed=peer)


def _subtitle(group: Group, extra: str = "") -> str:
    return f"{group.device}; {group.model.title}; batch 1{extra}"


def _speed_plot(found: Figures, group: Group, speeds: Speeds, phase: str) -> None:
    points = on_axis(speeds, phase)
    if not measured_lengths(points):
        found.lacks(f"{phase} on {group.device}", "sweep", f" with {phase} rows of {group.model.title}")
        return
    # A peer's very short prompts would take half of the axis.
    shortest = min(point.length for point in measured_lengths(points))
    points = {point: entries for point, entries in points.items() if point.length >= shortest}
    lines = [_series(points, engine, lambda _, __, speed: speed) for engine in engines(points)]
    series = tuple(line for line in lines if line)
    found.plots.append(
        LinePlot(
            name=f"{phase}-{group_slug(group)}",
            title=f"{phase.capitalize()}: tokens per second",
            subtitle=_subtitle(group),
            alt=f"{phase.capitalize()} speed against length on {group.device}: " + ", ".join(s.label for s in series),
            x_label="tokens of the prompt" if phase == "prefill" else "tokens in the context",
            y_label="tokens per second",
            series=series,
        )
    )


def _ratio_plot(found: Figures, group: Group, speeds: Speeds) -> None:
    lines = []
    for phase in ("prefill", "decode"):
        points = on_axis(speeds, phase)
        for baseline in engines(points):
            pairs = [
                (point.length, e[OWN_ENGINE].row["tokens_per_s"] / e[baseline].row["tokens_per_s"])
                for point, e in points.items()
                if baseline.startswith("mlx_lm") and baseline in e and OWN_ENGINE in e
            ]
            if pairs:
                lengths, ratios = zip(*pairs, strict=True)
                lines.append(Series(f"{phase}, to {baseline}", f"{phase} {baseline}", lengths, ratios))
    if not lines:
        what = f" with both {OWN_ENGINE} and mlx_lm on {group.device}, {group.model.title}"
        found.lacks("the ratio to mlx-lm", "sweep", what)
        return
    found.plots.append(
        LinePlot(
            name=f"ratio-{group_slug(group)}",
            title="Speed of lily_mlx as a multiple of mlx-lm's",
            subtitle=_subtitle(group),
            alt=f"Ratio of lily_mlx to mlx-lm against length on {group.device}",
            x_label="tokens of the prompt (prefill) or in the context (decode)",
            y_label="ratio (1: the same speed)",
            series=tuple(lines),
            level=1.0,
        )
    )


def _floor_plot(found: Figures, measurements: Measurements, group: Group, speeds: Speeds) -> None:
    name = "the share of the bandwidth floor in decode"
    points = on_axis(speeds, "decode")
    least = measurements.minimum_bytes()
    rate = measurements.rate(group.device, "copy_bytes_per_s")
    if not measured_lengths(points):
        found.lacks(name, "sweep", f" with decode rows on {group.device}, {group.model.title}")
    if not least:
        found.lacks(name, "launches", " with minimum_bytes and a context")
    if not rate:
        found.lacks(name, "kernels", f" with copy_bytes_per_s on {group.device}")
    if not (measured_lengths(points) and least and rate):
        return
    parts, context, _ = least

    def share(point: Point, entry: Entry, speed: float) -> float | None:
        # A peer's weights have another format, and so another floor.
        return None if entry.result.is_peer else least_bytes_at(parts, context, point.length) * speed / rate[0]

    lines = [_series(points, engine, share) for engine in engines(points)]
    found.plots.append(
        LinePlot(
            name=f"floor-{group_slug(group)}",
            title="Decode: share of the bandwidth floor",
            subtitle=_subtitle(group, f"; a copy reaches {rate[0] / 1e9:,.0f} GB/s"),
            alt=f"Share of the bandwidth floor in decode against context on {group.device}",
            x_label="tokens in the context",
            y_label="time of the least bytes / time",
            series=tuple(line for line in lines if line),
            percent=True,
        )
    )


def _launches_plot(found: Figures, measurements: Measurements) -> None:
    rows = {key: entry for key, entry in measurements.launches().items() if key[0] == "decode"}
    if not rows:
        found.lacks("launches and stages", "launches")
        return
    newest = max((entry.result for entry in rows.values()), key=lambda result: (result.date, result.path.name))
    context = newest.data.get("context", 0)
    counts = {engine: entry.row for (_, engine, own), entry in rows.items() if own == context}
    counts |= newest.data.get("published", {})
    found.plots.append(
        BarPlot(
            name="launches",
            title="Launches and stages of one decode step",
            subtitle=f"counted for the full-size model, {context:,} tokens in the context; batch 1",
            alt="Launches and stages of a decode step: " + ", ".join(counts),
            x_label="number in one step",
            categories=tuple(counts),
            bars=(
                Bars("launches", LAUNCHES_COLOUR, tuple(row["launches"] for row in counts.values())),
                Bars("stages", STAGES_COLOUR, tuple(row["stages"] for row in counts.values())),
            ),
        )
    )


def percent(effect: object) -> float | None:
    """An effect as a percentage; None where the file gives no number (a mechanism that saves memory)."""
    return 100.0 * effect if isinstance(effect, (int, float)) and not isinstance(effect, bool) else None


def _ablation_plots(found: Figures, measurements: Measurements) -> None:
    ablations = measurements.ablations()
    for group, entries in ablations.items():
        rows = [entry.row for entry in entries if percent(entry.row["effect"]) is not None]
        if not rows:
            found.lacks(f"ablations on {group.device}", "ablations", " with an effect in numbers")
            continue
        bars = [Bars(group.device, EFFECT_COLOUR, tuple(percent(row["effect"]) for row in rows))]
        for name, key, colour in (
            ("control", "effect_of_control", CONTROL_COLOUR),
            ("the article, on Apple silicon", "article_effect", ARTICLE_COLOUR),
        ):
            values = tuple(percent(row.get(key)) for row in rows)
            if any(value is not None for value in values):
                bars.append(Bars(name, colour, values))
        found.plots.append(
            BarPlot(
                name=f"ablations-{group_slug(group)}",
                title="What each mechanism brings",
                subtitle=f"speed with it against without it; {group.device}; {group.model.title}",
                alt=f"Effect of each mechanism on {group.device}, beside the article's",
                x_label="change of speed, %",
                categories=tuple(ablation_name(row) for row in rows),
                bars=tuple(bars),
                value_format="{:+.1f}",
            )
        )
    if not ablations:
        found.lacks("ablations", "ablations")


def ablation_name(row: Row) -> str:
    """`mechanism (decode, 32K)`."""
    place = [str(row["phase"])] if row.get("phase") else []
    if isinstance(row.get("length"), int):
        place.append(tokens_label(row["length"]))
    return f"{row['mechanism']} ({', '.join(place)})" if place else str(row["mechanism"])
