"""Template values that every Gated DeltaNet kernel takes."""

from __future__ import annotations

from .shape import DeltaNetShape


def layer_template(shape: DeltaNetShape) -> dict[str, int]:
    """The layer's heads and head sizes."""
    return {"HK": shape.key_heads, "HV": shape.value_heads, "DK": shape.key_dim, "DV": shape.value_dim}
