"""Quantised matrix products and what stands directly around them: norms, residuals, embedding."""

from .decode import gated_norm_project_add, norm_project, project_add
from .prefill import embed, matmul, norm_matmul, rms_norm
from .weight import QuantizedWeight

__all__ = [
    "QuantizedWeight",
    "embed",
    "gated_norm_project_add",
    "matmul",
    "norm_matmul",
    "norm_project",
    "project_add",
    "rms_norm",
]
