"""`PrefixCache`: states of sequences by the exact tokens that they hold."""

from __future__ import annotations

import itertools
import logging
import math
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from lily_mlx.engine import SequenceState

from .disk_cache import DiskCache, Stored
from .snapshots import BLOCK_ROWS, Snapshot

logger = logging.getLogger("lily_mlx")

_TOUCH_SECONDS = 60.0  # between notes to the disk that a snapshot is in use


@dataclass(eq=False)
class _Node:
    """A place in the radix tree, reached by `edge` from its parent."""

    edge: np.ndarray  # uint32
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    disposable: bool = False
    used: int = 0
    touched: float = 0.0


class PrefixCache:
    """Snapshots in a radix tree over tokens.

    A state of this family cannot go back, so a prompt continues the longest snapshot that is a prefix of it. Snapshots
    that begin with the same tokens share the blocks of their keys and values, and arrays that several hold count once.
    When they are more than the budget, disposable ones go first, then those that were used least recently.

    Everything but `fetch` and `clear` happens on the GPU thread.

    Args:
        max_bytes: budget of the snapshots' arrays; 0 keeps none.
        max_snapshots: their largest number; None for any.
        disk: where snapshots are kept as well; None for nowhere.
    """

    def __init__(self, max_bytes: int, max_snapshots: int | None = None, disk: DiskCache | None = None):
        self.max_bytes, self.max_snapshots, self.disk = max_bytes, max_snapshots, disk
        self.bytes = self.snapshots = self.evictions = 0
        self._root = _Node(np.zeros(0, np.uint32), None)
        self._clock = itertools.count(1)
        self._arrays: dict[int, tuple[mx.array, int]] = {}  # by identity: the array and the snapshots that hold it
        self._template: Snapshot | None = None
        self._longest_kept = 0
        self._lock = threading.Lock()
        self._fetched: list[tuple[np.ndarray, Stored]] = []

    def start(self, empty: SequenceState) -> None:
        """Begins to use the disk.

        Args:
            empty: the model's state without tokens.
        """
        self._template = Snapshot.of(empty)
        if self.disk is None:
            return
        self._longest_kept = self._most_tokens()
        if not self._longest_kept:
            logger.warning(
                "the prompt cache on disk is written but not read: memory may hold %s bytes in %s snapshots, and one "
                "has %d bytes and more: give a larger --prompt-cache-bytes or --prompt-cache-size",
                self.max_bytes,
                "any number of" if self.max_snapshots is None else self.max_snapshots,
                self._state_bytes,
            )
        self.disk.start(self._template)

    @property
    def _state_bytes(self) -> int:
        """Bytes of a snapshot without blocks."""
        assert self._template is not None
        return sum(array.nbytes for array in self._template.arrays)

    def _most_tokens(self) -> int:
        """The length of the longest snapshot that memory can hold."""
        assert self._template is not None
        if self.max_bytes < self._state_bytes or self.max_snapshots == 0:
            return 0
        if not self._template.block_shape:
            return sys.maxsize
        block: int = math.prod(self._template.block_shape) * mx.bfloat16.size
        return ((self.max_bytes - self._state_bytes) // block + 1) * BLOCK_ROWS - 1

    def longest(self, tokens: Sequence[int]) -> tuple[Snapshot | None, int]:
        """The longest snapshot that is a real prefix of the tokens: at least one of them is left to be fed.

        Returns:
            The snapshot, if there is one, and the number of tokens at the beginning that any snapshot shares.
        """
        query = np.asarray(tokens, np.uint32)
        with self._lock:
            self._take_fetched()
            best, common, _ = self._walk(query)
            if best is None:
                return None, common
            best.used = next(self._clock)
            if self.disk is not None and time.monotonic() - best.touched > _TOUCH_SECONDS:
                best.touched = time.monotonic()
                assert best.snapshot is not None
                self.disk.touch(query[: best.snapshot.length])
            return best.snapshot, common

    def insert(self, tokens: Sequence[int], state: SequenceState, disposable: bool = False) -> None:
        """Keeps a snapshot.

        Args:
            tokens: all tokens that the state holds.
            state: what they led to.
            disposable: whether it is among the first to go.

        Raises:
            ValueError: the state holds another number of tokens.
        """
        if state.length != len(tokens):
            raise ValueError(f"a snapshot of {state.length} tokens was given with {len(tokens)} tokens")
        if not len(tokens) or not self.max_bytes:
            return
        with self._lock:
            held = np.asarray(tokens, np.uint32)
            node, shared = self._node(held)
            node.disposable = disposable and (node.snapshot is None or node.disposable)
            if node.snapshot is None:
                self._keep(node, Snapshot.of(state, shared))
            node.used = next(self._clock)
            if self.disk is not None and not disposable:
                assert node.snapshot is not None
                node.touched = time.monotonic()
                self.disk.keep(held, node.snapshot)
            self._evict()

    def fetch(self, tokens: Sequence[int]) -> None:
        """Reads what the disk has beyond the memory, for the next `longest` of these tokens. For any other thread."""
        if self.disk is None or not self._longest_kept:
            return
        query = np.asarray(tokens, np.uint32)
        with self._lock:
            best, _, blocks = self._walk(query)
            known = best.snapshot.length if best is not None and best.snapshot is not None else 0
            for prefix, _ in self._fetched:
                if known < len(prefix) < len(query) and np.array_equal(prefix, query[: len(prefix)]):
                    known = len(prefix)
        stored = self.disk.find(query, known, len(blocks), self._longest_kept)
        if stored is not None:
            with self._lock:
                self._fetched.append((query[: stored.length], stored))

    def _take_fetched(self) -> None:
        """Puts what was read into the tree."""
        for tokens, stored in self._fetched:
            assert self._template is not None
            node, shared = self._node(tokens)
            if node.snapshot is None and len(shared) >= stored.first_block:
                self._keep(node, stored.snapshot(self._template, shared))
            node.used, node.touched = next(self._clock), time.monotonic()
            if node.snapshot is None:
                self._prune(node)
        if self._fetched:
            self._fetched = []
            self._evict()

    def _keep(self, node: _Node, snapshot: Snapshot) -> None:
        node.snapshot = snapshot
        self.snapshots += 1
        self._count(snapshot, 1)
        mx.async_eval(snapshot.arrays)  # an array that waits would keep what it is made from

    def _walk(self, query: np.ndarray) -> tuple[_Node | None, int, tuple[mx.array, ...]]:
        """The longest snapshot's node, the length of the common beginning, and the blocks that are known for it."""
        node, position, best = self._root, 0, None
        common, nearest = 0, self._root
        while position < len(query):
            child = node.children.get(int(query[position]))
            if child is None:
                break
            nearest, shared = child, _common(child.edge, query[position:])
            common = position + shared
            if shared < len(child.edge):
                break
            node, position = child, common
            if node.snapshot is not None and position < len(query):
                best = node
        # Whatever lies below shares the common beginning.
        while nearest.snapshot is None and nearest.children:
            nearest = next(iter(nearest.children.values()))
        blocks = nearest.snapshot.blocks if nearest.snapshot is not None else ()
        return best, common, blocks[: common // BLOCK_ROWS]

    def clear(self) -> None:
        """Drops every snapshot from memory."""
        with self._lock:
            for node in list(self._nodes()):
                if node.snapshot is not None:
                    self._drop(node)

    def _node(self, tokens: np.ndarray) -> tuple[_Node, tuple[mx.array, ...]]:
        """The node of these tokens, made if need be, and the blocks that other snapshots have for them."""
        _, _, blocks = self._walk(tokens)
        return self._make_node(tokens), blocks

    def _make_node(self, tokens: np.ndarray) -> _Node:
        node, position = self._root, 0
        while position < len(tokens):
            first = int(tokens[position])
            child = node.children.get(first)
            if child is None:
                child = _Node(tokens[position:].copy(), node)
                node.children[first] = child
                return child
            shared = _common(child.edge, tokens[position:])
            if shared < len(child.edge):
                middle = _Node(child.edge[:shared].copy(), node)
                node.children[first] = middle
                child.edge, child.parent = child.edge[shared:].copy(), middle
                middle.children[int(child.edge[0])] = child
                child = middle
            node, position = child, position + shared
        return node

    def _nodes(self) -> Iterator[_Node]:
        stack = [self._root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _evict(self) -> None:
        over = self.bytes > self.max_bytes or (self.max_snapshots is not None and self.snapshots > self.max_snapshots)
        if not over:
            return
        held = sorted((n for n in self._nodes() if n.snapshot is not None), key=lambda n: (not n.disposable, n.used))
        for node in held:
            if self.bytes <= self.max_bytes and (self.max_snapshots is None or self.snapshots <= self.max_snapshots):
                return
            self._drop(node)
            self.evictions += 1

    def _drop(self, node: _Node) -> None:
        assert node.snapshot is not None
        self._count(node.snapshot, -1)
        node.snapshot = None
        self.snapshots -= 1
        self._prune(node)

    def _prune(self, node: _Node) -> None:
        """Branches without a snapshot go, and so do places that branch no more."""
        while node.parent is not None and node.snapshot is None and not node.children:
            parent = node.parent
            del parent.children[int(node.edge[0])]
            node = parent
        if node.parent is not None and node.snapshot is None and len(node.children) == 1:
            (child,) = node.children.values()
            child.edge, child.parent = np.concatenate([node.edge, child.edge]), node.parent
            node.parent.children[int(child.edge[0])] = child

    def _count(self, snapshot: Snapshot, change: int) -> None:
        for array in snapshot.arrays:
            held = self._arrays.get(id(array), (array, 0))[1] + change
            if held == 1 and change == 1:
                self.bytes += array.nbytes
            if held:
                self._arrays[id(array)] = (array, held)
            else:
                del self._arrays[id(array)]
                self.bytes -= array.nbytes


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Length of the common beginning."""
    size = min(len(first), len(second))
    different = np.flatnonzero(first[:size] != second[:size])
    return int(different[0]) if len(different) else size
