"""How many launches MLX puts into a command buffer of Metal.

MLX commits one after 50 launches or 50 MB of inputs at most, and counts the whole array of all experts for each launch
that reads some of them, so that a decode step would be cut at nearly every layer. A step has 253 launches: with these
caps it is two command buffers. MLX reads the caps when it opens the device, so they are set when lily_mlx is imported.
They are reasoned, not measured: `lily_mlx doctor` compares settings on a Mac.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import mlx.core as mx

OPS, MEGABYTES = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"
CHOICE = "LILY_MLX_COMMAND_BUFFERS"  # "mlx" leaves MLX's own caps
CAPS = {OPS: "140", MEGABYTES: "1000000"}


def raise_caps(environment: MutableMapping[str, str] = os.environ) -> None:
    """Raises the caps on Metal, except those that the environment already sets.

    Raises:
        ValueError: LILY_MLX_COMMAND_BUFFERS has a value that it does not know.
    """
    choice = environment.get(CHOICE, "")
    if choice not in ("", "mlx"):
        raise ValueError(f"{CHOICE}={choice}: give 'mlx' to keep MLX's own caps, or leave it unset")
    if choice == "mlx" or not mx.metal.is_available():
        return
    for name, value in CAPS.items():
        environment.setdefault(name, value)
