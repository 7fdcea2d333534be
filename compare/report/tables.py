"""The generated blocks: each a piece of Markdown, made from result files alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..plots import Plot
from ..results import table
from .figures import HOW, ablation_name, is_peer, label, measured_lengths, on_axis, percent
from .sources import (
    ACCELERATED,
    OWN_ENGINE,
    Entry,
    Group,
    Measurements,
    Model,
    Point,
    Result,
    Speeds,
    engines,
    least_bytes_at,
)


@dataclass
class Page:
    """Where a block stands: its links are relative to the page's folder, and a full page leaves nothing out."""

    folder: Path
    plots_folder: Path
    full: bool = False
    heading: str = "####"

    def link(self, path: Path) -> str:
        return Path(os.path.relpath(path, self.folder)).as_posix()


@dataclass
class Citations:
    """Numbers for the files that a block takes its figures from."""

    page: Page
    cited: list[Result] = field(default_factory=list)

    def number(self, *results: Result) -> str:
        for result in results:
            if result not in self.cited:
                self.cited.append(result)
        return ", ".join(str(i) for i in sorted({self.cited.index(result) + 1 for result in results}))

    def __str__(self) -> str:
        return "Sources:\n\n" + "\n".join(f"{i}. {source(self.page, r)}" for i, r in enumerate(self.cited, start=1))


def source(page: Page, result: Result) -> str:
    """`[file](link): date, device, commit, versions`, and for a peer that it was measured elsewhere."""
    names = ", ".join(f"{name} {version}" for name, version in versions(result).items())
    text = f"[`{result.path.name}`]({page.link(result.path)}): {day(result)}, {result.device}, "
    text += f"commit {result.data['commit']}, {names}"
    if result.is_peer:
        text += f". {sentence(result.data.get('source', 'measured elsewhere'))}"
        text += f" Model: {result.data['peer_model']}." if result.data.get("peer_model") else ""
        text += f" {sentence(result.data['note'])}" if result.data.get("note") else ""
    return text


def versions(result: Result) -> dict[str, str]:
    """Versions that tell runs apart: the commit stands for `lily_mlx` where it runs from the source tree."""
    return {n: v for n, v in result.data["versions"].items() if v != "not installed" and n not in ("python", "numpy")}


def day(result: Result) -> str:
    return result.date[:16].replace("T", " ")


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def absent(kind: str) -> str:
    return f"No result of kind `{kind}` yet; `{HOW[kind]}` makes one."


def devices(measurements: Measurements, page: Page) -> str:
    """Where all figures come from, and whether any is from Apple silicon."""
    found = measurements.devices()
    if not found:
        return "Nothing was measured yet."
    names = []
    for device, backends in found.items():
        backend = f" (backend {' and '.join(f'`{b}`' for b in backends)})" if backends else ""
        names.append(f"{device}{backend}")
    text = f"Every figure here comes from a file in [`compare/results/`]({page.link(results_folder(measurements))}). "
    text += f"Devices so far: {'; '.join(names)}."
    if not any(device.startswith("Apple") for device in found):
        text += " **Nothing was measured on Apple silicon yet**, so no figure here says how fast anything is there."
    return text


def results_folder(measurements: Measurements) -> Path:
    return (list(measurements.results) + [result for result, _ in measurements.refused])[0].path.parent


def sweep(measurements: Measurements, page: Page) -> str:
    """Prefill and decode: engines side by side, with the ratio to each baseline."""
    groups = measurements.speeds()
    if not groups:
        return absent("sweep")
    parts = []
    for group, speeds in groups.items():
        shown = speeds if page.full else {p: e for p, e in speeds.items() if p in measured_lengths(speeds)}
        parts.append(f"{page.heading} {group.title}\n\n{_sweep_group(group, shown, page)}")
        earlier = measurements.earlier_pairs().get(group)
        if earlier:
            text = "Side by side with another engine at an earlier commit of this package:\n\n"
            parts.append(text + _sweep_group(group, earlier, page))
    return "\n\n".join(parts)


