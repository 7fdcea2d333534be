"""Gated DeltaNet by its definition, in numpy, without roundings: what the kernels are tested against.

The functions take the arguments of the kernels' wrappers as numpy arrays and return float64 arrays.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from .shape import DeltaNetShape

Array: TypeAlias = np.ndarray[Any, Any]

L2_EPS = 1e-6


def prepare(
    proj: Array,
    conv_state: Array,
    conv_weight: Array,
    a_log: Array,
    dt_bias: Array,
    shape: DeltaNetShape,
    dtype: type = np.float64,
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Convolution, normalisation and gates: q, k, v, decay, beta and the next conv_state."""
    proj, conv_weight, a_log, dt_bias = (x.astype(dtype) for x in (proj, conv_weight, a_log, dt_bias))
    rows, taps = proj.shape[0], shape.conv_kernel
    window = np.concatenate([conv_state.astype(dtype), proj[:, : shape.channels]])
    x = _silu(sum(conv_weight[tap] * window[tap : tap + rows] for tap in range(taps)))
    q, k, v = np.split(x, np.cumsum([shape.key_heads * shape.key_dim] * 2), axis=1)
    q = _unit(q.reshape(rows, shape.key_heads, shape.key_dim)) * shape.key_dim**-0.5
    k = _unit(k.reshape(rows, shape.key_heads, shape.key_dim))
    v = v.reshape(rows, shape.value_heads, shape.value_dim)
    beta = _sigmoid(proj[:, shape.b_offset : shape.a_offset])
    decay = np.exp(-np.exp(a_log) * np.logaddexp(proj[:, shape.a_offset :] + dt_bias, 0))
    return q, k, v, decay, beta, window[rows:]


def scan(
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
    state: Array,
    shape: DeltaNetShape,
    dtype: type = np.float64,
) -> tuple[Array, Array]:
    """The delta rule, token by token and head by head: y and the next state."""
    q, k, v, decay, beta, state = (x.astype(dtype) for x in (q, k, v, decay, beta, state))
    state = state.copy()
    y: Array = np.empty((q.shape[0], shape.value_heads, shape.value_dim), dtype)
    for token in range(q.shape[0]):
        for head in range(shape.value_heads):
            key_head = head // (shape.value_heads // shape.key_heads)
            memory = state[head] * decay[token, head]
            delta = beta[token, head] * (v[token, head] - memory @ k[token, key_head])
            state[head] = memory + np.outer(delta, k[token, key_head])
            y[token, head] = state[head] @ q[token, key_head]
    return y.reshape(q.shape[0], -1), state


def step(
    proj: Array,
    conv_state: Array,
    state: Array,
    conv_weight: Array,
    a_log: Array,
    dt_bias: Array,
    shape: DeltaNetShape,
    dtype: type = np.float64,
) -> tuple[Array, Array, Array]:
    """One token: y, the next conv_state and the next state."""
    q, k, v, decay, beta, conv_state = prepare(proj, conv_state, conv_weight, a_log, dt_bias, shape, dtype)
    y, state = scan(q, k, v, decay, beta, state, shape, dtype)
    return y, conv_state, state


def gated_norm(
    y: Array, proj: Array, norm_weight: Array, shape: DeltaNetShape, eps: float, dtype: type = np.float64
) -> Array:
    """RMSNorm over each value head, times its weight, times silu(z)."""
    y, proj, norm_weight = (x.astype(dtype) for x in (y, proj, norm_weight))
    heads = (y.shape[0], shape.value_heads, shape.value_dim)
    z: Array = proj[:, shape.z_offset : shape.b_offset].reshape(heads)
    x: Array = y.reshape(heads)
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * norm_weight
    return np.reshape(normed * _silu(z), y.shape)


def short_chunk(
    proj: Array,
    conv_state: Array,
    state: Array,
    conv_weight: Array,
    a_log: Array,
    dt_bias: Array,
    norm_weight: Array,
    shape: DeltaNetShape,
    eps: float,
    dtype: type = np.float64,
) -> tuple[Array, Array, Array]:
    """A chunk of rows: the gated norm of y, the next conv_state and the next state."""
    q, k, v, decay, beta, conv_state = prepare(proj, conv_state, conv_weight, a_log, dt_bias, shape, dtype)
    y, state = scan(q, k, v, decay, beta, state, shape, dtype)
    return gated_norm(y, proj, norm_weight, shape, eps, dtype), conv_state, state


def batch_step(
    proj: Array,
    conv_state: Array,
    state: Array,
    conv_weight: Array,
    a_log: Array,
    dt_bias: Array,
    norm_weight: Array,
    shape: DeltaNetShape,
    eps: float,
    dtype: type = np.float64,
) -> tuple[Array, Array, Array]:
    """One token of each sequence: the gated norm of y, the next conv_state and the next state."""
    layer = conv_weight, a_log, dt_bias, norm_weight, shape, eps, dtype
    parts = [short_chunk(proj[b : b + 1], conv_state[b], state[b], *layer) for b in range(proj.shape[0])]
    out, windows, states = zip(*parts, strict=True)
    return np.concatenate(out), np.stack(windows), np.stack(states)


def _sigmoid(x: Array) -> Array:
    return np.asarray(np.exp(-np.logaddexp(0, -x)))  # 1 / (1 + exp(-x)) without overflow


def _silu(x: Array) -> Array:
    return np.asarray(x * _sigmoid(x))


def _unit(x: Array) -> Array:
    return np.asarray(x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + L2_EPS))
