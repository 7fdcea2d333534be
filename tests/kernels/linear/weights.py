"""Weights that the linear tests share."""

import mlx.core as mx
import numpy as np

from lily_mlx.kernels.linear import QuantizedWeight


def integer_weight(codes, group_size=32):
    """A weight whose values are the codes themselves, 8 bits."""
    rows, columns = codes.shape
    return QuantizedWeight.pack(
        mx.array(codes.astype(np.uint8).view(np.uint32)),
        mx.ones((rows, columns // group_size), mx.bfloat16),
        mx.zeros((rows, columns // group_size), mx.bfloat16),
        8,
        group_size,
    )
