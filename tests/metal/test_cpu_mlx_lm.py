"""mlx-lm's own inline Metal kernels, unchanged, on the cpu backend.

Nobody wrote them for it: the modules are imported once more, under a name of their own, while
`mx.metal.is_available()` says yes and `mx.fast.metal_kernel` makes kernels of this runtime.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.gated_delta import gated_delta_ops
from mlx_lm.models.ssm import ssm_attn

from lily_mlx import metal
from lily_mlx.metal import cpu_backend
from lily_mlx.metal.launch import Launch
from lily_mlx.metal.source import SourcePart, make_text
from tests.support import assert_close, rng, to_numpy

pytestmark = pytest.mark.checked
ROOT = Path(mlx_lm.__file__).parent


class InlineKernel:
    """What `mx.fast.metal_kernel` returns, for the cpu backend. MLX takes grids that are no multiples."""

    def __init__(self, name, input_names, output_names, source, header="", ensure_row_contiguous=True):
        parts = (SourcePart(f"<{name} header>", header),) if header else ()
        self.text = make_text(name, tuple(input_names), tuple(output_names), SourcePart(f"<{name}>", source), parts)

    def __call__(self, inputs, template, grid, threadgroup, output_shapes, output_dtypes):
        return cpu_backend.launch(
            Launch(
                self.text, inputs, dict(template), grid, threadgroup, output_shapes, output_dtypes,
                metal.is_checked(),
            )
        )  # fmt: skip


@contextlib.contextmanager
def kernels_of_this_runtime():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.metal, "is_available", lambda: True)
        patch.setattr(mx.fast, "metal_kernel", InlineKernel)
        yield


def load(path: str, name: str):
    """Imports a file or a package of mlx-lm under another name."""
    file = ROOT / path
    folder = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with kernels_of_this_runtime():
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def delta():
    return load("models/gated_delta.py", "gated_delta_on_cpu")


@pytest.fixture(scope="module")
def kernels():
    return load("kernels/__init__.py", "mlx_lm_kernels_on_cpu")


@pytest.fixture(params=[True, False], ids=["checked", "unchecked"], autouse=True)
def mode(request):
    with metal.checked(request.param):
        yield


def normal(generator: np.random.Generator, shape: Sequence[int], dtype=mx.float32, scale=1.0) -> mx.array:
    return mx.array(generator.normal(size=shape).astype(np.float32) * scale).astype(dtype)


def delta_inputs(dtype, *, batch=2, length=3, heads=(1, 2), value_dim=16, vector_gate=False) -> Mapping[str, mx.array]:
    generator = rng(3)
    keys, values = heads
    gate_shape = (batch, length, values, 128) if vector_gate else (batch, length, values)
    return {
        "q": normal(generator, (batch, length, keys, 128), dtype, 128**-1.0),
        "k": normal(generator, (batch, length, keys, 128), dtype, 128**-0.5),
        "v": normal(generator, (batch, length, values, value_dim), dtype),
        "g": mx.array(generator.uniform(0.5, 1, gate_shape).astype(np.float32)),
        "beta": mx.array(generator.uniform(0, 1, (batch, length, values)).astype(np.float32)).astype(dtype),
        "state": normal(generator, (batch, values, value_dim, 128)),
    }


DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(mx.float32, 2e-6), (mx.bfloat16, 1e-2), (mx.float16, 2e-3)],
    ids=["f32", "bf16", "f16"],
)


def assert_like_reference(got, inputs, tolerance, mask=None):
    # mlx-lm rounds after each operation when it is given bfloat16, so the reference gets the same values in float32.
    exact = {name: x.astype(mx.float32) for name, x in inputs.items()}
    want_y, want_state = gated_delta_ops(**exact, mask=mask)
    assert_close("y", got[0], to_numpy(want_y), tolerance)
    assert_close("state", got[1], to_numpy(want_state), 2e-6)


@DTYPES
@pytest.mark.parametrize("variant", ["packed", "generic", "xtree"])
def test_gated_delta(delta, variant, dtype, tolerance):
    inputs = delta_inputs(dtype)
    function = {
        "packed": delta.gated_delta_kernel,
        "generic": delta.gated_delta_kernel_unpacked,
        "xtree": delta.gated_delta_kernel_xtree,
    }[variant]
    assert_like_reference(function(**inputs), inputs, tolerance)


def test_gated_delta_packed_equals_its_comparator(delta):
    """mlx-lm promises equal bits: the kernels sum in the same order."""
    inputs = delta_inputs(mx.bfloat16, length=5)
    for packed, tree in zip(delta.gated_delta_kernel(**inputs), delta.gated_delta_kernel_xtree(**inputs), strict=True):
        assert mx.array_equal(packed, tree)


@DTYPES
def test_gated_delta_vector_gate(delta, dtype, tolerance):
    inputs = delta_inputs(dtype, vector_gate=True)
    assert_like_reference(delta.gated_delta_kernel(**inputs), inputs, tolerance)


@pytest.mark.parametrize("vector_gate", [False, True], ids=["scalar-gate", "vector-gate"])
def test_gated_delta_masked(delta, vector_gate):
    inputs = delta_inputs(mx.float32, vector_gate=vector_gate)
    mask = mx.array([[True, True, False], [False, True, True]])
    if metal.is_checked():
        # Where the mask is off, all 32 lanes write the same zero. Apple's GPUs do not mind; the checker does.
        with pytest.raises(metal.LaunchError, match=r"writes output y.* wrote with no barrier between"):
            delta.gated_delta_kernel(**inputs, mask=mask)
        return
    y, state = delta.gated_delta_kernel(**inputs, mask=mask)
    want_y, want_state = gated_delta_ops(**inputs, mask=mask)
    # The kernel writes zeros where the mask is off; the operations leave what they computed.
    want_y = mx.where(mask[:, :, None, None], want_y, 0.0)
    assert_close("y", y, to_numpy(want_y), 2e-6)
    assert_close("state", state, to_numpy(want_state), 2e-6)


def test_ssm():
    ssm = load("models/ssm.py", "ssm_on_cpu")
    generator = rng(4)
    batch, heads, groups, dim, states = 1, 4, 2, 8, 64
    x = normal(generator, (batch, 1, heads, dim))
    a_log, skip, dt_bias = (normal(generator, (heads,)) for _ in range(3))
    b, c = (normal(generator, (batch, 1, groups, states)) for _ in range(2))
    dt = normal(generator, (batch, 1, heads))
    state = normal(generator, (batch, heads, dim, states))
    limits = (0.001, 100.0)
    y, new_state = ssm.ssm_update_kernel(x, a_log, b, c, skip, dt, dt_bias, state, limits)
    want_y, want_state = ssm_attn(x, a_log, b, c, skip, dt, dt_bias, state, limits)
    assert_close("y", y.reshape(want_y.shape), to_numpy(want_y), 1e-5)
    assert_close("state", new_state, to_numpy(want_state), 1e-5)


@pytest.mark.parametrize("experts", [16, 40], ids=["16-experts", "40-experts"])
def test_expert_routing(kernels, experts):
    generator = rng(5)
    logits, bias = normal(generator, (3, experts)), normal(generator, (experts,))
    multiplier, eps, scale, top_k = 0.7, 1e-3, 2.5, 4
    indices, weights = kernels.expert_routing(
        logits, bias, top_k=top_k, multiplier=multiplier, score_eps=eps, route_scale=scale
    )
    scores = mx.sigmoid(logits * multiplier)
    want = np.argsort(-to_numpy(scores + bias), axis=-1, kind="stable")[:, :top_k]
    np.testing.assert_array_equal(np.array(indices), want)
    chosen = np.take_along_axis(to_numpy(scores), want, -1)
    assert_close("weights", weights, chosen / (chosen.sum(-1, keepdims=True) + eps) * scale, 1e-6)


def head_norms(qkvg, heads, kv_heads, dim, eps, scale):
    """q and k as mlx's own functions make them."""
    rows = qkvg.shape[:-1]
    q = qkvg[..., : heads * dim].reshape(*rows, heads, dim)
    k = qkvg[..., heads * dim : (heads + kv_heads) * dim].reshape(*rows, kv_heads, dim)
    q, k = (mx.fast.rms_norm(x, None, eps) for x in (q, k))
    return q.astype(mx.float32) * scale, k


