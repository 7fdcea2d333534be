"""What the kernels' policies choose at the full-size shapes on this backend, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from lily_mlx.kernels.attention import capacity_for
from lily_mlx.kernels.attention import policy as attention
from lily_mlx.kernels.deltanet import policy as deltanet
from lily_mlx.kernels.linear import policy as linear
from lily_mlx.kernels.moe import policy as moe
from lily_mlx.kernels.sampling import policy as sampling
from lily_mlx.metal import current_backend

from .linear import projections
from .sizes import Sizes

_CHUNKS = (8, 64, 512, 2048)
_CONTEXTS = (256, 4096, 32_768, 131_072)


@dataclass(frozen=True)
class Route:
    """One choice.

    Attributes:
        function: the kernel function, `family.function`.
        shape: what the choice was made for.
        choice: launch parameters.
        reason: the rule that made it.
    """

    function: str
    shape: str
    choice: str
    reason: str


def routes(sizes: Sizes) -> Iterator[Route]:
    """The choices for a step and for chunks of a model."""
    backend = current_backend()
    for projection in projections(sizes):
        function = "linear.project_add" if projection.adds else "linear.norm_project"
        yield _route(function, projection.shape, linear.matvec_plan, projection.rows, projection.columns)
    plan = linear.matvec_plan(sizes.vocabulary, sizes.hidden)
    yield _route("sampling.head", f"{sizes.vocabulary} tokens", sampling.head_parts, plan.blocks(sizes.vocabulary))
    yield _route("deltanet.step", "one token", deltanet.step_columns, backend)
    for context in _CONTEXTS:
        shape, capacity = f"{context} tokens before", capacity_for(context)
        yield _route("attention.step", shape, attention.parts_plan, capacity, sizes.attention.group)
    yield _route("moe.experts_gate_up", "one token", moe.gate_up_shape, sizes.hidden)
    yield _route("moe.experts_down", "one token", moe.down_shape, sizes.expert_size, sizes.top_k)
    for rows in _CHUNKS:
        chunk = f"{rows} rows"
        for projection in projections(sizes):
            shape = f"{chunk}, {projection.shape}"
            yield _route("linear.matmul", shape, linear.matmul_plan, rows, projection.rows, projection.columns)
            if projection.label == "router":
                sizes_of = (rows, projection.rows, projection.columns)
                yield _route("linear.norm_matmul", shape, linear.norm_matmul_plan, *sizes_of)
        yield _route("moe.route", chunk, moe.tile_height, rows, sizes.top_k, sizes.experts)
        height = moe.tile_height(rows, sizes.top_k, sizes.experts)
        yield _route("moe.grouped_gate_up", chunk, moe.gate_up_tile, height, sizes.hidden)
        yield _route("moe.grouped_down", chunk, moe.down_tile, height, sizes.expert_size)
        yield _route("deltanet.prepare", chunk, deltanet.prepare_tile, rows)
        for context in (0, 32_768):
            shape, capacity = f"{chunk} after {context} tokens", capacity_for(context + rows)
            arguments = (rows * sizes.attention.group, sizes.attention.kv_heads, capacity, backend == "cuda")
            yield _route("attention.prefill_attention", shape, attention.prefill_plan, *arguments)
    yield _route("deltanet.scan", "any chunk", deltanet.scan_columns, backend)
    yield _route("deltanet.short_chunk", "most rows", deltanet.short_rows, backend)
    yield _route("deltanet.short_chunk", "any chunk", deltanet.short_columns, backend)
    yield _route("deltanet.batch_step", "any batch", deltanet.short_columns, backend)


def _route(function: str, shape: str, rule: Callable[..., Any], *arguments: Any) -> Route:
    reason = inspect.cleandoc(rule.__doc__ or "").split("\n\n")
    # The first sentence names what is chosen; where a rule has reasons they follow.
    text = " ".join(" ".join(reason[:2] if "Args:" not in reason[1:2] else reason[:1]).split())
    return Route(function, shape, _words(rule(*arguments)), text.split(" Args:")[0])


def _words(choice: Any) -> str:
    if is_dataclass(choice) and not isinstance(choice, type):
        return ", ".join(f"{name} {value}" for name, value in asdict(choice).items())
    return str(choice)
