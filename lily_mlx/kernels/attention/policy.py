"""Launch parameters of the attention kernels, from static shapes only."""

from __future__ import annotations

from dataclasses import dataclass

from .shape import TAIL_ROWS

# Capacity up to which a part of the decode kernel covers so many cache rows: small parts fill the GPU at short
# contexts, large ones keep the partial results small next to the cache at long ones.
_PART_ROWS = ((4096, 64), (16384, 128), (65536, 256))
_LARGEST_PART_ROWS = 512


@dataclass(frozen=True)
class PartsPlan:
    """How `step_attention` shares the cache.

    A threadgroup owns ``part_rows`` rows of one KV head for all of its query heads. Its simdgroups form
    ``head_sets`` sets that take ``heads`` query heads each, and the ``streams`` simdgroups of a set take the rows
    in turn.
    """

    part_rows: int
    heads: int
    head_sets: int
    streams: int

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 32 * self.head_sets * self.streams

    @property
    def padded_heads(self) -> int:
        """``heads`` rounded up to a power of two."""
        return 1 << (self.heads - 1).bit_length()

    @property
    def tail_parts(self) -> int:
        """Parts of the tail block."""
        return -(-TAIL_ROWS // self.part_rows)

    def main_parts(self, capacity: int) -> int:
        """Parts of a cache of ``capacity`` rows."""
        return -(-capacity // self.part_rows)


def part_rows(capacity: int) -> int:
    """Cache rows of one part of the decode kernel."""
    for limit, rows in _PART_ROWS:
        if capacity <= limit:
            return rows
    return _LARGEST_PART_ROWS


def parts_plan(capacity: int, group: int) -> PartsPlan:
    """The plan for a cache of ``capacity`` rows and ``group`` query heads for each KV head."""
    head_sets = -(-group // 8)  # a lane keeps queries and sums of at most 8 heads in registers
    return PartsPlan(
        part_rows=part_rows(capacity),
        heads=-(-group // head_sets),
        head_sets=head_sets,
        streams=8 // head_sets,
    )


@dataclass(frozen=True)
class PrefillPlan:
    """Tiles of `prefill_attention`: ``rows`` query rows (position, head) against ``keys`` keys at a time.

    ``slice`` dimensions of the keys or values are in threadgroup memory at once.
    """

    rows: int
    keys: int
    slice: int
    threads: int = 128


def prefill_plan(head_dim: int) -> PrefillPlan:
    """The plan for one head size: queries, a slice of keys and scores must fit 32 KB of threadgroup memory."""
    widest = next(width for width in (128, 64, 32) if head_dim % width == 0)
    return PrefillPlan(rows=32 if head_dim <= 256 else 16, keys=32, slice=widest)
