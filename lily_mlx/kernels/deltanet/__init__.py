"""Gated DeltaNet between its projections: convolution, gates, delta rule, gated norm."""

from .decode import step
from .prefill import gated_norm, prepare, scan
from .shape import DeltaNetShape

__all__ = ["DeltaNetShape", "gated_norm", "prepare", "scan", "step"]
