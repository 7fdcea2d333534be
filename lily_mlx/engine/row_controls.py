"""The settings of several sequences side by side, for the kernels that choose all of their tokens at once."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from lily_mlx.kernels.sampling import NO_TOKEN, RowControls, Settings
from lily_mlx.kernels.sampling.settings import UNFILTERED
from lily_mlx.model import Sampling

_SHORTEST_LIST = 32


def memory_size(sampling: Sampling) -> int:
    """Slots for recent tokens that a sampling needs in a batch, where all sequences have some."""
    controls = sampling.controls
    return _SHORTEST_LIST if controls is None else max(_SHORTEST_LIST, controls.empty.size)


def join_controls(samplings: Sequence[Sampling]) -> RowControls:
    """The settings of each row of a batch. Reads nothing back from the device."""
    filtered = any(_is_filtered(sampling) for sampling in samplings)
    settings = []
    for sampling in samplings:
        row = _neutral(sampling) if sampling.controls is None else sampling.controls.settings
        if filtered and not _is_filtered(sampling):
            row = row + mx.array(np.eye(row.size, dtype=np.float32)[UNFILTERED])
        settings.append(row)
    lists = [
        (controls.bias_ids, controls.bias_values, controls.special_tokens) if controls is not None else ()
        for controls in (sampling.controls for sampling in samplings)
    ]
    none = mx.array(NO_TOKEN, mx.uint32)
    return RowControls(
        settings=mx.stack(settings),
        seed=mx.concatenate([sampling.seed for sampling in samplings]),
        bias_ids=_side_by_side([own[0] if own else None for own in lists], none),
        bias_values=_side_by_side([own[1] if own else None for own in lists], mx.array(0.0)),
        special_tokens=_side_by_side([own[2] if own else None for own in lists], none),
        filtered=filtered,
    )


def _is_filtered(sampling: Sampling) -> bool:
    return sampling.controls is not None and sampling.controls.filtered


def _neutral(sampling: Sampling) -> mx.array:
    """The settings of a sampling that has a temperature only, which may be 0."""
    return mx.concatenate([sampling.parameters[:1], Settings().array()[1:]])


def _side_by_side(lists: Sequence[mx.array | None], filler: mx.array) -> mx.array:
    """Lists as the rows of one array, filled up to the longest."""
    longest = max([_SHORTEST_LIST, *(own.size for own in lists if own is not None)])
    rows = []
    for own in lists:
        if own is None:
            rows.append(mx.broadcast_to(filler, (longest,)))
        else:
            rows.append(mx.concatenate([own, mx.broadcast_to(filler, (longest - own.size,))]))
    return mx.stack(rows)
