"""Shapes at which kernels are checked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lily_mlx.kernels.attention import AttentionShape
from lily_mlx.kernels.deltanet import DeltaNetShape

EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """A model's shapes, and the lengths that are tried with them.

    Attributes:
        label: for messages.
        hidden: width H of the residual stream.
        attention, deltanet: shapes of the two kinds of layers.
        experts: routed experts of a layer, with their weights.
        top_k: experts of a token.
        expert_size: intermediate size I of an expert.
        mlp_size: intermediate size of a gated MLP, which stands in place of the experts in dense models.
        vocabulary: tokens V.
        rows: sizes of chunks.
        contexts: tokens before a step or a chunk.
    """

    label: str
    hidden: int
    attention: AttentionShape
    deltanet: DeltaNetShape
    experts: int
    top_k: int
    expert_size: int
    mlp_size: int
    vocabulary: int
    rows: tuple[int, ...]
    contexts: tuple[int, ...]


FULL = Sizes(
    label="Qwen3.6-35B-A3B",
    hidden=2048,
    attention=AttentionShape(16, 2, 256, 64, 1e7),
    deltanet=DeltaNetShape(16, 32, 128, 128, 4),
    experts=256,
    top_k=8,
    expert_size=512,
    mlp_size=6144,
    vocabulary=248_320,
    rows=(1, 9, 64, 512, 1000, 1300, 2048),  # experts have as many rows as each height of a tile
    contexts=(0, 300, 4096, 32_768),
)
# The same kernels with fewer weights: what the engine can afford to try before its first token.
SHORT = replace(
    FULL,
    label="Qwen3.6-35B-A3B, few weights",
    experts=32,
    vocabulary=4096,
    rows=(5, 9, 64, 100, 300),
    contexts=(300, 4096),
)
SMALL = Sizes(
    label="small",
    hidden=256,
    attention=AttentionShape(8, 1, 256, 64, 1e7),
    deltanet=DeltaNetShape(2, 4, 128, 128, 4),
    experts=16,
    top_k=4,
    expert_size=64,
    mlp_size=192,
    vocabulary=2048,
    rows=(5, 9, 72),
    contexts=(0, 120, 1100),  # a chunk completes a block after 120; after 1100 its keys are shared in parts
)
