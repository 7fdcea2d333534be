"""Qwen3.6 MoE for MLX: a drop-in for `mlx_lm.generate` whose every operation is a Metal kernel of this package."""

__version__ = "0.1.0.dev0"
