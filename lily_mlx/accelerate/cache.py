"""Caches with mlx_lm's protocol that hold the engine's immutable states.

There is one object for each layer, as in mlx_lm, and each holds one state for each sequence of a batch. Copies,
deep ones too, share the states, so a copy is a snapshot that costs nothing. Names of classes and the layout of
`state` are those of mlx_lm, so that `save_prompt_cache` writes files that `load_prompt_cache` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from lily_mlx.kernels.attention import KVCache as AttentionState
from lily_mlx.model import DeltaNetCache, arrays_of

from .arrays import attention_arrays, attention_cache, deltanet_cache
from .window import Window

Cache = TypeVar("Cache", bound="_States")


class _States:
    """What the caches of both kinds of layers share.

    Attributes:
        rows: the layer's state of each sequence, None before its first token; empty before the first call.
        window: padding of the following calls.
    """

    rows: list[Any]
    window: Window

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, unused rows included; states that copies share count in each of them."""
        arrays = {id(array): array for array in arrays_of(tuple(row for row in self.rows if row is not None))}
        return sum(array.nbytes for array in arrays.values())

    def empty(self) -> bool:
        """Whether no sequence has a token."""
        return all(row is None for row in self.rows)

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announces padding of the following calls, until `finalize`."""
        if left_padding is not None:
            if not self.empty():
                raise ValueError("padding on the left can only come before the first token of a sequence")
            self.window.starts = [int(n) for n in left_padding]
        if lengths is not None:
            self.window.ends = [int(n) for n in lengths]
        elif right_padding is not None and max(right_padding) > 0:
            raise ValueError("padding on the right needs the lengths of the sequences: prepare(lengths=...)")

    def finalize(self) -> None:
        """Ends the padding."""
        self.window = Window()

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keeps some sequences."""
        self.rows = [self.rows[row] for row in batch_indices]
        self.window.filter(batch_indices)

    def extend(self, other: Any) -> None:
        """Adds the sequences of another cache of this kind."""
        self.window.extend(other.window, len(self.rows), len(other.rows))
        self.rows = self.rows + other.rows

    def __copy__(self: Cache) -> Cache:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.rows, other.window = list(self.rows), self.window.copy()
        return other

    def __deepcopy__(self: Cache, memo: dict[int, Any]) -> Cache:
        return self.__copy__()


class ArraysCache(_States, mlx_lm_cache.ArraysCache):  # type: ignore[misc]
    """Gated DeltaNet layer: the convolution's last inputs [B, 3, C] and the state [B, Hv, Dv, Dk]."""

    def __init__(self, rows: Sequence[DeltaNetCache | None] = ()):
        self.rows = list(rows)
        self.window = Window()

    @property
    def cache(self) -> list[mx.array | None]:
        """mlx_lm's arrays: conv bfloat16 [B, 3, C], state float32 [B, Hv, Dv, Dk]; None before the first token."""
        like = next((row for row in self.rows if row is not None), None)
        if like is None:
            return [None, None]
        rows = [row or DeltaNetCache(mx.zeros_like(like.conv), mx.zeros_like(like.state)) for row in self.rows]
        if len(rows) == 1:
            return [rows[0].conv[None], rows[0].state[None]]
        return [mx.stack([row.conv for row in rows]), mx.stack([row.state for row in rows])]

    @property
    def lengths(self) -> mx.array | None:
        return mx.array(self.window.ends) if self.window.ends else None

    @property
    def left_padding(self) -> mx.array | None:
        return mx.array(self.window.starts) if self.window.starts else None

    @property
    def batch_size(self) -> int:
        return max(1, len(self.rows))

    @property
    def state(self) -> tuple[list[mx.array | None], mx.array | None, mx.array | None]:
        return self.cache, self.left_padding, self.lengths

    @state.setter
    def state(self, value: Any) -> None:
        (conv, state), left_padding, lengths = value
        self.rows = [] if conv is None else [deltanet_cache(*row) for row in zip(conv, state, strict=True)]
        self.window = Window(_integers(left_padding), _integers(lengths))

    def advance(self, N: int) -> None:
        self.window.advance(N)

    def trim(self, n: int) -> int:
        """Forgets the last n tokens, which only n = 0 allows.

        Raises:
            ValueError: n is not 0.
        """
        if n:
            raise ValueError(
                f"a Gated DeltaNet state cannot go back {n} tokens: copy the cache where you want to return to "
                "(copy.deepcopy shares the arrays, so it is a snapshot that costs nothing), or start a new one"
            )
        return 0

    def extract(self, idx: int) -> ArraysCache:
        return ArraysCache([self.rows[idx]])

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> ArraysCache:
        merged = cls([row for cache in caches for row in adopt_deltanet(cache).rows or [None]])
        return merged

    def __setitem__(self, idx: int, value: Any) -> None:
        raise TypeError("the states of an accelerated model are immutable; make a cache with mlx_lm's own model")


