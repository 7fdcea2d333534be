"""`PrefixCache`: states of sequences by the exact tokens that they hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from lily_mlx.engine import SequenceState
from lily_mlx.model import arrays_of


@dataclass(eq=False)
class _Node:
    """A place in the radix tree, reached by `edge` from its parent."""

    edge: np.ndarray  # uint32
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)
    state: SequenceState | None = None
    disposable: bool = False
    used: int = 0


class PrefixCache:
    """Snapshots in a radix tree over tokens.

    A state of this family cannot go back, so a prompt continues the longest snapshot that is a prefix of it. States
    are immutable: taking and giving a snapshot copies nothing. Arrays that several snapshots hold count once. When
    the snapshots are more than the budget, disposable ones go first, then those that were used least recently.

    Args:
        max_bytes: budget of the snapshots' arrays; 0 keeps none.
        max_snapshots: their largest number; None for any.
    """

    def __init__(self, max_bytes: int, max_snapshots: int | None = None):
        self.max_bytes, self.max_snapshots = max_bytes, max_snapshots
        self.bytes = self.snapshots = self.evictions = 0
        self._root = _Node(np.zeros(0, np.uint32), None)
        self._clock = itertools.count(1)
        self._arrays: dict[int, tuple[mx.array, int]] = {}  # by identity: the array and the snapshots that hold it

    def longest(self, tokens: Sequence[int]) -> tuple[SequenceState | None, int]:
        """The longest snapshot that is a real prefix of the tokens: at least one of them is left to be fed.

        Returns:
            The snapshot, if there is one, and the number of tokens at the beginning that any snapshot shares.
        """
        query = np.asarray(tokens, np.uint32)
        node, position, best = self._root, 0, None
        common = 0
        while position < len(query):
            child = node.children.get(int(query[position]))
            if child is None:
                break
            shared = _common(child.edge, query[position:])
            common = position + shared
            if shared < len(child.edge):
                break
            node, position = child, common
            if node.state is not None and position < len(query):
                best = node
        if best is None:
            return None, common
        best.used = next(self._clock)
        return best.state, common

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
        if not len(tokens):
            return
        node = self._node(np.asarray(tokens, np.uint32))
        node.used = next(self._clock)
        node.disposable = disposable and (node.state is None or node.disposable)
        if node.state is None:
            # Only what does not depend on one request's sampling.
            node.state = SequenceState(state.length, state.caches, None, state.position, None)
            self.snapshots += 1
            self._count(node.state, 1)
            mx.async_eval(arrays_of(state.caches))  # an array that waits would keep what it is made from
        self._evict()

    def clear(self) -> None:
        """Drops every snapshot."""
        for node in list(self._nodes()):
            if node.state is not None:
                self._drop(node)

    def _node(self, tokens: np.ndarray) -> _Node:
        """The node of these tokens, made if need be."""
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
        held = sorted((n for n in self._nodes() if n.state is not None), key=lambda n: (not n.disposable, n.used))
        for node in held:
            if self.bytes <= self.max_bytes and (self.max_snapshots is None or self.snapshots <= self.max_snapshots):
                return
            self._drop(node)
            self.evictions += 1

    def _drop(self, node: _Node) -> None:
        assert node.state is not None
        self._count(node.state, -1)
        node.state = None
        self.snapshots -= 1
        # Branches without a snapshot go, and so do places that branch no more.
        while node.parent is not None and node.state is None and not node.children:
            parent = node.parent
            del parent.children[int(node.edge[0])]
            node = parent
        if node.parent is not None and node.state is None and len(node.children) == 1:
            (child,) = node.children.values()
            child.edge, child.parent = np.concatenate([node.edge, child.edge]), node.parent
            node.parent.children[int(child.edge[0])] = child

    def _count(self, state: SequenceState, change: int) -> None:
        for array in arrays_of(state.caches):
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
