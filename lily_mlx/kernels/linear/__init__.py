"""Quantised matrix products and what stands directly around them: norms, residuals, embedding."""

from .weight import QuantizedWeight

__all__ = ["QuantizedWeight"]
