"""Qwen3.6 MoE for MLX: a drop-in for `mlx_lm.generate` that computes with Metal kernels of its own."""

from .api import load
from .generate import generate, stream_generate

__version__ = "0.1.0.dev0"

__all__ = ["__version__", "generate", "load", "stream_generate"]
