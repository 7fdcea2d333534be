"""`DecodeBatch`: running sequences that advance together, so that a step reads each weight once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from lily_mlx.kernels.attention import TAIL_ROWS, YOUNG_PAGE, KVCache, Work, capacity_for, lay_out
from lily_mlx.kernels.sampling import NO_TOKEN, RowControls
from lily_mlx.model import (
    BatchOutput,
    DeltaNetCache,
    LayerCache,
    Pool,
    RowMemory,
    Sampling,
    Tails,
    arrays_of,
    empty_memories,
)

from .engine import Engine
from .row_controls import join_controls, memory_size
from .sampling import resized_memory
from .state import SequenceState

# Numbers of rows that a step is made for; then multiples of the last step. Few, because each is compiled of its own;
# close, because rows beyond the sequences move their states too.
_BUCKETS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
_BUCKET_STEP = 16
_PAGE_STEP = 32  # the pool grows by half, to a multiple of this

_Change = Callable[[mx.array], mx.array]


def bucket_for(sequences: int) -> int:
    """Rows of a batch of so many sequences."""
    bucket = next((rows for rows in _BUCKETS if rows >= sequences), None)
    return bucket if bucket is not None else -(-sequences // _BUCKET_STEP) * _BUCKET_STEP


@dataclass(frozen=True)
class Chosen:
    """What a step hands out for one sequence.

    Attributes:
        token: the token that was chosen for it, and is fed now.
        logits: float32 [1, V], from which it was chosen, on the device.
    """

    token: int
    logits: mx.array


@dataclass
class _Row:
    handle: int
    sampling: Sampling
    length: int  # tokens fed
    pages: list[int] = field(default_factory=list)  # the last one may be YOUNG_PAGE


class DecodeBatch:
    """Sequences that advance together.

    A sequence joins with the state that its prefill left and leaves with a state that a single step, a prefill or a
    snapshot can go on with. Both copy what is the sequence's own: its DeltaNet states and its keys and values; the
    other sequences are not touched. Where the number of rows changes (`bucket_for`), the DeltaNet states of all are
    copied once.

    A sequence's numbers do not depend on the others, as long as the number of rows leads to the same kernels.

    Args:
        engine: holds the model.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._rows: list[_Row] = []
        self._twins: list[int] = []  # what each row behind the sequences repeats
        self._next_handle = 0
        self._tokens = self._logits = self._recent = mx.zeros(0)
        self._memories: tuple[RowMemory, ...] = ()
        self._pools: tuple[Pool, ...] = ()
        self._free_pages: list[int] = []
        self._controls: RowControls | None = None
        self._layout: tuple[np.ndarray, mx.array] | None = None  # places, items

    def __len__(self) -> int:
        """Sequences."""
        return len(self._rows)

    @property
    def rows(self) -> int:
        """Rows of a step: the sequences, and repetitions of some up to a size that is compiled."""
        return len(self._rows) + len(self._twins)

    @property
    def pages(self) -> int:
        """Pages of 128 tokens that each attention layer has room for."""
        return int(self._pools[0].keys.shape[0]) if self._pools else 0

    def add(self, state: SequenceState, sampling: Sampling) -> int:
        """Takes a sequence in.

        Args:
            state: from a prefill or a step; its chosen token is the next to be fed. It stays as it is.
            sampling: how its tokens are chosen.

        Returns:
            A handle for the other methods.

        Raises:
            ValueError: the state has no chosen token, or the sampling does not fit the vocabulary or the state.
        """
        if state.token is None or state.logits is None:
            raise ValueError("the sequence has no chosen token: prefill it first")
        sampling.check_vocabulary(self._engine.model.config.vocab_size)
        recent = sampling.recent_or_empty(state.recent)
        row = _Row(self._next_handle, sampling, state.length)
        self._next_handle += 1
        place = len(self._rows)
        if not self._rows:
            self._allocate(bucket_for(1), int(state.logits.shape[1]))
        elif place == self.rows:
            self._resize(bucket_for(place + 1))
        self._twins.pop(0)
        self._rows.append(row)
        try:
            size = max(memory_size(own.sampling) for own in self._rows)
            if size != self._recent.shape[1]:
                self._resize_memories(size)
            self._tokens = _with_row(self._tokens, place, state.token[0])
            self._logits = _with_row(self._logits, place, state.logits[0])
            if recent is not None:
                self._recent = _with_row(self._recent, place, resized_memory(recent, state.length, size))
            self._take_pages(row, state.length // TAIL_ROWS)
            self._put(place, row, state.caches)
        except BaseException:
            self.remove(row.handle)
            raise
        self._changed()
        return row.handle

    def remove(self, handle: int) -> None:
        """Lets a sequence go. The last one takes its row.

        Raises:
            KeyError: no such sequence.
        """
        place = self._place(handle)
        self._free_pages.extend(page for page in self._rows[place].pages if page != YOUNG_PAGE)
        last = len(self._rows) - 1
        if last == 0:
            self._drop()
            return
        if place != last:
            self._copy_row(last, place)
            self._rows[place] = self._rows[last]
        self._rows.pop()
        if bucket_for(last) < self.rows + 1:
            self._resize(bucket_for(last))
        else:
            # The last row repeats the one that it moved to; repetitions of the one that left need another.
            old = [last if place != last else -1, *(-1 if twin == place else twin for twin in self._twins)]
            self._twins = [place if twin == last else twin for twin in old]
            for index, twin in enumerate(self._twins):
                if twin < 0:
                    self._copy_row(0, last + index)
                    self._twins[index] = 0
        self._changed()

    def state(self, handle: int) -> SequenceState:
        """A sequence's state, in arrays of its own; the batch goes on.

        Raises:
            KeyError: no such sequence.
        """
        place = self._place(handle)
        row, pools, caches = self._rows[place], iter(self._pools), list[LayerCache]()
        for memory in self._memories:
            if isinstance(memory, DeltaNetCache):
                caches.append(DeltaNetCache(_own(memory.conv[place]), _own(memory.state[place])))
            else:
                pool = next(pools)
                keys = _joined(pool.keys, row.pages, pool.young_keys[place])
                values = _joined(pool.values, row.pages, pool.young_values[place])
                caches.append(KVCache(keys, values, _own(memory.keys[place]), _own(memory.values[place])))
        recent = None
        controls = row.sampling.controls
        if controls is not None and controls.remembers:
            recent = resized_memory(_own(self._recent[place]), row.length, controls.empty.size)
        state = SequenceState(
            row.length,
            tuple(caches),
            _own(self._tokens[place : place + 1]),
            mx.array([row.length], mx.int32),
            _own(self._logits[place : place + 1]),
            recent,
        )
        # Nothing may refer to the batch's arrays any longer, or its next change would copy them whole.
        mx.async_eval(arrays_of((state.caches, state.token, state.logits)) + ([] if recent is None else [recent]))
        return state

    def step(self) -> dict[int, Chosen]:
        """Feeds the chosen token of each sequence, submits the choice of the next ones, and reads those fed.

        A sequence at the end of the model's context must be removed before. If the submission fails, or the tokens
        cannot be read, nothing has changed.

        Returns:
            By handle, the tokens that are fed now.
        """
        if not self._rows:
            return {}
        tokens, logits = self._tokens, self._logits
        output = self._submit()
        values = np.array(tokens).tolist()
        self._advance(output)
        return {row.handle: Chosen(values[i], logits[i : i + 1]) for i, row in enumerate(self._rows)}

    # ---- a step -------------------------------------------------------------------------------------------------

    def _submit(self) -> BatchOutput:
        lengths = [row.length for row in self._rows]
        if self._layout is None:
            places, items = lay_out(lengths, [row.pages for row in self._rows], self._twins)
            self._layout = places, mx.array(items)
        places, items = self._layout
        places[:, 0] = lengths + [lengths[twin] for twin in self._twins]
        if self._controls is None:
            self._controls = join_controls([self._rows[i].sampling for i in (*range(len(self)), *self._twins)])
        output = self._engine.model.batch_step(
            self._tokens,
            mx.array(places[:, 0]),
            Work(mx.array(places), items),
            self._pools,
            self._memories,
            self._recent,
            self._controls,
        )
        mx.async_eval(output.tokens)
        return output

    def _advance(self, output: BatchOutput) -> None:
        self._tokens, self._logits, self._recent = output.tokens, output.logits, output.recent
        self._memories = output.memories
        for row in self._rows:
            row.length += 1
        full = [place for place, row in enumerate(self._rows) if row.length % TAIL_ROWS == 0]
        if full:
            self._store_tails(full)

    def _store_tails(self, places: Sequence[int]) -> None:
        """Makes young pages of full tails.

        A step that is still running reads the pool, so that MLX would copy it whole to change it. Where a sequence has
        a young page already, those of all move into the pool, which happens once in 128 steps.
        """
        if any(self._rows[place].pages[-1:] == [YOUNG_PAGE] for place in places):
            self._move_young()
        tails = [memory for memory in self._memories if isinstance(memory, Tails)]
        pools = []
        for pool, tail in zip(self._pools, tails, strict=True):
            young_keys, young_values = pool.young_keys, pool.young_values
            for place in places:
                young_keys = _with_row(young_keys, place, _own(tail.keys[place]))
                young_values = _with_row(young_values, place, _own(tail.values[place]))
            pools.append(Pool(pool.keys, pool.values, young_keys, young_values))
        self._pools = tuple(pools)
        for place in places:
            self._rows[place].pages.append(YOUNG_PAGE)
        self._layout = None

    def _move_young(self) -> None:
        """Moves all young pages into the pool."""
        places = [place for place, row in enumerate(self._rows) if row.pages[-1:] == [YOUNG_PAGE]]
        for place in places:
            row = self._rows[place]
            row.pages.pop()
            self._take_pages(row, 1)
        rows, pages = mx.array(places, mx.int32), mx.array([self._rows[place].pages[-1] for place in places], mx.int32)
        self._pools = tuple(
            Pool(
                _with_rows(pool.keys, pages, pool.young_keys[rows]),
                _with_rows(pool.values, pages, pool.young_values[rows]),
                pool.young_keys,
                pool.young_values,
            )
            for pool in self._pools
        )

    # ---- who is in ----------------------------------------------------------------------------------------------

    def _place(self, handle: int) -> int:
        for place, row in enumerate(self._rows):
            if row.handle == handle:
                return place
        raise KeyError(f"the batch has no sequence {handle}")

    def _changed(self) -> None:
        self._layout = self._controls = None

    def _allocate(self, rows: int, vocabulary: int) -> None:
        config = self._engine.model.config
        page = (config.attention.kv_heads, TAIL_ROWS, config.attention.head_dim)
        layers = sum(config.is_attention(i) for i in range(config.layers))
        self._memories = empty_memories(config, rows)
        self._pools = tuple(
            Pool(*(mx.zeros((count, *page), mx.bfloat16) for count in (_PAGE_STEP, _PAGE_STEP, rows, rows)))
            for _ in range(layers)
        )
        self._free_pages = list(range(_PAGE_STEP))[::-1]
        self._tokens, self._logits = mx.zeros(rows, mx.uint32), mx.zeros((rows, vocabulary))
        self._recent = mx.zeros((rows, 0), mx.uint32)
        self._twins = [0] * rows

    def _drop(self) -> None:
        self._rows, self._twins, self._free_pages = [], [], []
        self._memories = self._pools = ()
        self._tokens = self._logits = self._recent = mx.zeros(0)
        self._changed()

    def _resize(self, rows: int) -> None:
        """Gives the batch another number of rows; those behind the sequences repeat the first."""
        self._twins = [0] * (rows - len(self._rows))
        index = mx.array([*range(len(self._rows)), *self._twins], mx.int32)
        self._change(lambda array: mx.take(array, index, axis=0))

    def _copy_row(self, source: int, target: int) -> None:
        self._change(lambda array: _with_row(array, target, _own(array[source])))

    def _change(self, change: _Change) -> None:
        """Changes all arrays that have a row for each sequence."""
        self._tokens, self._logits, self._recent = map(change, (self._tokens, self._logits, self._recent))
        self._memories = tuple(
            type(memory)(*[change(array) for array in arrays_of(memory)]) for memory in self._memories
        )
        self._pools = tuple(
            Pool(pool.keys, pool.values, change(pool.young_keys), change(pool.young_values)) for pool in self._pools
        )

    def _resize_memories(self, size: int) -> None:
        """Gives all sequences, the new one too, memories of so many recent tokens."""
        lengths = [row.length for row in self._rows]
        lengths += [lengths[twin] for twin in self._twins]
        empty = self._recent.shape[1] == 0
        self._recent = mx.stack(
            [
                mx.full((size,), NO_TOKEN, mx.uint32) if empty else resized_memory(self._recent[i], length, size)
                for i, length in enumerate(lengths)
            ]
        )

    def _put(self, place: int, row: _Row, caches: Sequence[LayerCache]) -> None:
        """Copies a sequence's caches into a row and its pages."""
        memories, pools, old = list[RowMemory](), list[Pool](), iter(self._pools)
        pages = mx.array(row.pages, mx.int32)
        for memory, cache in zip(self._memories, caches, strict=True):
            if isinstance(cache, DeltaNetCache):
                assert isinstance(memory, DeltaNetCache)
                memories.append(
                    DeltaNetCache(
                        _with_row(memory.conv, place, cache.conv), _with_row(memory.state, place, cache.state)
                    )
                )
                continue
            assert isinstance(memory, Tails)
            memories.append(
                Tails(
                    _with_row(memory.keys, place, cache.tail_keys),
                    _with_row(memory.values, place, cache.tail_values),
                )
            )
            pool = next(old)
            if row.pages:
                pool = replace(
                    pool,
                    keys=_with_pages(pool.keys, pages, cache.keys),
                    values=_with_pages(pool.values, pages, cache.values),
                )
            pools.append(pool)
        self._memories, self._pools = tuple(memories), tuple(pools)

    def _take_pages(self, row: _Row, count: int) -> None:
        """Gives a sequence free pages; the pool grows where there are too few."""
        missing = count - len(self._free_pages)
        if missing > 0 and self._pools:
            old = self.pages
            more = -(-max(missing, old // 2) // _PAGE_STEP) * _PAGE_STEP
            self._pools = tuple(
                replace(pool, keys=_longer(pool.keys, more), values=_longer(pool.values, more)) for pool in self._pools
            )
            self._free_pages = [*range(old, old + more)[::-1], *self._free_pages]
        if self._pools:
            row.pages.extend(self._free_pages.pop() for _ in range(count))
        else:
            row.pages.extend([0] * count)  # a model without attention layers


def _with_row(stack: mx.array, row: int, value: mx.array) -> mx.array:
    """The array with another row. MLX writes in place where nothing else refers to it."""
    stack[row] = value
    return stack


def _with_rows(stack: mx.array, index: mx.array, values: mx.array) -> mx.array:
    stack[index] = values
    return stack


def _with_pages(pool: mx.array, pages: mx.array, rows: mx.array) -> mx.array:
    """The pool with rows [Hkv, capacity, D] of a cache in these pages."""
    heads, _, width = rows.shape
    blocks = rows[:, : pages.size * TAIL_ROWS].reshape(heads, pages.size, TAIL_ROWS, width).swapaxes(0, 1)
    return _with_rows(pool, pages, blocks)


def _joined(pool: mx.array, pages: Sequence[int], young: mx.array) -> mx.array:
    """The rows of some pages as one array [Hkv, capacity, D]; those without a page are zeros."""
    _, heads, _, width = pool.shape
    length = len(pages) * TAIL_ROWS
    blocks = pool[mx.array([page for page in pages if page != YOUNG_PAGE], mx.int32)]
    if YOUNG_PAGE in pages:
        blocks = mx.concatenate([blocks, young[None]])
    rows = blocks.swapaxes(0, 1).reshape(heads, length, width)
    return mx.contiguous(mx.pad(rows, [(0, 0), (0, capacity_for(length) - length), (0, 0)]))


def _longer(pool: mx.array, pages: int) -> mx.array:
    return mx.concatenate([pool, mx.zeros((pages, *pool.shape[1:]), pool.dtype)])


def _own(view: mx.array) -> mx.array:
    """A copy that does not keep the array alive that it is a part of."""
    return mx.contiguous(view)
