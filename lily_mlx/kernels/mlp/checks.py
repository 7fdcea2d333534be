"""Input checks that the wrappers of the gated MLP share."""

from __future__ import annotations

from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.kernels.linear.checks import check_matrix


def check_pair(gate: QuantizedWeight, up: QuantizedWeight) -> None:
    """Checks that two matrices can be read together.

    Raises:
        ValueError: a stack of matrices, or shapes or formats that differ.
    """
    check_matrix(gate)
    if (gate.shape, gate.bits, gate.group_size) != (up.shape, up.bits, up.group_size):
        raise ValueError(
            f"gate is {list(gate.shape)} of {gate.bits} bits in groups of {gate.group_size} and up {list(up.shape)} of "
            f"{up.bits} bits in groups of {up.group_size}; re-encode one of them, they are read together"
        )
