"""MLX's own Metal kernels from the installed wheel, run by our runtime."""

from .attention import attention, sdpa_vector, sdpa_vector_2pass
from .quantized import gather_quantized_matvec, quantized_matvec

__all__ = ["gather_quantized_matvec", "quantized_matvec"]
