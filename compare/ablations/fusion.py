"""Without the four fused chains of a decode step: each is taken apart into the launches that it joins."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import mlx.core as mx

from lily_mlx.kernels import attention, deltanet
from lily_mlx.kernels.attention import TAIL_ROWS, AttentionShape, KVCache
from lily_mlx.kernels.deltanet import DeltaNetShape
from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.kernels.moe import ExpertWeights
from lily_mlx.metal import Kernel
from lily_mlx.model import decode

from .attention import attend
from .form import replaced

_HERE = str(Path(__file__).resolve().parent)
_WEIGHTS = ("weight", "shared_weight")
_PROJECTION = Kernel(
    name="ablation_expert_projection",
    inputs=("x", "norm_weight", "logits", *_WEIGHTS),
    outputs=("rows", "routing"),
    body=f"{_HERE}/expert_projection.metal",
    headers=("metal/include/quantized.h", "metal/include/reduce.h", f"{_HERE}/expert_rows.h"),
)
_ACTIVATION = Kernel(
    name="ablation_expert_activation",
    inputs=("gate", "up"),
    outputs=("out",),
    body=f"{_HERE}/expert_activation.metal",
)
_DOWN = Kernel(
    name="ablation_expert_down",
    inputs=("hidden", "routing", *_WEIGHTS),
    outputs=("rows",),
    body=f"{_HERE}/expert_down.metal",
    headers=("metal/include/quantized.h", f"{_HERE}/expert_rows.h"),
)
_SUM = Kernel(
    name="ablation_expert_sum",
    inputs=("rows", "routing", "residual"),
    outputs=("out",),
    body=f"{_HERE}/expert_sum.metal",
)
_SIMDGROUPS = 4
_THREADS = 128


def unfused_gate_up() -> AbstractContextManager[None]:
    """The experts' gate projection, up projection and activation as three launches."""

    def experts_gate_up(
        x: mx.array,
        norm_weight: mx.array,
        logits: mx.array,
        weights: ExpertWeights,
        top_k: int,
        eps: float,
        normalise: bool,
    ) -> tuple[mx.array, mx.array]:
        slots, size = top_k + 1, weights.intermediate

        def project(routed: QuantizedWeight, shared: QuantizedWeight) -> list[mx.array]:
            template, blocks = _rows_template(routed, shared, top_k)
            return _PROJECTION(
                [x, norm_weight, logits, routed.packed, shared.packed],
                template={**template, "NORMALISE": bool(normalise), "EPS": float(eps)},
                grid=(32 * _SIMDGROUPS * blocks, slots, 1),
                threadgroup=(32 * _SIMDGROUPS, 1, 1),
                output_shapes=[(slots, size), (top_k + slots,)],
                output_dtypes=[mx.float32, mx.uint32],
            )

        gate, routing = project(weights.gate, weights.shared_gate)
        up, _ = project(weights.up, weights.shared_up)
        (hidden,) = _ACTIVATION(
            [gate, up],
            template={"TOTAL": slots * size},
            grid=(_whole(slots * size), 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(slots, size)],
            output_dtypes=[mx.bfloat16],
        )
        return hidden, routing

    return replaced(decode, experts_gate_up=experts_gate_up)


def unfused_down() -> AbstractContextManager[None]:
    """The experts' output projections, and their sum by the routing's scores, as two launches."""

    def experts_down(hidden: mx.array, routing: mx.array, weights: ExpertWeights, residual: mx.array) -> mx.array:
        top_k, size = routing.size // 2, weights.hidden
        template, blocks = _rows_template(weights.down, weights.shared_down, top_k)
        (rows,) = _DOWN(
            [hidden, routing, weights.down.packed, weights.shared_down.packed],
            template=template,
            grid=(32 * _SIMDGROUPS * blocks, top_k + 1, 1),
            threadgroup=(32 * _SIMDGROUPS, 1, 1),
            output_shapes=[(top_k + 1, size)],
            output_dtypes=[mx.float32],
        )
        (out,) = _SUM(
            [rows, routing, residual],
            template={"TOP_K": top_k, "N": size},
            grid=(_whole(size), 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(1, size)],
            output_dtypes=[mx.bfloat16],
        )
        return out

    return replaced(decode, experts_down=experts_down)


def unfused_query_key() -> AbstractContextManager[None]:
    """Norm, rotation and cache update of queries, keys and values as six of MLX's operations, then attention."""

    def step(
        proj: mx.array,
        q_norm: mx.array,
        k_norm: mx.array,
        position: mx.array,
        cache: KVCache,
        shape: AttentionShape,
        eps: float,
    ) -> tuple[mx.array, KVCache]:
        dim = shape.head_dim
        queries = proj[0, : shape.key_offset].reshape(shape.query_heads, 2, dim)[:, 0]
        keys = proj[0, shape.key_offset : shape.value_offset].reshape(shape.kv_heads, dim)
        values = proj[0, shape.value_offset :].reshape(shape.kv_heads, 1, dim)

        def rotated(heads: mx.array, weight: mx.array) -> mx.array:
            normed = mx.fast.rms_norm(heads, weight, eps)[None, :, None]
            return mx.fast.rope(
                normed, shape.rotary_dim, traditional=False, base=shape.rope_theta, scale=1.0, offset=position
            )[0]

        row = position % TAIL_ROWS
        tail_keys = mx.slice_update(cache.tail_keys, rotated(keys, k_norm), row, axes=(1,))
        tail_values = mx.slice_update(cache.tail_values, values, row, axes=(1,))
        cache = KVCache(cache.keys, cache.values, tail_keys, tail_values)
        return attend(rotated(queries, q_norm)[:, 0], cache, position, proj, shape), cache

    return replaced(attention, step=step)


def unfused_delta() -> AbstractContextManager[None]:
    """Convolution, normalisation and gates in one launch, the delta rule in another one."""

    def step(
        proj: mx.array,
        conv_state: mx.array,
        state: mx.array,
        conv_weight: mx.array,
        a_log: mx.array,
        dt_bias: mx.array,
        shape: DeltaNetShape,
    ) -> tuple[mx.array, mx.array, mx.array]:
        q, k, v, decay, beta, conv_state = deltanet.prepare(proj, conv_state, conv_weight, a_log, dt_bias, shape)
        y, state = deltanet.scan(q, k, v, decay, beta, state, shape)
        return y, conv_state, state

    return replaced(deltanet, step=step)


def _rows_template(
    routed: QuantizedWeight, shared: QuantizedWeight, top_k: int
) -> tuple[dict[str, int | bool | float | mx.Dtype], int]:
    """Template values for a matrix of the experts, and the blocks that cover its rows: a lane per 32 columns."""
    lanes = min(32, 1 << (routed.columns // 32 - 1).bit_length())
    rows = max(1, 4 * lanes // 32)
    block = _SIMDGROUPS * rows * 32 // lanes
    template: dict[str, int | bool | float | mx.Dtype] = {
        "E": routed.shape[0],
        "TOP_K": top_k,
        "K": routed.columns,
        "N": routed.rows,
        "BITS": routed.bits,
        "GROUP": routed.group_size,
        "SHARED_BITS": shared.bits,
        "SHARED_GROUP": shared.group_size,
        "ROWS": rows,
        "LANES": lanes,
        "SIMDGROUPS": _SIMDGROUPS,
    }
    return template, -(-routed.rows // block)


def _whole(threads: int) -> int:
    """Threads in whole threadgroups."""
    return -(-threads // _THREADS) * _THREADS
