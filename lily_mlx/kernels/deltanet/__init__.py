"""Gated DeltaNet between its projections: convolution, gates, delta rule, gated norm."""

from .decode import batch_step, step
from .prefill import gated_norm, prepare, scan
from .shape import DeltaNetShape

__all__ = ["DeltaNetShape", "batch_step", "gated_norm", "prepare", "scan", "step"]
