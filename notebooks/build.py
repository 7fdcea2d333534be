"""`python notebooks/build.py`: makes the notebooks from `notebooks/source/*.py` and runs them.

A source is a Python file in the percent format: `# %% [markdown]` begins a cell of text, `# %%` one of code. The
sources are what people edit and review; the notebooks hold the same cells with their outputs. `--check` says whether
the cells of every notebook are those of its source, and runs nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SECONDS = 300  # for one cell


def cells(text: str) -> Iterator[tuple[str, str]]:
    """The kind ("markdown" or "code") and text of each cell of a source."""
    kind, lines = "", []
    for line in [*text.splitlines(), "# %%"]:
        if not line.startswith("# %%"):
            lines.append(line)
            continue
        body = "\n".join(lines).strip("\n")
        if kind == "markdown":
            body = "\n".join(part.removeprefix("#").removeprefix(" ") for part in body.splitlines())
        if kind and body:
            yield kind, body
        kind, lines = "markdown" if "[markdown]" in line else "code", []


def sources() -> list[Path]:
    """All sources, in the order in which they are read."""
    return sorted((HERE / "source").glob("[0-9]*.py"))


def notebook_of(source: Path) -> Path:
    """The notebook that a source becomes."""
    return HERE / f"{source.stem}.ipynb"


def make(source: Path) -> Any:
    """The notebook of a source, without outputs."""
    import nbformat
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    made = [
        (new_markdown_cell if kind == "markdown" else new_code_cell)(text, id=f"cell-{number:02}")
        for number, (kind, text) in enumerate(cells(source.read_text()))
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new_notebook(cells=made, metadata={"kernelspec": kernel})
    nbformat.validate(notebook)
    return notebook


def run(notebook: Any) -> Any:
    """The notebook with its outputs. Raises nbclient's CellExecutionError where a cell fails."""
    from nbclient import NotebookClient

    NotebookClient(
        notebook, timeout=SECONDS, record_timing=False, resources={"metadata": {"path": str(HERE)}}
    ).execute()
    notebook.metadata.pop("language_info", None)  # names the reader's Python, which changes nothing
    return notebook


def is_current(source: Path) -> bool:
    """Whether the notebook exists, has the cells of its source, and was run from top to bottom."""
    import nbformat

    path = notebook_of(source)
    if not path.exists():
        return False
    kept = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in kept.cells if cell.cell_type == "code"]
    same = [(cell.cell_type, cell.source) for cell in kept.cells] == list(cells(source.read_text()))
    return same and counts == list(range(1, len(counts) + 1))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python notebooks/build.py", description=__doc__)
    parser.add_argument("numbers", nargs="*", help="only the notebooks with these numbers, such as 02")
    parser.add_argument("--check", action="store_true", help="compare with the sources, run nothing")
    options = parser.parse_args(arguments)
    chosen = [path for path in sources() if not options.numbers or path.stem[:2] in options.numbers]
    if options.check:
        stale = [path.name for path in chosen if not is_current(path)]
        print(f"run `python notebooks/build.py`: not current are {', '.join(stale)}" if stale else "all current")
        return 1 if stale else 0
    import nbformat

    for source in chosen:
        nbformat.write(run(make(source)), notebook_of(source))
        print(notebook_of(source).name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
