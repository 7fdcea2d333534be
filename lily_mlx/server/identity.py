"""What the values of a snapshot depend on besides the tokens."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import mlx.core as mx

import lily_mlx
from lily_mlx.metal import current_backend

_TEXTS = (".metal", ".h", ".cuh", ".cpp")


def identity(model: Path, adapters: str | Path | None = None) -> str:
    """Names a model, the software and the device, as far as they decide the values of a snapshot.

    Two checkpoints have different names if their `config.json` differs, or the name, size or time of change of a
    weight file. The contents of weight files are not read.

    Args:
        model: directory of the checkpoint.
        adapters: directory of LoRA adapters.
    """
    parts = {
        "config": _digest([model / "config.json"]),
        "weights": _listing(model),
        "adapters": _listing(Path(adapters)) if adapters is not None else None,
        "adapter_config": _digest([Path(adapters) / "adapter_config.json"]) if adapters is not None else None,
        "keys_and_values": "bfloat16",
        "kernels": _kernel_texts(),
        "software": [lily_mlx.__version__, mx.__version__],
        "backend": current_backend(),
    }
    return json.dumps(parts, sort_keys=True)


def _listing(directory: Path) -> list[list[str | int]]:
    files = sorted(directory.glob("*.safetensors"))
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _kernel_texts() -> str:
    """A digest of the texts of all kernels: the numerics of a version under development change with them."""
    package = Path(lily_mlx.__file__).parent
    return _digest(sorted(path for path in package.rglob("*") if path.suffix in _TEXTS))


def _digest(paths: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        contents = path.read_bytes() if path.exists() else b""
        digest.update(f"{path.name} {len(contents)} ".encode() + contents)
    return digest.hexdigest()
