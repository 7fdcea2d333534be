"""Qwen3.6 MoE for MLX: a drop-in for `mlx_lm.generate` that computes with Metal kernels of its own."""

__version__ = "0.1.0.dev0"
