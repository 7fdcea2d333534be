"""Every notebook has the cells of its source, and runs from top to bottom."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("nbclient", reason="the notebooks need the extra 'notebooks'")
pytest.importorskip("ipykernel", reason="the notebooks need the extra 'notebooks'")
pytest.importorskip("matplotlib", reason="the notebooks need the extra 'notebooks'")

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def load_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks_build", NOTEBOOKS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILD = load_build()
SOURCES = BUILD.sources()


def test_there_are_seven() -> None:
    assert [path.stem[:2] for path in SOURCES] == [f"{number:02}" for number in range(1, 8)]


def test_cells_of_a_source() -> None:
    text = "# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nx = 1\n\n\n# %%\nprint(x)\n"
    assert list(BUILD.cells(text)) == [("markdown", "# Title\n\nText."), ("code", "x = 1"), ("code", "print(x)")]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_is_current(source: Path) -> None:
    assert BUILD.is_current(source), "run `python notebooks/build.py`"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_kept_outputs(source: Path) -> None:
    """The outputs in the repository hold a figure or a table, no error, and no path of the machine."""
    notebook = json.loads(BUILD.notebook_of(source).read_text())
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert [output for output in outputs if "image/png" in output.get("data", {})]
    assert str(NOTEBOOKS.parent) not in json.dumps(outputs)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_runs(source: Path) -> None:
    notebook = BUILD.run(BUILD.make(source))
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
