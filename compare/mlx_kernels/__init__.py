"""MLX's own Metal kernels, from the headers of the installed wheel, run by our runtime.

They are the baseline of `compare.kernels` on GPUs that are not Apple's, and they show that the runtime runs
Metal text that was not written for it. Each function takes and returns `mx.array` and launches what MLX's
host code would launch on an Apple GPU (before the M5, whose kernels use its matrix units).

The wheel's headers have no rms_norm, no rope and no attention for prefill of head dimension 256: MLX ships
the first two in its compiled library only, and has no such attention before the M5.

Kernels with `simdgroup_matrix` are right everywhere, but on an NVIDIA GPU their 8 x 8 products of float32 are
made of three products of TF32, so their times there say little about Apple's.
"""

from .attention import decode_attention, sdpa_vector, sdpa_vector_2pass
from .delta import gated_delta_update
from .quantized import (
    gather_quantized_matmul_sorted,
    gather_quantized_matvec,
    quantized_matmul,
    quantized_matvec,
)
from .rows import cumulative_sum, softmax, sort

__all__ = [
    "cumulative_sum",
    "decode_attention",
    "gated_delta_update",
    "gather_quantized_matmul_sorted",
    "gather_quantized_matvec",
    "quantized_matmul",
    "quantized_matvec",
    "sdpa_vector",
    "sdpa_vector_2pass",
    "softmax",
    "sort",
]