def _sweep_group(group: Group, speeds: Speeds, page: Page) -> str:
    names = engines(speeds)
    baselines = [n for n in names if n != OWN_ENGINE and any(OWN_ENGINE in e and n in e for e in speeds.values())]
    citations = Citations(page)
    lines = []
    for point, entries in speeds.items():
        numbers = {engine: entry.row["tokens_per_s"] for engine, entry in entries.items()}
        own = numbers.get(OWN_ENGINE)
        ratios = [own / numbers[b] if own and b in numbers else None for b in baselines]
        cited = citations.number(*(entry.result for entry in entries.values()))
        lines.append([_place(point), point.length, *(numbers.get(n) for n in names), *ratios, cited])
    headings = ["phase", "length", *(label(n, is_peer(speeds, n)) for n in names)]
    headings += [*(f"ratio to {b}" for b in baselines), "source"]
    text = "Tokens per second, one request at a time, the median of the rounds. "
    text += "Length: tokens of the prompt (prefill) or in the context (decode).\n\n"
    text += table(headings, lines) + "\n\n"
    means = [_mean(speeds, baseline, is_peer(speeds, baseline)) for baseline in baselines]
    notes = [*means, *_spread_note(speeds), *_random_context_note(speeds)]
    if "mlx_lm+metal" in names:
        notes.append(
            "mlx_lm+metal: mlx-lm with its own Metal kernels, run through this package's runtime where MLX has none "
            "for the device."
        )
    return text + (" ".join(notes) + "\n\n" if notes else "") + str(citations)


def loops(measurements: Measurements, page: Page) -> str:
    """Our own generation loop beside mlx-lm's on the same kernels."""
    groups = measurements.loops()
    if not groups:
        return f"Not measured yet; `{HOW['sweep']} --engines {OWN_ENGINE} {ACCELERATED}` does."
    parts = []
    for group, speeds in groups.items():
        citations = Citations(page)
        lines = []
        for point, entries in speeds.items():
            own, other = (entries[engine].row["tokens_per_s"] for engine in (OWN_ENGINE, ACCELERATED))
            cited = citations.number(entries[OWN_ENGINE].result)
            lines.append([_place(point), point.length, own, other, f"{100 * (own / other - 1):+.1f} %", cited])
        headings = ["phase", "length", "lily_mlx's loop", "mlx-lm's loop", "ours is faster by", "source"]
        parts.append(f"{page.heading} {group.title}\n\n{table(headings, lines)}\n\n{citations}")
    return "\n\n".join(parts)


def _place(point: Point) -> str:
    return f"{point.phase} after {point.after:,}" if point.after else point.phase


def _mean(speeds: Speeds, baseline: str, elsewhere: bool) -> str:
    """The mean ratio over the lengths that both engines have."""
    parts = []
    for phase in ("prefill", "decode"):
        ratios = [
            e[OWN_ENGINE].row["tokens_per_s"] / e[baseline].row["tokens_per_s"]
            for e in on_axis(speeds, phase).values()
            if OWN_ENGINE in e and baseline in e
        ]
        if ratios:
            lengths = f"{len(ratios)} length{'s' if len(ratios) > 1 else ''}"
            parts.append(f"{phase} {sum(ratios) / len(ratios):.2f} ({lengths})")
    return f"Mean ratio to {label(baseline, elsewhere)}: {', '.join(parts)}."


def _spread_note(speeds: Speeds) -> list[str]:
    spreads = [e.row["spread"] for entries in speeds.values() for e in entries.values() if "spread" in e.row]
    return [f"Rounds differ by at most {100 * max(spreads):.1f} % of their median."] if spreads else []


def _random_context_note(speeds: Speeds) -> list[str]:
    random = {
        bool(entry.result.settings.get("synthetic_context"))
        for point, entries in speeds.items()
        for entry in entries.values()
        if point.phase == "decode" and not entry.result.is_peer
    }
    if True not in random:
        return []
    which = "In some files decode" if False in random else "Decode"
    return [f"{which} starts from caches of random values, the same in every engine, in place of a prefill."]


