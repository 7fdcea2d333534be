"""README.md, whose marked blocks are replaced, and docs/measurements.md, which is written whole."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from . import tables
from .figures import Figures
from .sources import Measurements, ReportError

README, DOCUMENT, PLOTS = Path("README.md"), Path("docs/measurements.md"), Path("docs/plots")
README_PLOTS = ("prefill", "decode", "launches", "ablations")
END = "<!-- end -->"
MARKER = re.compile(r"<!-- (?:generated: (?P<name>[\w-]+)|end) -->")


def readme_blocks(measurements: Measurements, figures: Figures, root: Path) -> dict[str, str]:
    """The README's blocks by the names in its markers."""
    page = tables.Page(root / README.parent, root / PLOTS)
    return {
        "devices": tables.devices(measurements, page),
        "plots": tables.plots(page, figures.plots, README_PLOTS),
        "sweep": tables.sweep(measurements, page),
        "batch": tables.batches(measurements, page),
        "launches": tables.launches(measurements, page),
        "consistency": tables.consistency(measurements, page),
        "ablations": tables.ablations(measurements, page),
    }


def replace_blocks(text: str, blocks: Mapping[str, str], name: str) -> str:
    """`text` with what stands between each pair of markers replaced; everything else is untouched.

    Raises:
        ReportError: a marker is missing, unknown, repeated or not closed.
    """
    pieces, position, seen = [], 0, set[str]()
    markers = list(MARKER.finditer(text))
    while markers:
        start = markers.pop(0)
        block = start["name"]
        if block is None:
            raise ReportError(f"{name}: a '{END}' has no '<!-- generated: ... -->' before it; remove it")
        if block not in blocks:
            known = ", ".join(blocks)
            raise ReportError(f"{name}: nothing generates a block {block!r}; the blocks are {known}")
        if block in seen:
            raise ReportError(f"{name}: the block {block!r} stands there twice; remove one")
        if not markers or markers[0]["name"] is not None:
            raise ReportError(f"{name}: the block {block!r} is not closed; add a line '{END}' after it")
        end = markers.pop(0)
        pieces += [text[position : start.end()], f"\n\n{blocks[block]}\n\n", end[0]]
        position = end.end()
        seen.add(block)
    missing = [block for block in blocks if block not in seen]
    if missing:
        lines = "".join(f"\n<!-- generated: {block} -->\n{END}" for block in missing)
        raise ReportError(f"{name} has no place for {', '.join(missing)}; add these lines where they belong:{lines}")
    return "".join([*pieces, text[position:]])


def document(measurements: Measurements, figures: Figures, root: Path) -> str:
    """docs/measurements.md."""
    page = tables.Page(root / DOCUMENT.parent, root / PLOTS, full=True, heading="###")
    parts = [
        "# Measurements",
        "<!-- Written by `python -m compare.report`; changes made here are lost. -->",
        tables.devices(measurements, page),
        "A speed counts only where the run's own correctness checks passed. Where several files measure the same "
        "thing, the newest of them counts.",
        "## Prefill and decode",
        tables.plots(page, figures.plots, ("prefill", "decode", "ratio")),
        tables.sweep(measurements, page),
        "## mlx-lm's loop on our kernels",
        "Decode by `mlx_lm.generate` on a model that `lily_mlx.accelerate` returned, beside `lily_mlx.generate`: tokens "
        "per second, measured side by side.",
        tables.loops(measurements, page),
        "## Several streams at once",
        tables.batches(measurements, page),
        "## Decode and the bandwidth floor",
        *([tables.plots(page, figures.plots, ("floor",))] if _has(figures, "floor") else []),
        tables.floor(measurements, page),
        "## Launches",
        *([tables.plots(page, figures.plots, ("launches",))] if _has(figures, "launches") else []),
        tables.launches(measurements, page),
        "## Kernels",
        tables.kernels(measurements, page),
        "## Mechanisms switched off, one at a time",
        *([tables.plots(page, figures.plots, ("ablations",))] if _has(figures, "ablations") else []),
        tables.ablations(measurements, page),
        "## Numerical consistency",
        tables.consistency(measurements, page),
        "## Files",
        tables.sources(measurements, page),
    ]
    if figures.missing:
        parts += ["## Missing", "\n".join(f"- {tables.sentence(message)}" for message in figures.missing)]
    return "\n\n".join(parts) + "\n"


def _has(figures: Figures, prefix: str) -> bool:
    return any(plot.name.startswith(prefix) for plot in figures.plots)
