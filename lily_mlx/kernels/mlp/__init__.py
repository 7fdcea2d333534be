"""Gated MLP of the dense models: gate and up projections with SwiGLU. Its down projection is a linear kernel.

It is one expert that every row takes, so its loops (`experts.h`, `grouped.h`) and its tiles (`policy.py`) are those of
`lily_mlx.kernels.moe`.
"""

from .decode import gate_up_step
from .prefill import gate_up_chunk

__all__ = ["gate_up_chunk", "gate_up_step"]
