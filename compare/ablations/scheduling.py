"""Without what keeps the device busy: look-ahead, routing on the device, independent launches, chunks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from lily_mlx.kernels.moe import Routing, route
from lily_mlx.metal import Kernel, current_backend
from lily_mlx.model import decode_step, model, prefill

from .form import FormArm, replaced


def host_routing() -> AbstractContextManager[None]:
    """Each layer's expert matmuls are submitted after the host has read how many rows every expert has."""

    def route_and_read(*arguments: Any, **options: Any) -> Routing:
        routing = route(*arguments, **options)
        rows = np.diff(np.array(routing.offsets).astype(np.int64))
        if rows.min() < 0 or rows.sum() != routing.tokens * routing.top_k:
            raise RuntimeError(f"the routing of {routing.tokens} tokens holds {rows.sum()} rows")
        return routing

    return replaced(prefill, route=route_and_read)


def fixed_tile() -> AbstractContextManager[None]:
    """Blocks of 16 rows in the grouped matmul, however many rows an expert has."""

    def route_in_short_blocks(*arguments: Any, **options: Any) -> Routing:
        return route(*arguments, **{**options, "tile_rows": 16})

    return replaced(prefill, route=route_in_short_blocks)


@contextlib.contextmanager
def serial_launches() -> Iterator[None]:
    """Each launch takes an output of the launch before it as one more argument, so that no two can overlap.

    MLX tracks dependencies by arrays, so the argument orders the launches although no kernel reads it. On the `cpu`
    backend launches run one after another anyway.
    """
    call = Kernel.__call__
    last: list[mx.array] = []

    def after_last(kernel: Kernel, inputs: Sequence[mx.array], **options: Any) -> list[mx.array]:
        if last and current_backend() != "cpu":
            kernel, inputs = _with_previous(kernel), [*inputs, last[0]]
        last[:] = call(kernel, inputs, **options)
        return list(last)

    def step(*arguments: Any, **options: Any) -> Any:
        last.clear()  # a trace must not reach into another one
        output = decode_step(*arguments, **options)
        last.clear()
        return output

    with replaced(Kernel, __call__=after_last), replaced(model, decode_step=step):
        yield


@functools.cache
def _with_previous(kernel: Kernel) -> Kernel:
    """The same kernel with one more input, which it does not read."""
    text = kernel.text
    return Kernel.from_source(
        kernel.name, (*kernel.inputs, "previous_launch"), kernel.outputs, text.body, text.header, kernel.max_threads
    )


class HostTokenArm(FormArm):
    """The host reads each token and feeds it again: no step is submitted before the one before it is done."""

    def _tokens(self, state: Any) -> Iterator[int]:
        while True:
            token = int(state.token.item())
            yield token
            state = replace(state, token=mx.array([token], mx.uint32), position=mx.array([state.length], mx.int32))
            state = self.engine.step(state, self._sampling)


class WholePromptArm(FormArm):
    """The whole prompt goes through the layers at once."""

    def __init__(self, model: Any, seed: int):
        super().__init__(model, seed, chunk_size=None)
