"""MLX's Gated DeltaNet (`gated_delta_update.h`), launched as MLX's host code does on Apple GPUs before the M5."""

from __future__ import annotations

import mlx.core as mx

from .kernel import WheelKernel

_SEQUENTIAL = WheelKernel("gated_delta_seq", "gated_delta_update.h")
_CHUNKED = WheelKernel("gated_delta_fused_chunk", "gated_delta_update.h", uses_fragments=True)
_CHUNK = 8
_MAX_SEQUENTIAL = 8


def gated_delta_update(
    q: mx.array, k: mx.array, v: mx.array, gamma: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """`mx.fast.gated_delta_update`: one token after the other up to 8, then chunks of 8 in matrices.

    Args:
        q, k: [B, T, Hk, Dk], Dk a multiple of 32.
        v: [B, T, Hv, Dv], Dv a multiple of 32, Hv of Hk.
        gamma, beta: decay and update rate [B, T, Hv], of q's dtype as all of the above.
        state: float32 [B, Hv, Dv, Dk].

    Returns:
        The outputs [B, T, Hv, Dv] of q's dtype and the new state.

    Raises:
        ValueError: dtypes or shapes that the kernels do not take.
    """
    batch, length, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    if len({x.dtype for x in (q, k, v, gamma, beta)}) != 1 or state.dtype != mx.float32:
        raise ValueError("q, k, v, gamma and beta must have one dtype, and the state float32")
    if key_dim % 32 or value_dim % 32 or value_heads % key_heads:
        raise ValueError(
            f"head dimensions {key_dim} and {value_dim} must be multiples of 32, and {value_heads} value heads a "
            f"multiple of the {key_heads} key heads"
        )
    template: dict[str, int | bool | mx.Dtype] = {
        "InT": q.dtype, "Dk": key_dim, "Dv": value_dim, "Hk": key_heads, "Hv": value_heads,
    }  # fmt: skip
    chunked = length > _MAX_SEQUENTIAL
    kernel = _CHUNKED if chunked else _SEQUENTIAL
    # A simdgroup owns one row of the state, or eight; a threadgroup has four.
    rows = value_dim // _CHUNK if chunked else value_dim
    y, new_state = kernel(
        {"q": q, "k": k, "v": v, "state_in": state, "g": gamma, "beta": beta},
        {"T": length},
        {"y": (v.shape, q.dtype), "state_out": (state.shape, mx.float32)},
        template={**template, **({"C": _CHUNK} if chunked else {"Ckpt": 1})},
        constants={} if chunked else {"save_state": False},
        threadgroups=(1, rows // 4, batch * value_heads),
        threadgroup=(32, 4, 1),
    )
    return y, new_state
