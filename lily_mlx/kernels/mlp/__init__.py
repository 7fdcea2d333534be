"""Gated MLP of the dense models: gate and up projections with SwiGLU. Its down projection is a linear kernel."""

from .decode import gate_up_step
from .prefill import gate_up_chunk

__all__ = ["gate_up_chunk", "gate_up_step"]
