"""`python -m compare.report`: README tables, docs/measurements.md and docs/plots/ from compare/results/*.json.

Results of several runs merge: for each device, model, phase, length and engine the newest green result counts.
A result with speeds whose gate is not green is refused. With --check nothing is written, and the exit status
is 1 if a page or a plot is not what the result files give.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import plots, results
from .figures import Figures, figures
from .pages import DOCUMENT, PLOTS, README, document, readme_blocks, replace_blocks
from .sources import Measurements, ReportError, read

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Report:
    """What the result files give."""

    root: Path
    measurements: Measurements
    figures: Figures
    pages: dict[Path, str]

    @classmethod
    def of(cls, results_directory: Path, root: Path) -> Report:
        """Reads the results and makes the pages, without writing anything.

        Raises:
            ReportError: a result file or the README's markers are not as they should be.
        """
        measurements = Measurements.of(read(results_directory.resolve()))
        drawn = figures(measurements)
        readme = root / README
        if not readme.exists():
            raise ReportError(f"{readme} does not exist; --root names the folder that holds it")
        blocks = readme_blocks(measurements, drawn, root)
        pages = {
            README: replace_blocks(readme.read_text(), blocks, str(README)),
            DOCUMENT: document(measurements, drawn, root),
        }
        return cls(root, measurements, drawn, pages)

    def stale_pages(self) -> list[Path]:
        return [
            p for p, text in self.pages.items() if not (self.root / p).exists() or (self.root / p).read_text() != text
        ]

    def stale_plots(self) -> list[plots.Plot]:
        """Plots whose files are missing or show other data."""
        folder = self.root / PLOTS

        def is_current(plot: plots.Plot) -> bool:
            mark = plots.fingerprint(plot)
            return all(plots.stored_fingerprint(folder / f"{plot.name}.{form}") == mark for form in plots.FORMATS)

        return [plot for plot in self.figures.plots if not is_current(plot)]

    def leftover_plots(self) -> list[Path]:
        """Generated files in docs/plots/ that nothing generates any more."""
        wanted = {f"{plot.name}.{form}" for plot in self.figures.plots for form in plots.FORMATS}
        found = [path for form in plots.FORMATS for path in sorted((self.root / PLOTS).glob(f"*.{form}"))]
        return [PLOTS / path.name for path in found if path.name not in wanted and plots.stored_fingerprint(path)]

    def write(self) -> list[Path]:
        """Brings pages and plots up to date and returns the paths that changed."""
        changed = [path for plot in self.stale_plots() for path in plots.save(plot, self.root / PLOTS)]
        for path in self.leftover_plots():
            (self.root / path).unlink()
        for path in self.stale_pages():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(self.pages[path])
            changed.append(self.root / path)
        return changed


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="compare.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    directory = Path(os.environ.get("LILY_MLX_RESULTS", results.RESULTS))
    parser.add_argument("--results", type=Path, default=directory, help="folder of result files (%(default)s)")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and docs/ (%(default)s)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if anything is out of date")
    options = parser.parse_args(argv)
    try:
        report = Report.of(options.results, options.root.resolve())
    except ReportError as error:
        raise SystemExit(f"compare.report: {error}") from error
    for result, reason in report.measurements.refused:
        print(f"refused: {result.path}: no speed is reported, its gate is not green ({reason})", file=sys.stderr)
    for message in report.figures.missing:
        print(f"missing: {message}", file=sys.stderr)
    if options.check:
        stale = [str(path) for path in (*report.stale_pages(), *report.leftover_plots())]
        stale += [str(PLOTS / plot.name) for plot in report.stale_plots()]
        if stale:
            raise SystemExit(f"out of date: {', '.join(stale)}; run `python -m compare.report`")
        print("README.md, docs/measurements.md and docs/plots/ are what the result files give")
        return
    try:
        changed = report.write()
    except ImportError as error:
        raise SystemExit(f"the plots need matplotlib ({error}): pip install 'lily_mlx[plot]'") from error
    lines = [[str(path.relative_to(report.root)), path.stat().st_size] for path in changed]
    print(results.table(["written", "bytes"], lines) if lines else "nothing changed")


if __name__ == "__main__":
    main()