class _AttentionStates(_States):
    """Attributes: lengths, the tokens of each sequence."""

    lengths: list[int]

    def _arrays(self, row: int) -> tuple[mx.array, mx.array]:
        return attention_arrays(self.rows[row], self.lengths[row])

    def filter(self, batch_indices: Sequence[int]) -> None:
        super().filter(batch_indices)
        self.lengths = [self.lengths[row] for row in batch_indices]

    def extend(self, other: Any) -> None:
        super().extend(other)
        self.lengths = self.lengths + other.lengths

    def extract(self, idx: int) -> KVCache:
        return KVCache([self.rows[idx]], [self.lengths[idx]])

    def trim(self, n: int) -> int:
        """Forgets the last n tokens of each sequence; the layer's DeltaNet neighbours cannot."""
        n = min([n, *self.lengths])
        for row, state in enumerate(self.rows):
            if state is not None and n:
                keep = self.lengths[row] - n
                keys, values = self._arrays(row)
                self.rows[row] = attention_cache(keys[:, :keep], values[:, :keep]) if keep else None
                self.lengths[row] = keep
        return n

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """Raises ValueError: the attention kernels read bfloat16 keys and values."""
        raise ValueError(
            f"kv_bits={bits}: the attention kernels of lily_mlx read bfloat16 keys and values; leave kv_bits out, or "
            "use the model that mlx_lm loaded without lily_mlx.accelerate"
        )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Raises TypeError: mlx_lm's layers cannot write to these caches."""
        raise TypeError(
            "the states of an accelerated model are immutable; call the model itself, not its layers, or give them "
            "mlx_lm's own caches"
        )


class KVCache(_AttentionStates, mlx_lm_cache.KVCache):  # type: ignore[misc]
    """Attention layer, all sequences of one length."""

    def __init__(self, rows: Sequence[AttentionState | None] = (), lengths: Sequence[int] = ()):
        self.rows, self.lengths = list(rows), list(lengths)
        self.window = Window()

    @property
    def offset(self) -> int:
        return max(self.lengths, default=0)

    def size(self) -> int:
        return self.offset

    @property
    def keys(self) -> mx.array | None:
        """bfloat16 [B, Hkv, n, D]; None before the first token."""
        return self._stacked(0)

    @property
    def values(self) -> mx.array | None:
        """bfloat16 [B, Hkv, n, D]; None before the first token."""
        return self._stacked(1)

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values

    def _stacked(self, part: int) -> mx.array | None:
        if self.empty():
            return None
        arrays = [self._arrays(row)[part] for row in range(len(self.rows))]
        return arrays[0][None] if len(arrays) == 1 else mx.stack(arrays)

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None, int]:
        return self.keys, self.values, self.offset

    @state.setter
    def state(self, value: Any) -> None:
        keys, values, offset = value
        other = KVCache()
        if keys is not None and offset:
            rows = zip(keys[:, :, :offset], values[:, :, :offset], strict=True)
            states = [attention_cache(*row) for row in rows]
            other = KVCache(states, [offset] * len(states))
        self.__dict__.update(other.__dict__)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchKVCache:
        batch = BatchKVCache()
        for cache in map(adopt_attention, caches):
            batch.rows += cache.rows or [None]
            batch.lengths += cache.lengths or [0]
        return batch


