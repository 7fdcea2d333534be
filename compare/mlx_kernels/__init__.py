"""MLX's own Metal kernels from the installed wheel, run by our runtime."""

from .quantized import gather_quantized_matvec, quantized_matvec

__all__ = ["gather_quantized_matvec", "quantized_matvec"]
