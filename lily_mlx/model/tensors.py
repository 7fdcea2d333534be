"""The tensors of a checkpoint directory: found, named alike and read only when taken."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from .sanitize import sanitize

logger = logging.getLogger("lily_mlx")

INDEX = "model.safetensors.index.json"
_WRAPPERS = ("model", "language_model")
_IGNORED = {
    "vision_tower": "the vision tower",
    "visual": "the vision tower",
    "mtp": "multi-token prediction",
}


def canonical_name(name: str) -> str:
    """A tensor or layer name without the wrappers that differ between checkpoints.

    `language_model.model.layers.0.mlp.gate`, `model.language_model.layers.0.mlp.gate` and
    `model.layers.0.mlp.gate` all become `layers.0.mlp.gate`.
    """
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        parts.pop(0)
    return ".".join(parts)


class CheckpointTensors:
    """The text model's tensors of one checkpoint, by canonical name, in MLX's arrangement (see `sanitize`).

    Opening reads only the headers of the files. `take` hands out each tensor once and keeps nothing, so
    memory holds what the caller holds.

    Args:
        directory: holds the files.
        arrays: names and tensors that stand for the files' contents, if they are in memory already.

    Raises:
        FileNotFoundError: no weights, or a file that the index names is missing.
        ValueError: a file is truncated or is not in safetensors format, or two tensors have one name.
    """

    def __init__(self, directory: Path, arrays: Iterable[tuple[str, mx.array]] | None = None):
        self._arrays: dict[str, mx.array] = {}
        self.original_names: dict[str, str] = {}
        ignored: dict[str, int] = {}
        for path in weight_files(directory) if arrays is None else [directory]:
            for name, array in _read_file(path).items() if arrays is None else arrays:
                canonical = canonical_name(name)
                reason = _IGNORED.get(canonical.split(".")[0])
                if reason is not None:
                    ignored[reason] = ignored.get(reason, 0) + 1
                    continue
                if canonical in self._arrays:
                    other = self.original_names[canonical]
                    raise ValueError(f"{path}: tensor {name} repeats {other}; remove one of the two")
                self._arrays[canonical] = array
                self.original_names[canonical] = name
        sanitize(self._arrays, self.original_names)
        if ignored:
            what = " and ".join(f"{count} tensors of {reason}" for reason, count in ignored.items())
            logger.warning("ignored %s: text generation does not use them", what)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    @property
    def names(self) -> list[str]:
        """Canonical names of the tensors not yet taken."""
        return list(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._arrays[name].shape)

    def dtype(self, name: str) -> mx.Dtype:
        return self._arrays[name].dtype

    def take(self, name: str) -> mx.array:
        """Hands out a tensor, not yet read from its file."""
        return self._arrays.pop(name)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those that its index names, else `model*.safetensors`."""
    index = directory / INDEX
    if not index.exists():
        files = sorted(directory.glob("model*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no model*.safetensors in {str(directory)!r}: is the download complete?")
        return files
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [directory / name for name in sorted(set(weight_map.values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a safetensors index: {error!r}") from error
    missing = [str(path) for path in files if not path.exists()]
    if missing:
        raise FileNotFoundError(f"{index.name} names files that are missing: {', '.join(missing)}. Download them again")
    return files


def _read_file(path: Path) -> dict[str, mx.array]:
    """A file's tensors, unread. Compares header and length, which MLX does only when it reads the data."""
    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is truncated or not a safetensors file ({error}). Download or convert it again"
        ) from error
    arrays: dict[str, mx.array] = mx.load(str(path), format="safetensors")
    return arrays
