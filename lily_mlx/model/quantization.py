"""Joins weights by rows; parts with other bits or groups are re-encoded without loss.

MLX's affine quantisation is `value = scale * code + bias` for each group of columns, and a row's codes
are one stream of bits in uint32 words, lowest bits first (`mx.quantize`). A code keeps its value in a
wider field, and a group keeps its scale when it is split, so both changes are exact. A weight that is not quantised
has 16 bits; a quantised one that is joined with it becomes the values that it stands for, rounded to bfloat16 as the
matrix products of a chunk round them too.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.kernels.linear.weight import BFLOAT16_BITS, NO_GROUPS

_BLOCK = 32  # codes of any width fill a whole number of words every 32 codes


def join_rows(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenates weights [N_i, K] by rows, in the widest bits and the smallest group among them."""
    parts = alike(parts)
    bits, group_size = parts[0].bits, parts[0].group_size
    if bits == BFLOAT16_BITS:
        return QuantizedWeight.from_bfloat16(mx.concatenate([part.values for part in parts]))
    return QuantizedWeight.pack(
        mx.concatenate([part.weight for part in parts]),
        mx.concatenate([part.scales for part in parts]),
        mx.concatenate([part.biases for part in parts]),
        bits,
        group_size,
    )


def alike(parts: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """The weights in one encoding: the widest bits and the smallest group among them."""
    bits = max(part.bits for part in parts)
    group_size = NO_GROUPS if bits == BFLOAT16_BITS else min(part.group_size for part in parts)
    return [reencode(part, bits, group_size) for part in parts]


def take_rows(weight: QuantizedWeight, rows: Sequence[int]) -> QuantizedWeight:
    """The matrix of these rows of a weight [N, K], in their order."""
    index = mx.array(list(rows), mx.uint32)
    arrays = {name: array[index] for name, array in weight.arrays.items()}
    if not weight.is_quantized:
        return QuantizedWeight.from_bfloat16(arrays["weight"])
    return QuantizedWeight.pack(**arrays, bits=weight.bits, group_size=weight.group_size)


def reencode(weight: QuantizedWeight, bits: int, group_size: int) -> QuantizedWeight:
    """The same values with at least as many bits and at most as large groups, or in bfloat16."""
    if bits == BFLOAT16_BITS and weight.is_quantized:
        scales, biases = weight.scales.astype(mx.float32), weight.biases.astype(mx.float32)
        values = mx.dequantize(weight.weight, scales, biases, group_size=weight.group_size, bits=weight.bits)
        return QuantizedWeight.from_bfloat16(values.astype(mx.bfloat16))
    if bits < weight.bits or group_size > weight.group_size:
        raise ValueError(
            f"{weight.bits} bits in groups of {weight.group_size} cannot become {bits} bits in groups of "
            f"{group_size} without loss"
        )
    if (bits, group_size) == (weight.bits, weight.group_size):
        return weight
    words, scales, biases = weight.weight, weight.scales, weight.biases
    if bits != weight.bits:
        words = pack_codes(unpack_codes(words, weight.bits), bits)
    if group_size != weight.group_size:
        repeats = weight.group_size // group_size
        scales, biases = mx.repeat(scales, repeats, axis=-1), mx.repeat(biases, repeats, axis=-1)
    return QuantizedWeight.pack(words, scales, biases, bits, group_size)


def unpack_codes(words: mx.array, bits: int) -> mx.array:
    """uint32 [..., K*bits/32] to one code per element, uint32 [..., K]."""
    blocks = words.reshape(*words.shape[:-1], -1, bits)
    codes = []
    for i in range(_BLOCK):
        word, shift = divmod(i * bits, 32)
        code = blocks[..., word] >> shift
        if shift + bits > 32:
            code = code | (blocks[..., word + 1] << (32 - shift))
        codes.append(code & ((1 << bits) - 1))
    return mx.stack(codes, axis=-1).reshape(*words.shape[:-1], -1)


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """The inverse of `unpack_codes`; K is a multiple of 32."""
    blocks = codes.reshape(*codes.shape[:-1], -1, _BLOCK)
    words = [mx.zeros(blocks.shape[:-1], mx.uint32)] * bits
    for i in range(_BLOCK):
        word, shift = divmod(i * bits, 32)
        words[word] = words[word] | (blocks[..., i] << shift)
        if shift + bits > 32:
            words[word + 1] = words[word + 1] | (blocks[..., i] >> (32 - shift))
    return mx.stack(words, axis=-1).reshape(*codes.shape[:-1], -1)