@pytest.mark.parametrize("dim", [64, 80], ids=["64-wide", "80-wide"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["f32", "bf16"])
def test_qk_norm(kernels, dim, dtype):
    qkvg = normal(rng(6), (1, 3, 2 * 5 * dim), dtype)  # 15 rows of 32 threads: the last threadgroup is not full
    q, k = kernels.qk_norm(qkvg, n_heads=4, n_kv_heads=1, head_dim=dim, eps=1e-5, query_scale=1.5)
    want_q, want_k = head_norms(qkvg, 4, 1, dim, 1e-5, 1.5)
    tolerance = 1e-6 if dtype == mx.float32 else 8e-3
    assert_close("q", q, to_numpy(want_q), tolerance)
    assert_close("k", k, to_numpy(want_k), tolerance)


@pytest.mark.parametrize("offset", [0, 7, "per-row"], ids=["start", "later", "per-row"])
def test_qk_norm_rope(kernels, offset):
    dim, base = 64, 10000.0
    qkvg = normal(rng(7), (2, 3, 2 * 3 * dim))
    offset = mx.array([2, 5]) if offset == "per-row" else offset
    q, k = kernels.qk_norm_rope(
        qkvg, n_heads=2, n_kv_heads=1, head_dim=dim, eps=1e-5, query_scale=0.5, rope_base=base, offset=offset
    )
    for got, x in zip((q, k), head_norms(qkvg, 2, 1, dim, 1e-5, 0.5), strict=True):
        want = mx.fast.rope(
            x.transpose(0, 2, 1, 3), dim, traditional=True, base=base, scale=1.0, offset=offset
        ).transpose(0, 2, 1, 3)
        assert_close("rotated", got, to_numpy(want), 1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 3, 5)], ids=["24-rows", "15-rows"])
