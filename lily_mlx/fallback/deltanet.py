"""The functions of `lily_mlx.kernels.deltanet` as MLX operations; arguments and results are described there."""

from __future__ import annotations

import mlx.core as mx

from lily_mlx.kernels.deltanet import DeltaNetShape

from . import linear

__all__ = ["batch_step", "gated_norm", "prepare", "scan", "short_chunk", "step"]

_L2_EPS = 1e-6


def step(
    proj: mx.array,
    conv_state: mx.array,
    state: mx.array,
    conv_weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    shape: DeltaNetShape,
    columns: object = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """One token: y, the next conv_state and the next state. `columns`, how a kernel shares the work, has no effect."""
    q, k, v, decay, beta, conv_state = prepare(proj, conv_state, conv_weight, a_log, dt_bias, shape)
    y, state = scan(q, k, v, decay, beta, state, shape)
    return y, conv_state, state


def prepare(
    proj: mx.array,
    conv_state: mx.array,
    conv_weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    shape: DeltaNetShape,
    tile_rows: int | None = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array]:
    """Convolution, normalisation and gates of M rows. `tile_rows` has no effect."""
    rows, key_width = proj.shape[0], shape.key_heads * shape.key_dim
    window = mx.concatenate([conv_state, proj[:, : shape.channels]])
    x = mx.zeros((rows, shape.channels), mx.float32)
    for tap in range(shape.conv_kernel):
        x = x + conv_weight[tap].astype(mx.float32) * window[tap : tap + rows].astype(mx.float32)
    x = x * mx.sigmoid(x)
    q = _unit(x[:, :key_width].reshape(rows, shape.key_heads, shape.key_dim)) * shape.key_dim**-0.5
    k = _unit(x[:, key_width : 2 * key_width].reshape(rows, shape.key_heads, shape.key_dim))
    v = x[:, 2 * key_width :].reshape(rows, shape.value_heads, shape.value_dim)
    beta = mx.sigmoid(proj[:, shape.b_offset : shape.a_offset].astype(mx.float32))
    a = proj[:, shape.a_offset :].astype(mx.float32) + dt_bias
    decay = mx.exp(-mx.exp(a_log) * mx.logaddexp(a, mx.array(0.0)))
    q, k, v = (array.astype(mx.bfloat16) for array in (q, k, v))
    return q, k, v, decay, beta, window[rows:]


def scan(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    decay: mx.array,
    beta: mx.array,
    state: mx.array,
    shape: DeltaNetShape,
    columns: object = None,
) -> tuple[mx.array, mx.array]:
    """The gated delta rule, token by token. `columns` has no effect."""
    group = shape.value_heads // shape.key_heads
    q, k = (mx.repeat(array.astype(mx.float32), group, axis=1)[:, :, None] for array in (q, k))  # [M, Hv, 1, Dk]
    v, decay, beta = v.astype(mx.float32), decay[:, :, None, None], beta[:, :, None]
    rows = []
    for token in range(q.shape[0]):
        state = state * decay[token]
        delta = beta[token] * (v[token] - mx.sum(state * k[token], axis=-1))
        state = state + delta[:, :, None] * k[token]
        rows.append(mx.sum(state * q[token], axis=-1))
    return mx.stack(rows).astype(mx.bfloat16).reshape(len(rows), -1), state


def gated_norm(y: mx.array, proj: mx.array, norm_weight: mx.array, shape: DeltaNetShape, eps: float) -> mx.array:
    """RMSNorm over each value head, times its weight, times silu(z)."""
    return linear.gated_norm(y, proj[:, shape.z_offset : shape.b_offset], norm_weight, eps)


def short_chunk(
    proj: mx.array,
    conv_state: mx.array,
    state: mx.array,
    conv_weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    shape: DeltaNetShape,
    eps: float,
    columns: object = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """The gated norm of M rows, the next conv_state and the next state. `columns` has no effect."""
    q, k, v, decay, beta, conv_state = prepare(proj, conv_state, conv_weight, a_log, dt_bias, shape)
    y, state = scan(q, k, v, decay, beta, state, shape)
    return gated_norm(y, proj, norm_weight, shape, eps), conv_state, state


def batch_step(
    proj: mx.array,
    conv_state: mx.array,
    state: mx.array,
    conv_weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    shape: DeltaNetShape,
    eps: float,
    columns: object = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """One token of each sequence, one after another. `columns` has no effect."""
    layer = conv_weight, a_log, dt_bias, norm_weight, shape, eps
    parts = [short_chunk(proj[b : b + 1], conv_state[b], state[b], *layer) for b in range(proj.shape[0])]
    out, windows, states = zip(*parts, strict=True)
    return mx.concatenate(out), mx.stack(windows), mx.stack(states)


def _unit(x: mx.array) -> mx.array:
    """Vectors of the last axis scaled to length 1."""
    return x * mx.rsqrt(mx.sum(mx.square(x), axis=-1, keepdims=True) + _L2_EPS)
