"""Prompt cache files, which mlx_lm and this package read and write alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lily_mlx.command import existing_file


def save(path: str | Path, cache: list[Any], model: str, tokenizer_config: dict[str, Any]) -> None:
    """Writes a prompt cache with the model's name, as `mlx_lm.cache_prompt` does."""
    from mlx_lm.models.cache import save_prompt_cache

    metadata = {"model": model, "tokenizer_config": json.dumps(tokenizer_config)}
    save_prompt_cache(str(path), cache, metadata)


def load(path: str, model: str | None) -> tuple[list[Any], str, dict[str, Any]]:
    """Reads a prompt cache.

    Args:
        path: the file.
        model: the model that is asked for; None for the one that the file names.

    Returns:
        The caches of the layers, the model's name and the keywords of its tokenizer.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no prompt cache, or it was made with another model.
    """
    existing_file("--prompt-cache-file", path)
    from mlx_lm.models.cache import load_prompt_cache

    try:
        cache, metadata = load_prompt_cache(path, return_metadata=True)
        name, tokenizer_config = metadata["model"], json.loads(metadata["tokenizer_config"])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"--prompt-cache-file {path!r} is not a prompt cache of lily_mlx.cache_prompt or mlx_lm.cache_prompt "
            f"({error!r})"
        ) from error
    if model is not None and model != name:
        raise ValueError(f"--prompt-cache-file {path!r} was made with model {name!r}, not with {model!r}")
    return cache, name, tokenizer_config
