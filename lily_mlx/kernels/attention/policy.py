"""Launch parameters of the attention kernels, from static shapes only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .shape import TAIL_ROWS

# Capacity up to which a part of the decode kernel covers so many cache rows: small parts fill the GPU at short
# contexts, large ones keep the partial results small next to the cache at long ones.
_PART_ROWS = ((4096, 64), (16384, 128), (65536, 256))
_LARGEST_PART_ROWS = 512

# A prefill of few rows shares the keys between threadgroups until there are about so many of them.
_PREFILL_THREADGROUPS = 128
_SMALLEST_PART_KEYS = 512


@dataclass(frozen=True)
class PartsPlan:
    """How `step` shares the cache.

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


def batch_plan(group: int) -> PartsPlan:
    """The plan of `batch_step` for ``group`` query heads for each KV head.

    A part is a page whatever the lengths, so that a sequence's sums do not depend on the others of the batch.
    """
    return replace(parts_plan(0, group), part_rows=TAIL_ROWS)


@dataclass(frozen=True)
class PrefillPlan:
    """Tiles of `prefill_attention`.

    A threadgroup takes ``simdgroups`` x ``simdgroup_rows`` query rows (position, head) against ``keys`` keys at a
    time. With ``part_keys`` the keys are shared between threadgroups in parts of so many, a multiple of ``keys``.
    """

    simdgroup_rows: int
    simdgroups: int
    keys: int = 16
    part_keys: int | None = None

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 32 * self.simdgroups

    @property
    def rows(self) -> int:
        """Query rows of a threadgroup."""
        return self.simdgroups * self.simdgroup_rows

    def blocks(self, rows: int) -> int:
        """Blocks of ``rows`` query rows."""
        return -(-rows // self.rows)

    def parts(self, capacity: int) -> int:
        """Parts of the keys of a cache of ``capacity`` rows and its tail."""
        return -(-(capacity + TAIL_ROWS) // self.part_keys) if self.part_keys else 1


def prefill_plan(rows: int, kv_heads: int, capacity: int, wide: bool) -> PrefillPlan:
    """The plan for ``rows`` query rows of each KV head.

    Args:
        rows: tokens times query heads of a KV head.
        kv_heads: KV heads.
        capacity: rows of the cache.
        wide: matrix instructions work on 16 rows (NVIDIA) and not on 8 (Apple), where half as many sums in a lane's
            registers leave room for more simdgroups.
    """
    height = 16 if wide else 8
    plan = PrefillPlan(simdgroup_rows=height, simdgroups=4 if rows <= 4 * height else 8)
    parts = _PREFILL_THREADGROUPS // (plan.blocks(rows) * kv_heads)
    if parts < 2 or capacity < 2 * _SMALLEST_PART_KEYS:
        return plan
    part_keys = -(-(capacity + TAIL_ROWS) // (parts * TAIL_ROWS)) * TAIL_ROWS
    return replace(plan, part_keys=max(part_keys, _SMALLEST_PART_KEYS))
