"""The shape of an attention layer and its key/value cache."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

TAIL_ROWS = 128
MAX_GROUP = 16
MAX_HEAD_DIM = 256
_SMALLEST_CAPACITY = 256
_CAPACITY_STEP = 8192


@dataclass(frozen=True)
class AttentionShape:
    """Gated grouped-query attention with a partial rotary embedding (Qwen3.5 and Qwen3.6).

    Attributes:
        query_heads: Hq (config ``num_attention_heads``).
        kv_heads: Hkv (config ``num_key_value_heads``); Hq / Hkv query heads share one of them.
        head_dim: D (config ``head_dim``), a multiple of 32.
        rotary_dim: R, the first dimensions of a head that rotate (``head_dim * partial_rotary_factor``), even.
        rope_theta: base of the rotary frequencies (config ``rope_theta``).

    Raises:
        ValueError: a size that the kernels do not support.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.query_heads < 1 or self.query_heads % self.kv_heads:
            raise ValueError(
                f"attention: query_heads {self.query_heads} must be a positive multiple of kv_heads {self.kv_heads}"
            )
        if self.group > MAX_GROUP:
            raise ValueError(
                f"attention: {self.group} query heads for each KV head; the kernels support at most {MAX_GROUP}"
            )
        if self.head_dim < 32 or self.head_dim % 32 or self.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"attention: head_dim {self.head_dim} must be a multiple of 32 and at most {MAX_HEAD_DIM}")
        if self.rotary_dim < 0 or self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                f"attention: rotary_dim {self.rotary_dim} must be even and at most head_dim {self.head_dim}"
            )
        if not self.rope_theta > 1.0:
            raise ValueError(f"attention: rope_theta {self.rope_theta} must be greater than 1")

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads

    @property
    def projection_width(self) -> int:
        """P, columns of the joined projection: per query head D query and D gate columns, then keys, then values."""
        return self.value_offset + self.kv_heads * self.head_dim

    @property
    def key_offset(self) -> int:
        """First key column of the joined projection."""
        return self.query_heads * 2 * self.head_dim

    @property
    def value_offset(self) -> int:
        """First value column of the joined projection."""
        return self.key_offset + self.kv_heads * self.head_dim


@dataclass(frozen=True)
class KVCache:
    """Keys and values of one sequence in one layer; an immutable value, so that a snapshot is a reference.

    For a sequence of n tokens the first n - n % TAIL_ROWS rows are in ``keys`` and ``values``, the last
    n % TAIL_ROWS in the tail, which alone is new at each decode step. Rows beyond are undefined: they may hold
    NaN and nothing reads them.

    Attributes:
        keys, values: bfloat16 [Hkv, capacity, D], capacity at least TAIL_ROWS.
        tail_keys, tail_values: bfloat16 [Hkv, TAIL_ROWS, D].
    """

    keys: mx.array
    values: mx.array
    tail_keys: mx.array
    tail_values: mx.array

    @property
    def capacity(self) -> int:
        """Rows of ``keys`` and ``values``."""
        return int(self.keys.shape[1])


def capacity_for(length: int) -> int:
    """Rows to allocate for a sequence of ``length`` tokens.

    Powers of two from 256 to 8,192, then multiples of 8,192: a compiled step is traced again only when the
    capacity changes, so at most 6 times up to 8,192 tokens and once for each 8,192 tokens after that, and no more
    than half of a small cache or 8,191 rows of a large one are unused.

    Raises:
        ValueError: negative length.
    """
    if length < 0:
        raise ValueError(f"attention: a cache cannot hold {length} tokens")
    if length > _CAPACITY_STEP:
        return -(-length // _CAPACITY_STEP) * _CAPACITY_STEP
    return max(_SMALLEST_CAPACITY, 1 << (length - 1).bit_length())


def empty_cache(shape: AttentionShape) -> KVCache:
    """The cache of a sequence without tokens."""
    main = mx.zeros((shape.kv_heads, capacity_for(0), shape.head_dim), mx.bfloat16)
    tail = mx.zeros((shape.kv_heads, TAIL_ROWS, shape.head_dim), mx.bfloat16)
    return KVCache(main, main, tail, tail)
