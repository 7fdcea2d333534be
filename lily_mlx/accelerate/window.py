"""`Window`: which tokens of the next calls belong to each sequence of a padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Window:
    """Padding that is still to come, counted in columns of the following calls.

    Attributes:
        starts: columns of padding before each sequence; empty for none.
        ends: columns up to which each sequence goes; empty for no limit.
    """

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def columns(self, row: int, count: int) -> tuple[int, int]:
        """First and last+1 column, of the next `count` ones, that hold tokens of a sequence."""
        start = min(max(self.starts[row], 0), count) if self.starts else 0
        end = min(max(self.ends[row], 0), count) if self.ends else count
        return start, max(start, end)

    def advance(self, count: int) -> None:
        """Notes that `count` columns have been processed."""
        self.starts = [start - count for start in self.starts]
        self.ends = [end - count for end in self.ends]

    def filter(self, rows: Sequence[int]) -> None:
        """Keeps some sequences."""
        self.starts = [self.starts[row] for row in rows] if self.starts else []
        self.ends = [self.ends[row] for row in rows] if self.ends else []

    def extend(self, other: Window, rows: int, other_rows: int) -> None:
        """Adds the sequences of another batch."""
        if self.starts or other.starts:
            self.starts = (self.starts or [0] * rows) + (other.starts or [0] * other_rows)
        if self.ends or other.ends:
            raise ValueError("batches cannot be joined while one of them has padding after its sequences to come")

    def copy(self) -> Window:
        return Window(list(self.starts), list(self.ends))