def floor(measurements: Measurements, page: Page) -> str:
    """Decode against the time that a copy would need for the least bytes of a step."""
    least = measurements.minimum_bytes()
    if not least:
        return absent("launches")
    parts, context, counted = least
    citations = Citations(page)
    number = citations.number(counted)
    pieces: list[list[Any]] = [[name, size / 1e6] for name, size in parts.items()]
    pieces.append(["together", sum(parts.values()) / 1e6])
    text = f"The fewest bytes that a decode step of the full-size model moves, {context:,} tokens in the context "
    text += f"[{number}]:\n\n{table(['part', 'MB'], pieces)}"
    for group, speeds in measurements.speeds().items():
        if not group.model.is_full_size:
            continue
        rate = measurements.rate(group.device, "copy_bytes_per_s")
        points = on_axis(speeds, "decode")
        if not rate:
            text += f"\n\nNo result of kind `kernels` gives the copy bandwidth of {group.device} yet; "
            text += f"`{HOW['kernels']}` makes one."
            continue
        lines = []
        for point, entries in points.items():
            size = least_bytes_at(parts, context, point.length)
            for name in engines(points):
                if name in entries and not entries[name].result.is_peer:
                    seconds = 1 / entries[name].row["tokens_per_s"]
                    cited = citations.number(counted, rate[1], entries[name].result)
                    ms = size / rate[0] * 1e3
                    share = 100 * ms / (seconds * 1e3)
                    lines.append([point.length, name, size / 1e9, ms, seconds * 1e3, share, cited])
        if lines:
            headings = ["context", "engine", "least GB", "floor, ms", "step, ms", "share of the floor, %", "source"]
            text += f"\n\n{page.heading} {group.device}\n\nA copy reaches {rate[0] / 1e9:,.0f} GB/s.\n\n"
            text += table(headings, lines)
    return f"{text}\n\n{citations}"


def launches(measurements: Measurements, page: Page) -> str:
    """Launches, stages and bytes, with the published counts beside."""
    entries = measurements.launches()
    if not entries:
        return absent("launches")
    citations = Citations(page)
    lines: list[list[Any]] = []
    published: dict[str, tuple[Any, Result]] = {}
    for (phase, engine, context), (row, result) in entries.items():
        rows = result.data.get("chunk") if phase == "prefill" else 1
        size = row["bytes"] / 1e9 if "bytes" in row else None
        other = row.get("other_ops")
        place = [phase, context, rows, engine]
        lines.append([*place, row["launches"], row["stages"], size, other, citations.number(result)])
        published |= {name: (count, result) for name, count in result.data.get("published", {}).items()}
    for name, (count, result) in published.items():
        cited = citations.number(result)
        lines.append(
            ["decode", None, 1, f"{name} (its own count)", count["launches"], count["stages"], None, None, cited]
        )
    headings = ["phase", "context", "rows", "engine", "launches", "stages", "GB moved", "other operations", "source"]
    text = "Counted from the exported graph of the full-size model, so no device is involved. Stages: the longest "
    text += "chain of launches. Other operations: launches that are MLX's own and no kernel of the engine.\n\n"
    return f"{text}{table(headings, lines)}\n\n{citations}"


def kernels(measurements: Measurements, page: Page) -> str:
    """Every kernel at its real shapes, beside the chain of operations that it replaces."""
    groups = measurements.kernels()
    if not groups:
        return absent("kernels")
    parts = []
    for group, entries in groups.items():
        citations = Citations(page)
        columns: list[tuple[str, Callable[[Any], Any]]] = [
            ("family", lambda row: row["family"]),
            ("kernel", lambda row: row["name"]),
            ("phase", lambda row: row.get("phase")),
            ("shape", lambda row: _shape(row.get("shape"))),
            ("calls a step", lambda row: row.get("calls_per_step")),
            ("µs", lambda row: _scaled(row.get("seconds"), 1e6)),
            ("MLX operations, µs", lambda row: _scaled(row.get("mlx_ops_seconds"), 1e6)),
            ("MLX Metal kernels, µs", lambda row: _scaled(row.get("mlx_metal_seconds"), 1e6)),
            ("reads alone, µs", lambda row: _scaled(row.get("read_only_seconds"), 1e6)),
            ("GB/s", lambda row: _scaled(row.get("bytes_per_s"), 1e-9)),
            ("reads alone / time, %", lambda row: _scaled(row.get("share_of_read_only"), 100)),
            ("share of copy, %", lambda row: _scaled(row.get("share_of_copy"), 100)),
            ("TFLOP/s", lambda row: _scaled(row.get("flops_per_s"), 1e-12)),
            ("share of matrix rate, %", lambda row: _scaled(row.get("share_of_matrix"), 100)),
            ("error", lambda row: row.get("error")),
            ("spread, %", lambda row: _scaled(row.get("spread"), 100)),
        ]
        text = f"{page.heading} {group.title}\n\n"
        for name, words, scale in (
            ("copy_bytes_per_s", "a copy reaches {:,.0f} GB/s", 1e-9),
            ("matrix_flops_per_s", "a matrix product {:,.0f} TFLOP/s", 1e-12),
        ):
            rate = measurements.rate(group.device, name)
            if rate:
                text += sentence(words.format(rate[0] * scale)) + f" [{citations.number(rate[1])}] "
        clocks = sorted({str(entry.result.data.get("clock", "wall")) for entry in entries})
        text += f"Times by the {' or '.join(clocks)} clock. "
        text += "Error: against the float32 reference. A dash: not measured; the file says why.\n\n"
        text += _columns(columns, entries, citations)
        sums = measurements.kernel_sums().get(group, [])
        if sums:
            text += "\n\nSums over all kernels of a decode step or a prefill chunk:\n\n"
            text += _columns(_SUM_COLUMNS, sums, citations)
        parts.append(f"{text}\n\n{citations}")
    return "\n\n".join(parts)


