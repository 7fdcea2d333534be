"""What the notebooks share: the repository on the path, the cpu backend, a few conversions and one plot style."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import mlx.core as mx
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "lily_mlx" / "checkpoints" / "tiny"
sys.path.insert(0, str(ROOT))

from lily_mlx import metal
from lily_mlx.metal import backend as _backend

warnings.filterwarnings("ignore", "IProgress not found")  # progress bars are text here

BLUE, ORANGE, PURPLE, GREY, GREEN, RED = "#0969da", "#bc4c00", "#8250df", "#57606a", "#1a7f37", "#a40e26"

plt.rcParams.update(
    {
        "figure.figsize": (7.5, 3.6),
        "figure.dpi": 100,
        "font.size": 11,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": "#d8dee4",
        "legend.frameon": False,
    }
)


def use_cpu() -> None:
    """Runs every kernel of the notebook on the cpu backend, so that it needs no GPU and prints the same everywhere."""
    metal.use_backend("cpu").__enter__()
    assert _backend.current_backend() == "cpu"


def tiny_model() -> Any:
    """The bundled checkpoint as the engine's model."""
    from lily_mlx.model import Model

    return Model.load(TINY)


def held_out_tokens(count: int) -> list[int]:
    """The first tokens of a text that the bundled checkpoint was not trained on."""
    from mlx_lm.utils import load_tokenizer

    text = (TINY / "heldout.txt").read_text()[: 16 * count]
    return list(load_tokenizer(TINY).encode(text)[:count])


def bf16(values: np.ndarray) -> mx.array:
    """Values rounded to bfloat16, as an MLX array."""
    return mx.array(np.asarray(values, np.float32)).astype(mx.bfloat16)


def to_numpy(array: mx.array) -> np.ndarray:
    """An MLX array in float64; integers stay integers."""
    if mx.issubdtype(array.dtype, mx.floating):
        return np.array(array.astype(mx.float32)).astype(np.float64)
    return np.array(array)


def relative_error(got: Any, want: np.ndarray) -> float:
    """max |got - want| / max |want|."""
    values = to_numpy(got) if isinstance(got, mx.array) else np.asarray(got, np.float64)
    return float(np.abs(values - want).max() / np.abs(want).max())


def norm_error(got: Any, want: np.ndarray) -> float:
    """||got - want|| / ||want||, which counts every value and not the largest alone."""
    values = to_numpy(got) if isinstance(got, mx.array) else np.asarray(got, np.float64)
    return float(np.linalg.norm(values - want) / np.linalg.norm(want))


def newest_result(kind: str, having: Any = None) -> dict[str, Any] | None:
    """The newest file of `compare/results` of a kind, for which `having(result)` holds; None if there is none."""
    found = []
    for path in sorted((ROOT / "compare" / "results").glob("*.json")):
        result = json.loads(path.read_text())
        if result["kind"] == kind and (having is None or having(result)):
            found.append((result["date"], path.name, result))
    if not found:
        return None
    _, name, result = max(found, key=lambda item: item[:2])
    return {"file": name, **result}


def table(headings: list[str], rows: list[list[Any]]) -> None:
    """Prints rows under headings, numbers to the right."""
    text = [[f"{cell:,.4g}" if isinstance(cell, float) else f"{cell:,}" if isinstance(cell, int) else str(cell)
             for cell in row] for row in rows]  # fmt: skip
    widths = [max(len(row[i]) for row in [headings, *text]) for i in range(len(headings))]
    numbers = [isinstance(cell, (int, float)) for cell in rows[0]]
    for row in [headings, ["-" * w for w in widths], *text]:
        print("  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numbers, strict=True)).rstrip())


def front_end_findings(launch: Any, arrays: list[mx.array]) -> list[str]:
    """What the Metal front end says of the kernels that `launch(*arrays)` launches; empty if they pass.

    The texts are those that MLX would hand to Apple's compiler. Nothing runs.
    """
    from lily_mlx.metal.check import check_texts
    from lily_mlx.metal.check.texts import exact_text, record, sources

    with metal.use_backend("metal", tracing=True):
        recorded = record(launch, arrays)
    texts = [exact_text(name, text, sources()) for text, name in recorded]
    assert texts, "nothing was launched"
    return [str(finding) for result in check_texts(texts) for finding in result.findings]
