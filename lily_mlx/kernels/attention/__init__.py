"""Gated grouped-query attention of Qwen3.5 and Qwen3.6, over a cache of immutable blocks."""

from .batch import YOUNG_PAGE, PagedCache, Work, batch_step, lay_out, make_work
from .cache import append, merge_tail
from .decode import step
from .prefill import prefill_attention, prepare
from .shape import TAIL_ROWS, AttentionShape, KVCache, capacity_for, empty_cache

__all__ = [
    "TAIL_ROWS",
    "YOUNG_PAGE",
    "AttentionShape",
    "KVCache",
    "PagedCache",
    "Work",
    "append",
    "batch_step",
    "capacity_for",
    "empty_cache",
    "lay_out",
    "make_work",
    "merge_tail",
    "prefill_attention",
    "prepare",
    "step",
]
