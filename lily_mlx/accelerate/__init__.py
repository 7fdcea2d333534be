"""mlx_lm's model interface over the kernels: models, caches and files that mlx_lm's own tools can use."""

from __future__ import annotations

from typing import Any

__all__ = ["accelerate"]


def accelerate(model: Any) -> Any:
    """Makes a model that mlx_lm loaded compute with the kernels of this package.

    The result has the interface of the model (`__call__`, `make_cache`, `layers`, `parameters`, ...), so that
    mlx_lm's generate, server, chat, benchmark, perplexity and evaluate take it as it is::

        model, tokenizer = mlx_lm.load("mlx-community/Qwen3.6-35B-A3B-4bit")
        mlx_lm.generate(lily_mlx.accelerate(model), tokenizer, "Why is the sky blue?")

    Args:
        model: from `mlx_lm.load`. It computes what it did and shares its large arrays with the result: they become
            views of the arrays that the kernels read. LoRA adapters are fused into the result.

    Returns:
        The accelerated model; `model` itself, after a notice with the reason, if the kernels do not run it.
    """
    from .model import accelerate as accelerate_model

    return accelerate_model(model)