def test_rms_norm_sigmoid_gate(kernels, shape):
    batch, heads, length = shape
    generator = rng(8)
    x = normal(generator, (batch, length, heads, 96)).transpose(0, 2, 1, 3)  # a strided view
    gate = normal(generator, (batch, length, heads * 96))
    out = kernels.rms_norm_sigmoid_gate(x, gate, eps=1e-5)
    want = mx.fast.rms_norm(x, None, 1e-5).transpose(0, 2, 1, 3).reshape(gate.shape) * mx.sigmoid(gate)
    assert_close("out", out, to_numpy(want), 1e-6)


@pytest.mark.parametrize("dim", [256, 1000], ids=["256-wide", "1000-wide"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "post-weight"])
@pytest.mark.parametrize("normed", [False, True], ids=["last", "next-norm"])
def test_norm_add_norm(kernels, dim, scaled, normed):
    generator = rng(9)
    branch, stream = normal(generator, (3, dim)), normal(generator, (3, dim))
    alpha, beta, weight = (normal(generator, (dim,)) for _ in range(3))
    norm = nn.RMSNorm(dim, eps=1e-5)
    norm.weight = normal(generator, (dim,))
    got, got_normed = kernels.norm_add_norm(
        branch, stream, alpha=alpha, beta=beta, post_weight=weight if scaled else None, post_eps=1e-6,
        next_norm=norm if normed else None,
    )  # fmt: skip
    want = alpha * stream + beta * mx.fast.rms_norm(weight * branch if scaled else branch, None, 1e-6)
    assert_close("stream", got, to_numpy(want), 1e-6)
    if normed:
        assert_close("normed", got_normed, to_numpy(norm(want)), 2e-6)
        assert_close("pre_norm", kernels.pre_norm(got, norm, dtype=mx.float32), to_numpy(got_normed), 0)
    else:
        assert got_normed is None


@pytest.mark.parametrize("dim", [256, 640], ids=["256-wide", "640-wide"])
def test_post_expert_norm_combine(kernels, dim):
    generator = rng(10)
    experts, weights = normal(generator, (2, 3, 4, dim)), normal(generator, (2, 3, 4))
    norm_weight = normal(generator, (dim,))
    got = kernels.post_expert_norm_combine(experts, weights, norm_weight=norm_weight, eps=1e-5)
    want = (mx.fast.rms_norm(experts * norm_weight, None, 1e-5) * weights[..., None]).sum(-2)
    assert_close("combined", got, to_numpy(want), 2e-6)
