"""`Snapshot`: the state of a sequence as the prefix cache keeps it, its keys and values in blocks that others share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from lily_mlx.engine import SequenceState
from lily_mlx.kernels.attention import TAIL_ROWS, KVCache, capacity_for
from lily_mlx.model import arrays_of

BLOCK_ROWS = TAIL_ROWS  # tokens of a block: a state's tail begins at the end of one


@dataclass(frozen=True)
class Tail:
    """The keys and values of an attention layer after the last block.

    Attributes:
        keys, values: bfloat16 [Hkv, TAIL_ROWS, D]; the first `length % TAIL_ROWS` rows count.
    """

    keys: mx.array
    values: mx.array


@dataclass(frozen=True)
class Snapshot:
    """A state without what depends on one request.

    Attributes:
        length: tokens.
        blocks: the keys and values of each BLOCK_ROWS tokens, bfloat16 [2 A, Hkv, BLOCK_ROWS, D] for A attention
            layers: keys of the first, its values, keys of the second and so on.
        layers: what each layer remembers besides: `DeltaNetCache` or `Tail`.
    """

    length: int
    blocks: tuple[mx.array, ...]
    layers: tuple[Any, ...]

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays."""
        return arrays_of((self.blocks, self.layers))

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of a block; () for a model without attention layers."""
        tails = [layer.keys.shape for layer in self.layers if isinstance(layer, Tail)]
        return (2 * len(tails), tails[0][0], BLOCK_ROWS, tails[0][2]) if tails else ()

    @classmethod
    def of(cls, state: SequenceState, shared: Sequence[mx.array] = ()) -> Snapshot:
        """Takes a snapshot: copies keys and values into new blocks, and refers to everything else.

        Args:
            state: stays as it is.
            shared: blocks of another snapshot that begins with the same tokens, in place of new ones.
        """
        layers = tuple(Tail(c.tail_keys, c.tail_values) if isinstance(c, KVCache) else c for c in state.caches)
        main = [array for c in state.caches if isinstance(c, KVCache) for array in (c.keys, c.values)]
        count = state.length // BLOCK_ROWS if main else 0
        blocks = list(shared[:count])
        if len(blocks) < count:
            new = slice(len(blocks) * BLOCK_ROWS, count * BLOCK_ROWS)
            rows = mx.stack([array[:, new] for array in main])
            # A slice would keep all rows alive as long as one block.
            blocks += [mx.contiguous(block) for block in mx.split(rows, count - len(blocks), axis=2)]
        return cls(state.length, tuple(blocks), layers)

    def state(self) -> SequenceState:
        """The state. One copy of the keys and values; everything else is referred to."""
        main = iter(self._main())
        caches = tuple(
            KVCache(next(main), next(main), c.keys, c.values) if isinstance(c, Tail) else c for c in self.layers
        )
        return SequenceState(self.length, caches, None, mx.array([self.length], mx.int32), None)

    def _main(self) -> list[mx.array]:
        """`keys` and `values` of each `KVCache`: parts of one array, filled up to its capacity."""
        if not self.block_shape:
            return []
        count, heads, _, width = self.block_shape
        rows = len(self.blocks) * BLOCK_ROWS
        unused = mx.zeros((count, heads, capacity_for(rows) - rows, width), mx.bfloat16)
        joined = mx.concatenate([*self.blocks, unused], axis=2)
        return [joined[i] for i in range(count)]