_SUM_COLUMNS: list[tuple[str, Callable[[Any], Any]]] = [
    ("phase", lambda row: row.get("phase")),
    ("rows", lambda row: row.get("rows")),
    ("context", lambda row: row.get("context")),
    ("ms", lambda row: _scaled(row.get("seconds"), 1e3)),
    ("MLX operations, ms", lambda row: _scaled(row.get("mlx_ops_seconds"), 1e3)),
    ("MLX Metal kernels, ms", lambda row: _scaled(row.get("mlx_metal_seconds"), 1e3)),
    ("MLX's operations stand in for", lambda row: ", ".join(row.get("substituted", [])) or None),
]


def _shape(shape: Any) -> str | None:
    if shape is None:
        return None
    if isinstance(shape, dict):
        return ", ".join(
            f"{name} {size:,}" if isinstance(size, int) else f"{name} {size}" for name, size in shape.items()
        )
    return " x ".join(map(str, shape)) if isinstance(shape, (list, tuple)) else str(shape)


def _scaled(value: Any, scale: float) -> float | None:
    return None if value is None else float(value) * scale


def ablations(measurements: Measurements, page: Page) -> str:
    """Every mechanism switched off, with the article's effect beside."""
    groups = measurements.ablations()
    if not groups:
        return absent("ablations")
    parts = []
    for group, entries in groups.items():
        citations = Citations(page)
        columns: list[tuple[str, Callable[[Any], Any]]] = [
            ("mechanism", ablation_name),
            ("without it", lambda row: row.get("replaced_by")),
            ("with, tokens/s", lambda row: row.get("with")),
            ("without, tokens/s", lambda row: row.get("without")),
            ("effect", lambda row: _effect(row["effect"])),
            ("effect of the control", lambda row: _effect(row.get("effect_of_control"))),
            ("effect in the article", lambda row: _effect(row.get("article_effect"))),
            ("spread, %", lambda row: _scaled(row.get("spread"), 100)),
            ("peak GB with", lambda row: _scaled(row.get("peak_memory_bytes"), 1e-9)),
            ("peak GB without", lambda row: _scaled(row.get("peak_memory_bytes_without"), 1e-9)),
        ]
        text = f"{page.heading} {group.title}\n\nThe article's effects were measured on Apple silicon."
        if any("effect_of_control" in entry.row for entry in entries):
            text += (
                " Control: the alternative's own kernels with the mechanism on, against the same kernels without it."
            )
        text += f"\n\n{_columns(columns, entries, citations)}"
        for result in citations.cited:
            for reason in result.data.get("refused", []):
                text += f"\n\nRefused in [{citations.number(result)}]: {reason}"
        parts.append(f"{text}\n\n{citations}")
    return "\n\n".join(parts)


def _columns(
    columns: Sequence[tuple[str, Callable[[Any], Any]]], entries: Sequence[Entry], citations: Citations
) -> str:
    """A table of those columns that have a value in some row, with the number of each row's file."""
    used = [column for column in columns if any(column[1](entry.row) is not None for entry in entries)]
    lines = [[*(value(row) for _, value in used), citations.number(result)] for row, result in entries]
    return table([*(heading for heading, _ in used), "source"], lines)


def batches(measurements: Measurements, page: Page) -> str:
    """Several streams that decode at once, and the first token after a cached prefix."""
    groups = measurements.batches()
    if not groups:
        return absent("batch")
    parts = []
    for group, entries in groups.items():
        citations = Citations(page)
        text = f"{page.heading} {group.title}\n\n"
        streams = [entry for entry in entries if entry.row["phase"] == "decode"]
        if streams:
            text += "One stream takes the single route, more advance together; all rows are of one run.\n\n"
            text += _columns(_STREAM_COLUMNS, streams, citations) + "\n\n"
        for row, result in entries:
            if row["phase"] == "first token":
                text += (
                    f"First token after {row['suffix']} new tokens on {row['length']:,} cached ones: "
                    f"{1e3 * row['seconds']:.2f} ms, {row['decode_steps']:.2f} decode steps of that context "
                    f"[{citations.number(result)}].\n\n"
                )
        parts.append(f"{text}{citations}")
    return "\n\n".join(parts)


