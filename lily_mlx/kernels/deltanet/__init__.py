"""Gated DeltaNet between its projections: convolution, gates, delta rule, gated norm."""

from .decode import step
from .prefill import gated_norm, prepare, scan
from .shape import DeltaNetShape
from .short import batch_step, short_chunk

__all__ = ["DeltaNetShape", "batch_step", "gated_norm", "prepare", "scan", "short_chunk", "step"]
