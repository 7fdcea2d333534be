"""Qwen3.6 and its family for MLX: a drop-in for `mlx_lm.generate` that computes with Metal kernels of its own."""

import warnings

from .metal.command_buffers import raise_caps

raise_caps()  # before anything opens the device

from .accelerate import accelerate  # noqa: E402
from .api import batch_generate, generate_step, load  # noqa: E402
from .generate import generate, stream_generate  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "accelerate",
    "batch_generate",
    "generate",
    "generate_step",
    "load",
    "stream_generate",
]

# `python -m lily_mlx.generate` runs a module that is imported above, which does no harm: both only define names.
warnings.filterwarnings("ignore", r"'lily_mlx\.generate' found in sys\.modules", RuntimeWarning)