_STREAM_COLUMNS: list[tuple[str, Callable[[Any], Any]]] = [
    ("streams", lambda row: row["streams"]),
    ("context", lambda row: row["length"]),
    ("ms for a step", lambda row: 1e3 * row["seconds"]),
    ("tokens/s in all", lambda row: row["tokens_per_s"]),
    ("tokens/s for each", lambda row: row["tokens_per_s"] / row["streams"]),
    ("spread, %", lambda row: _scaled(row.get("spread"), 100)),
]


def _effect(effect: Any) -> str | None:
    number = percent(effect)
    return f"{number:+.1f} %" if number is not None else None if effect is None else str(effect)


def consistency(measurements: Measurements, page: Page) -> str:
    """The same text through two engines; red gates are shown, since there is no speed to refuse."""
    entries = measurements.consistency()
    if not entries:
        return absent("consistency")
    citations = Citations(page)
    lines: list[list[Any]] = []
    published: dict[str, tuple[Any, Result]] = {}
    for row, result in entries:
        model: Model = result.model(row, "tiny")
        gate = "green" if result.gate_problem is None else f"red: {result.gate_problem}"
        # Without a disagreement there is no gap.
        gaps = [row.get("gap_median"), row.get("gap_max")] if row["top1_agreement"] < 1 else [None, None]
        figures = [_ratio(row), 100 * row["top1_agreement"], *gaps]
        place = [model.title, result.device, row["engine"], row["baseline"], row["positions"]]
        lines.append([*place, *figures, gate, citations.number(result)])
        if result.data.get("article"):
            published["the article"] = (result.data["article"], result)
    for name, (row, result) in published.items():
        figures = [_ratio(row), 100 * row["top1_agreement"], None, None]
        lines.append(
            ["", "Apple silicon", name, "mlx_lm", row["positions"], *figures, "as published", citations.number(result)]
        )
    headings = ["model", "device", "engine", "baseline", "positions", "perplexity ratio", "same best token, %"]
    headings += ["gap, median", "gap, largest", "gate", "source"]
    text = "Teacher-forced: both engines predict each next token of the same text. Gap: between the baseline's two "
    text += "best log-probabilities at the positions where the best tokens differ; a small one is a near tie.\n\n"
    if any(row["baseline"] == "transformers" for row, _ in entries):
        text = text.rstrip() + " transformers: its torch model in float32, with the dequantised weights.\n\n"
    return f"{text}{table(headings, lines)}\n\n{citations}"


def _ratio(row: Any) -> str:
    return f"{row['perplexity_ratio']:.5f}"


def plots(page: Page, drawn: Sequence[Plot], prefixes: Sequence[str] = ("",)) -> str:
    """The plots whose names begin with one of the prefixes."""
    chosen = [plot for plot in drawn if plot.name.startswith(tuple(prefixes))]
    images = [f"![{plot.alt}]({page.link(page.plots_folder / f'{plot.name}.svg')})" for plot in chosen]
    return "\n\n".join(images) or "No plot yet: `python -m compare.report` says what is missing."


def sources(measurements: Measurements, page: Page) -> str:
    """Every file that the report accepted."""
    lines = []
    for result in measurements.results:
        checks = result.data["gate"].get("checks", [])
        passed = f"{sum(c.get('passed') is True for c in checks)} of {len(checks)}" if checks else "none"
        names = ", ".join(f"{name} {version}" for name, version in result.data["versions"].items())
        file = f"[`{result.path.name}`]({page.link(result.path)})"
        command = f"`{result.data['command']}`"
        lines.append([file, day(result), result.device, result.data["commit"], names, passed, command])
    text = table(["file", "date", "device", "commit", "versions", "checks passed", "command"], lines)
    if measurements.refused:
        text += "\n\nRefused, since a speed counts only where the run's own checks passed:\n\n"
        refused = [[f"[`{r.path.name}`]({page.link(r.path)})", r.device, reason] for r, reason in measurements.refused]
        text += table(["file", "device", "reason"], refused)
    return text