class BatchKVCache(_AttentionStates, mlx_lm_cache.BatchKVCache):  # type: ignore[misc]
    """Attention layer, sequences of different lengths. There is no padding inside: each sequence has its state."""

    def __init__(self, rows: Sequence[AttentionState | None] = (), lengths: Sequence[int] = ()):
        self.rows, self.lengths = list(rows), list(lengths)
        self.window = Window()

    @property
    def offset(self) -> mx.array:
        """int32 [B], tokens of each sequence; negative by the padding that is still to come."""
        starts = self.window.starts or [0] * len(self.lengths)
        return mx.array([length - max(start, 0) for length, start in zip(self.lengths, starts, strict=True)])

    @property
    def left_padding(self) -> mx.array:
        return mx.array([self.size() - length for length in self.lengths])

    def size(self) -> int:
        return max(self.lengths, default=0)

    @property
    def state(self) -> list[mx.array]:
        """The buffers, for `mx.eval`; a batch is saved by extracting its sequences."""
        return arrays_of(tuple(row for row in self.rows if row is not None))


def adopt(caches: list[Any], attention_layers: Sequence[bool]) -> None:
    """Replaces mlx_lm's own caches in a list by the caches of this module, with the same contents.

    Args:
        caches: one for each layer; changed in place.
        attention_layers: for each layer whether it is attention.

    Raises:
        ValueError: another number of caches, or a kind of cache that the layer cannot have.
    """
    if len(caches) != len(attention_layers):
        raise ValueError(f"the prompt cache has {len(caches)} layers, but the model has {len(attention_layers)}")
    for layer, is_attention in enumerate(attention_layers):
        kind = adopt_attention if is_attention else adopt_deltanet
        try:
            caches[layer] = kind(caches[layer])
        except ValueError as error:
            raise ValueError(f"layer {layer} of the prompt cache: {error}") from None


def adopt_deltanet(cache: Any) -> ArraysCache:
    """The cache of a Gated DeltaNet layer from mlx_lm's `ArraysCache`; its own are returned as they are."""
    if isinstance(cache, ArraysCache):
        return cache
    if type(cache) is not mlx_lm_cache.ArraysCache or len(cache.cache) != 2:
        raise ValueError(
            f"{type(cache).__name__} where a Gated DeltaNet layer needs mlx_lm's ArraysCache of two arrays"
        )
    adopted = ArraysCache()
    adopted.state = cache.state
    if cache.empty() and adopted.window != Window():
        adopted.rows = [None] * cache.batch_size
    return adopted


def adopt_attention(cache: Any) -> KVCache | BatchKVCache:
    """The cache of an attention layer from mlx_lm's `KVCache`, `QuantizedKVCache` or `BatchKVCache`."""
    if isinstance(cache, (KVCache, BatchKVCache)):
        return cache
    if type(cache) is mlx_lm_cache.BatchKVCache:
        return _adopt_batch(cache)
    if type(cache) is mlx_lm_cache.QuantizedKVCache and not cache.empty():
        encoding = {"group_size": cache.group_size, "bits": cache.bits}
        keys, values = (mx.dequantize(*part, **encoding) for part in (cache.keys, cache.values))
        state = (keys, values, cache.offset)
    elif type(cache) in (mlx_lm_cache.KVCache, mlx_lm_cache.QuantizedKVCache):
        state = (cache.keys, cache.values, cache.offset)
    else:
        raise ValueError(f"{type(cache).__name__} where an attention layer needs mlx_lm's KVCache")
    adopted = KVCache()
    adopted.state = state
    return adopted


def _adopt_batch(cache: Any) -> BatchKVCache:
    padding = _integers(cache.left_padding)
    if cache.empty():
        batch = BatchKVCache([None] * len(padding), [0] * len(padding))
        batch.window.starts = padding
        return batch
    end = cache.size()
    rows = [
        attention_cache(keys[:, start:end], values[:, start:end])
        for keys, values, start in zip(cache.keys, cache.values, padding, strict=True)
    ]
    return BatchKVCache(rows, [end - start for start in padding])


def _integers(values: mx.array | None) -> list[int]:
    return [] if values is None else [int(n) for n in values.tolist()]
