"""A checkpoint with random weights of a model's exact shapes, made on the device.

Speed depends on shapes and on the spread of the routing, not on what the weights say, and the real
checkpoint is 19.5 GB. Codes are uniform random; scales keep activations near unit size through any number
of layers, router logits near unit variance (so the experts are spread) and decay near a trained model's.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

EMBEDDING_DEVIATION = 1.0
LOGITS_DEVIATION = 3.0


def arrays(config: dict[str, Any], seed: int = 0) -> Iterator[tuple[str, mx.array]]:
    """Yields the tensors of an MLX checkpoint by their names in mlx-lm's model, unevaluated.

    Args:
        config: the contents of config.json, with a "quantization" entry.
        seed: the same seed gives the same weights in every engine.
    """
    from .mlx_lm_trace import build

    parameters = dict(tree_flatten(build(config).parameters()))
    layers = config.get("text_config", config)["num_hidden_layers"]
    for name, like in parameters.items():
        key = mx.random.key(seed ^ zlib.crc32(name.encode()))
        path, _, part = name.rpartition(".")
        if path + ".scales" in parameters:
            groups = parameters[path + ".scales"]
            yield name, _quantized_part(path, part, like, groups, config, layers, key, seed)
        else:
            yield name, _plain(name, like, key)


def _quantized_part(
    path: str,
    part: str,
    like: mx.array,
    groups: mx.array,
    config: dict[str, Any],
    layers: int,
    key: mx.array,
    seed: int,
) -> mx.array:
    if part == "weight":
        # `randint` draws from 24-bit floats, so a word is made of two halves.
        high, low = (mx.random.randint(0, 2**16, like.shape, dtype=mx.uint32, key=k) for k in mx.random.split(key))
        return (high << 16) | low
    settings = {**config["quantization"], **(config["quantization"].get(path) or {})}
    bits = settings["bits"]
    columns = groups.shape[-1] * settings["group_size"]
    deviation = 1 / math.sqrt(columns)
    if path.endswith(("out_proj", "o_proj", "down_proj")):
        deviation /= math.sqrt(2 * layers)
    elif path.endswith("embed_tokens"):
        deviation = EMBEDDING_DEVIATION
    elif path.endswith("lm_head"):
        deviation *= LOGITS_DEVIATION
    # A uniform code of `bits` bits has the standard deviation 2^bits / sqrt(12).
    scale_key = mx.random.key(seed ^ zlib.crc32(f"{path}.scales".encode()))
    spread = mx.random.uniform(0.5, 1.5, like.shape, key=scale_key)
    scales = (spread * (deviation * math.sqrt(12) / 2**bits)).astype(mx.bfloat16)
    if part == "scales":
        return scales
    return (scales * (-(2**bits - 1) / 2)).astype(mx.bfloat16)


def _plain(name: str, like: mx.array, key: mx.array) -> mx.array:
    if name.endswith("A_log"):
        return mx.log(mx.random.uniform(1.0, 16.0, like.shape, key=key))
    if name.endswith("dt_bias"):
        return mx.random.uniform(-6.0, -2.0, like.shape, key=key).astype(mx.bfloat16)
    noise = mx.random.normal(like.shape, key=key)
    if name.endswith("conv1d.weight"):
        return (0.5 * noise).astype(mx.bfloat16)
    return (1.0 + 0.1 * noise).astype(mx.bfloat16)
