"""The cpu backend's own headers against numpy: simd operations for each type, vectors, bits, atomics, matrices."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx import metal
from lily_mlx.metal import CompileError, Kernel
from tests.support import assert_close, rng, to_numpy

pytestmark = pytest.mark.checked
LANES = np.arange(32)


@pytest.fixture(params=[True, False], ids=["checked", "unchecked"], autouse=True)
def mode(request):
    with metal.checked(request.param):
        yield


def run(body, inputs, outputs, threads=64, template=None, header=""):
    """Launches one threadgroup; `i` is the thread and `lane` its lane."""
    body = f"uint i = thread_position_in_grid.x;\nuint lane = thread_index_in_simdgroup;\n(void)lane;\n{body}"
    kernel = Kernel.from_source("operations", tuple(inputs), tuple(outputs), body, header)
    return kernel(
        list(inputs.values()),
        template=template,
        grid=(threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
        backend="cpu",
    )


def butterfly(values: np.ndarray, combine) -> np.ndarray:
    """Combines 32 lanes as partners 1, 2, 4, 8 and 16 apart would, in the values' own type."""
    values = values.reshape(-1, 32)
    while values.shape[1] > 1:
        values = combine(values[:, ::2], values[:, 1::2])
    return np.repeat(values, 32)


def moved(source):
    return lambda v: np.concatenate([v[:32][source], v[32:][source]])


REDUCTIONS = {
    "simd_sum": np.add, "simd_product": np.multiply, "simd_min": np.minimum, "simd_max": np.maximum,
}  # fmt: skip
BITWISE = {"simd_and": np.bitwise_and, "simd_or": np.bitwise_or, "simd_xor": np.bitwise_xor}
MOVES = {
    "simd_shuffle(v, (lane * 7 + 3) % 32)": (LANES * 7 + 3) % 32,
    "simd_shuffle_xor(v, 5)": LANES ^ 5,
    "simd_shuffle_up(v, 3)": np.where(LANES >= 3, LANES - 3, LANES),
    "simd_shuffle_down(v, 3)": np.where(LANES + 3 < 32, LANES + 3, LANES),
    "simd_shuffle_rotate_up(v, 3)": (LANES - 3) % 32,
    "simd_shuffle_rotate_down(v, 3)": (LANES + 3) % 32,
    "simd_broadcast(v, 9)": 9 + 0 * LANES,
    "simd_broadcast_first(v)": 0 * LANES,
    "simd_shuffle_and_fill_up(v, v, 4)": (LANES - 4) % 32,
    "simd_shuffle_and_fill_down(v, v, 4)": (LANES + 4) % 32,
}
INTEGERS = {
    "int": mx.int32, "uint": mx.uint32, "short": mx.int16, "ushort": mx.uint16, "uchar": mx.uint8,
    "char": mx.int8, "long": mx.int64, "ulong": mx.uint64,
}  # fmt: skip
SIXTEEN_BIT = {"half": mx.float16, "bfloat": mx.bfloat16}


@pytest.mark.parametrize("kind", INTEGERS)
def test_simd_of_integers(kind):
    dtype = INTEGERS[kind]
    values = np.array(mx.array(rng(1).integers(0, 100, 64)).astype(dtype))
    with np.errstate(over="ignore"):
        wanted = {f"{name}(v)": butterfly(values, f) for name, f in (REDUCTIONS | BITWISE).items()}
    wanted |= {call: moved(source)(values) for call, source in MOVES.items()}
    parts = values.reshape(2, 32)
    inclusive = np.cumsum(parts, 1, dtype=values.dtype)
    wanted["simd_prefix_inclusive_sum(v)"] = inclusive.ravel()
    wanted["simd_prefix_exclusive_sum(v)"] = (inclusive - parts).ravel()
    check_calls(kind, values, dtype, wanted)


@pytest.mark.parametrize("kind", ["float", *SIXTEEN_BIT])
def test_simd_of_floats(kind):
    dtype = SIXTEEN_BIT.get(kind, mx.float32)

    def rounded(values):
        return np.array(mx.array(values.astype(np.float32)).astype(dtype).astype(mx.float32))

    values = rounded(rng(2).uniform(0.5, 1.5, 64))
    wanted = {f"{name}(v)": butterfly(values, lambda a, b, f=f: rounded(f(a, b))) for name, f in REDUCTIONS.items()}
    wanted |= {call: moved(source)(values) for call, source in MOVES.items()}
    check_calls(kind, values, dtype, wanted)


def check_calls(kind, values, dtype, wanted):
    body = f"{kind} v = x[i];\n" + "".join(f"out[{64 * n} + i] = {call};\n" for n, call in enumerate(wanted))
    (out,) = run(body, {"x": mx.array(values).astype(dtype)}, {"out": ((len(wanted), 64), dtype)})
    got = np.array(out.astype(mx.float32) if dtype in SIXTEEN_BIT.values() else out)
    for row, (call, want) in zip(got, wanted.items(), strict=True):
        np.testing.assert_array_equal(row, want, err_msg=f"{call} of {kind}")


def test_simd_prefix_of_floats():
    x = rng(3).uniform(0.9, 1.1, (2, 32)).astype(np.float32)
    body = (
        "float v = x[i];\nout[i] = simd_prefix_inclusive_sum(v);\nout[64 + i] = simd_prefix_exclusive_sum(v);\n"
        "out[128 + i] = simd_prefix_inclusive_product(v);\nout[192 + i] = simd_prefix_exclusive_product(v);"
    )
    (out,) = run(body, {"x": mx.array(x)}, {"out": ((4, 64), mx.float32)})
    exact = x.astype(np.float64)
    sums, products = np.cumsum(exact, 1), np.cumprod(exact, 1)
    want = np.stack([sums.ravel(), (sums - exact).ravel(), products.ravel(), (products / exact).ravel()])
    assert_close("prefixes", out, want, 1e-6)


def test_simd_votes():
    x = np.concatenate([np.ones(32), np.arange(32) % 3 == 0]).astype(bool)
    body = (
        "bool v = x[i];\nout[i] = simd_all(v);\nout[64 + i] = simd_any(!v);\n"
        "out[128 + i] = uint(ulong(simd_ballot(v)));\nout[192 + i] = simd_is_first();"
    )
    (out,) = run(body, {"x": mx.array(x)}, {"out": ((4, 64), mx.uint32)})
    bits = int(sum(1 << lane for lane in range(0, 32, 3)))
    halves = [(1, 0), (0, 1), (0xFFFFFFFF, bits)]
    want = np.array([np.repeat(pair, 32) for pair in halves] + [np.arange(64) % 32 == 0])
    np.testing.assert_array_equal(np.array(out), want)


def test_simd_of_vectors():
    x = rng(4).normal(size=(64, 4)).astype(np.float32)
    body = "float4 v = ((const device float4*)x)[i];\n((device float4*)out)[i] = simd_shuffle_xor(v, 1) + simd_sum(v);"
    (out,) = run(body, {"x": mx.array(x)}, {"out": ((64, 4), mx.float32)})
    sums = np.repeat(x.reshape(2, 32, 4).astype(np.float64).sum(1), 32, 0)
    assert_close("float4", out, x[np.arange(64) ^ 1] + sums, 1e-6)


@pytest.mark.parametrize("threads", [1, 5, 32, 33, 63, 64, 100, 511], ids=lambda n: f"{n}-threads")
def test_last_simdgroup_is_not_full(threads):
    x = np.arange(1, threads + 1, dtype=np.float32)
    body = (
        "threadgroup uint arrived[1];\nif (i == 0) { arrived[0] = 0u; }\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "atomic_fetch_add_explicit((threadgroup atomic_uint*)arrived, 1u, memory_order_relaxed);\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "out[i] = simd_sum(x[i]);\nmost[i] = simd_max(x[i]) + float(arrived[0]);"
    )
    outputs = {"out": ((threads,), mx.float32), "most": ((threads,), mx.float32)}
    out, most = run(body, {"x": mx.array(np.resize(x, max(threads, 8)))}, outputs, threads=threads)
    groups = [x[start : start + 32] for start in range(0, threads, 32)]
    np.testing.assert_array_equal(np.array(out), np.concatenate([0 * g + g.sum() for g in groups]))
    np.testing.assert_array_equal(np.array(most), np.concatenate([0 * g + g.max() for g in groups]) + threads)


VECTOR_EXPRESSIONS = {
    "a + b * 2.0f - a / b": lambda a, b: a + b * 2 - a / b,
    "-a": lambda a, b: -a,
    "float4(a.xy, b.zw)": lambda a, b: np.stack([a[0], a[1], b[2], b[3]]),
    "float4(a.xyz, 1.0f)": lambda a, b: np.stack([a[0], a[1], a[2], 0 * a[0] + 1]),
    "float4(1.0f, a.yzw)": lambda a, b: np.stack([0 * a[0] + 1, a[1], a[2], a[3]]),
    "float4(a.x)": lambda a, b: np.stack([a[0]] * 4),
    "float4(a[3], a[2], a[1], a[0])": lambda a, b: a[::-1],
    "float4(int4(a))": lambda a, b: np.trunc(a),
    "float4(as_type<float2>(as_type<uint2>(a.xy)), a.lo)": lambda a, b: np.stack([a[0], a[1], a[0], a[1]]),
    "select(a, b, a < b)": np.maximum,
    "metal::max(a, b) + metal::min(a, b)": lambda a, b: a + b,
    "metal::abs(a)": lambda a, b: np.abs(a),
    "metal::clamp(a, float4(-1.0f), float4(0.5f))": lambda a, b: np.clip(a, -1, 0.5),
    "metal::exp(a)": lambda a, b: np.exp(a),
    "metal::fma(a, b, a)": lambda a, b: a * b + a,
    "float4(metal::dot(a, b))": lambda a, b: np.stack([(a * b).sum(0)] * 4),
    "float4(any(a > b), all(a == a), a.x > b.x, 0.0f)": lambda a, b: np.stack(
        [(a > b).any(0), a[0] == a[0], a[0] > b[0], 0 * a[0]]
    ),
    "mix(a, b, float4(0.25f))": lambda a, b: a * 0.75 + b * 0.25,
}


def test_float_vectors():
    generator = rng(5)
    a, b = (generator.normal(size=(64, 4)).astype(np.float32) for _ in range(2))
    body = "float4 a = ((const device float4*)x)[i], b = ((const device float4*)y)[i];\n" + "".join(
        f"((device float4*)out)[{64 * n} + i] = {expression};\n" for n, expression in enumerate(VECTOR_EXPRESSIONS)
    )
    count = len(VECTOR_EXPRESSIONS)
    (out,) = run(body, {"x": mx.array(a), "y": mx.array(b)}, {"out": ((count, 64, 4), mx.float32)})
    for (expression, function), got in zip(VECTOR_EXPRESSIONS.items(), to_numpy(out), strict=True):
        assert_close(expression, got.T, function(a.T.astype(np.float64), b.T.astype(np.float64)), 2e-6)


def test_writing_components():
    body = """
        float4 v = float4(0.0f);
        v.x = 1.0f; v.yz = float2(2.0f, 3.0f); v[3] = 4.0f;
        v.xy = v.zw; v.zw += float2(10.0f); v *= 2.0f;
        float3 u = float3(1.0f, 2.0f, 3.0f); u.xy = u.yz;
        uint2 w = uint2(3u, 5u) << uint2(1u); w ^= uint2(1u); ushort4 s = ushort4(uint4(70000u, 1u, 2u, 3u));
        out[0] = v.x; out[1] = v.y; out[2] = v.z; out[3] = v.w; out[4] = u.x; out[5] = u.y; out[6] = u.z;
        out[7] = w.x; out[8] = w.y; out[9] = s.x; out[10] = sizeof(float3); out[11] = sizeof(packed_float3);
        out[12] = sizeof(bfloat4); out[13] = sizeof(uchar4); out[14] = (~w).x == ~7u; out[15] = (w % 4u).y;
    """
    (out,) = run(body, {}, {"out": ((16,), mx.float32)}, threads=1)
    want = [6, 8, 26, 28, 2, 3, 3, 7, 11, 70000 % 65536, 16, 12, 8, 4, 1, 3]
    np.testing.assert_array_equal(np.array(out), want)


@pytest.mark.parametrize("kind", SIXTEEN_BIT)
def test_every_sixteen_bit_float(kind):
    """All 65,536 patterns to float and back, and rounding to nearest even of floats between them."""
    dtype = SIXTEEN_BIT[kind]
    bits = np.arange(65536, dtype=np.uint16)
    generator = rng(6)
    floats = generator.integers(0, 2**32, 65536, dtype=np.uint64).astype(np.uint32).view(np.float32)
    halfway = (bits[:4096].astype(np.uint32) << 16 | 0x8000).view(np.float32)
    floats[:4096] = (
        np.where(np.arange(4096) % 2, halfway * 1e30, halfway)
        if kind == "bfloat"
        else generator.normal(size=4096) * 1e-6
    )
    body = """
        for (int k = 0; k < 128; ++k) {
            uint j = i * 128u + uint(k);
            wide[j] = float(as_type<T>(x[j]));
            back[j] = as_type<ushort>(T(float(as_type<T>(x[j]))));
            narrow[j] = T(y[j]);
        }
    """
    outputs = {"wide": ((65536,), mx.float32), "back": ((65536,), mx.uint16), "narrow": ((65536,), dtype)}
    inputs = {"x": mx.array(bits), "y": mx.array(floats)}
    wide, back, narrow = run(body, inputs, outputs, threads=512, template={"T": dtype})
    want = np.array(mx.array(bits).view(dtype).astype(mx.float32))
    np.testing.assert_array_equal(np.array(wide), want)
    same = np.array(back) == bits
    assert np.all(same | np.isnan(want))
    want = np.array(mx.array(floats).astype(dtype).astype(mx.float32))
    np.testing.assert_array_equal(np.array(narrow.astype(mx.float32)), want)


def test_sixteen_bit_float_needs_an_explicit_conversion():
    with pytest.raises(CompileError, match="<operations>:4"):
        run("bfloat v = 1.0f;\nout[i] = v;", {}, {"out": ((64,), mx.bfloat16)})


def test_bits():
    x = np.concatenate([[0, 1, 2**31, 2**32 - 1], rng(7).integers(0, 2**32, 60)]).astype(np.uint32)
    calls = {
        "popcount(v)": lambda v: bin(v).count("1"),
        "clz(v)": lambda v: 32 - v.bit_length(),
        "ctz(v)": lambda v: (v & -v).bit_length() - 1 if v else 32,
        "reverse_bits(v)": lambda v: int(f"{v:032b}"[::-1], 2),
        "rotate(v, 7u)": lambda v: (v << 7 | v >> 25) % 2**32,
        "extract_bits(v, 5u, 9u)": lambda v: v >> 5 & 511,
        "insert_bits(v, 3u, 4u, 2u)": lambda v: v & ~(3 << 4) | 3 << 4,
        "mulhi(v, 123456789u)": lambda v: v * 123456789 >> 32,
        "absdiff(v, 1000u)": lambda v: abs(v - 1000),
        "uint(clz(ushort(v)))": lambda v: 16 - (v % 65536).bit_length(),
    }
    body = "uint v = x[i];\n" + "".join(f"out[{64 * n} + i] = {call};\n" for n, call in enumerate(calls))
    (out,) = run(body, {"x": mx.array(x)}, {"out": ((len(calls), 64), mx.uint32)})
    for row, (call, function) in zip(np.array(out), calls.items(), strict=True):
        np.testing.assert_array_equal(row, [function(int(v)) for v in x], err_msg=call)


ATOMICS = {
    "add": (0, lambda v: v.sum()), "sub": (0, lambda v: -v.sum()), "max": (0, np.max), "min": (10**6, np.min),
    "or": (0, np.bitwise_or.reduce), "and": (-1, np.bitwise_and.reduce), "xor": (0, np.bitwise_xor.reduce),
}  # fmt: skip


@pytest.mark.parametrize("name", ATOMICS)
def test_atomics_on_threadgroup_memory(name):
    start, function = ATOMICS[name]
    x = rng(8).integers(1, 10**6, 256).astype(np.int32)
    body = (
        "threadgroup atomic_int total[1];\n"
        f"if (i == 0) {{ atomic_store_explicit(&total[0], {start}, memory_order_relaxed); }}\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        f"atomic_fetch_{name}_explicit(&total[0], x[i], memory_order_relaxed);\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "if (i == 0) { out[0] = atomic_load_explicit(&total[0], memory_order_relaxed); }"
    )
    (out,) = run(body, {"x": mx.array(x)}, {"out": ((1,), mx.int32)}, threads=256)
    assert int(out.item()) == int(function(x))


def test_atomic_counter_gives_each_thread_its_own_number():
    body = (
        "threadgroup atomic_uint n[2];\nif (i < 2) { atomic_store_explicit(&n[i], 0u, memory_order_relaxed); }\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "out[i] = atomic_fetch_add_explicit(&n[0], 1u, memory_order_relaxed);\n"
        "uint seen = 0u;\n"
        "while (!atomic_compare_exchange_weak_explicit(\n"
        "    &n[1], &seen, seen + 2u, memory_order_relaxed, memory_order_relaxed)) {}\n"
        "out[128 + i] = seen;"
    )
    (out,) = run(body, {}, {"out": ((2, 128), mx.uint32)}, threads=128)
    np.testing.assert_array_equal(np.sort(np.array(out), 1), [np.arange(128), 2 * np.arange(128)])


def test_atomic_float_in_device_memory():
    body = (
        "device atomic_float* sum = (device atomic_float*)out;\n"
        "if (i == 0) { atomic_store_explicit(sum, 0.0f, memory_order_relaxed); }\n"
        "threadgroup_barrier(mem_flags::mem_device);\n"
        "atomic_fetch_add_explicit(sum, float(i), memory_order_relaxed);"
    )
    (out,) = run(body, {}, {"out": ((1,), mx.float32)}, threads=128)
    assert out.item() == 127 * 128 / 2


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=["float", "half", "bfloat"])
@pytest.mark.parametrize("transpose", [False, True], ids=["straight", "transposed"])
def test_matrices(dtype, transpose):
    """D = A B + C with A inside a wider array, B perhaps transposed, D stored both ways round."""
    generator = rng(9)
    a, b, c = (mx.array(generator.normal(size=s).astype(np.float32)).astype(dtype) for s in [(11, 20), (8, 8), (8, 8)])
    body = f"""
        simdgroup_matrix<T, 8, 8> left, right, start;
        simdgroup_matrix<float, 8, 8> sum, product = make_filled_simdgroup_matrix<float, 8, 8>(7.0f);
        simdgroup_load(left, a, 20, ulong2(4, 2));
        simdgroup_load(right, b, 8, ulong2(0, 0), {str(transpose).lower()});
        simdgroup_load(start, c, 8);
        simdgroup_multiply(product, left, right);
        simdgroup_multiply_accumulate(sum, left, right, start);
        simdgroup_store(product, out, 8);
        simdgroup_store(sum, out + 64, 8, ulong2(0, 0), true);
        uint row = lily_fragment_row(lane), column = lily_fragment_column(lane);
        for (uint e = 0; e < 2; ++e) {{
            out[128 + row * 8 + column + e] = sum.thread_elements()[e];
        }}
        sum.thread_elements()[0] = float(lane); sum.thread_elements()[1] = float(lane) + 0.5f;
        simdgroup_store(sum, out + 192, 8);
        simdgroup_matrix<float, 8, 8> unit(2.0f);
        simdgroup_store(unit, out + 256, 8);
    """
    (out,) = run(body, {"a": a, "b": b, "c": c}, {"out": ((5, 8, 8), mx.float32)}, threads=32, template={"T": dtype})
    left, right, start = to_numpy(a)[2:10, 4:12], to_numpy(b), to_numpy(c)
    product = left @ (right.T if transpose else right)
    got = to_numpy(out)
    for name, values, want in zip(
        ["product", "stored transposed", "by lanes", "unit"],
        got[[0, 1, 2, 4]],
        [product, (product + start).T, product + start, 2 * np.eye(8)],
        strict=True,
    ):
        assert_close(name, values, want, 1e-6)
    # Each lane owns two neighbours in a row, and not where Apple's GPUs have them.
    lanes = got[3].reshape(8, 4, 2)
    np.testing.assert_array_equal(np.sort(lanes[..., 0], axis=None), np.arange(32))
    np.testing.assert_array_equal(lanes[..., 1] - lanes[..., 0], 0.5)
    apple = [(((lane // 4) & 4) + (lane // 2) % 4, ((lane // 4) & 2) * 2 + lane % 2 * 2) for lane in range(32)]
    assert any(got[3][row, column] != lane for lane, (row, column) in enumerate(apple))


def test_float_and_bfloat_mix_as_in_metal():
    x = mx.array(rng(10).normal(size=64).astype(np.float32)).astype(mx.bfloat16)
    body = """
        float f = 1.5f;
        f *= x[i]; f += x[i] * 2; float g = i % 2 ? x[i] : 0.25f;
        bfloat h = x[i] * x[i];
        h += 1.0f;
        out[i] = f + g * x[i] - float(h) + (x[i] > 0.5f) + (x[i] < x[63 - i]);
    """
    (out,) = run(body, {"x": x}, {"out": ((64,), mx.float32)})
    v = to_numpy(x)

    def rounded(values):
        return to_numpy(mx.array(values.astype(np.float32)).astype(mx.bfloat16))

    h = rounded(rounded(v * v) + 1)
    want = 1.5 * v + 2 * v + np.where(np.arange(64) % 2, v, 0.25) * v - h + (v > 0.5) + (v < v[::-1])
    assert_close("mixed", out, want, 1e-6)


def test_apple_spellings_are_accepted():
    header = """
        #include <metal_stdlib>
        #include <metal_simdgroup>
        using namespace metal;
        constant constexpr float table[2] = {0.5f, 2.0f};
        template <typename T> METAL_FUNC T twice(const constant T* p, thread float& sum) {
            sum += p[0]; return p[0] * T(2);
        }
        struct Pair { float a; float b; float both() const thread { return a + b; } };
    """
    body = """
        #pragma clang loop unroll(full)
        for (int k = 0; k < 2; ++k) { out[i] = table[k]; }
        #pragma unroll
        for (int k = 0; k < 2; ++k) { out[i] += float(k); }
        thread float sum = 0.0f;
        Pair pair = {1.0f, 2.0f};
        out[i] += twice(scale, sum) + sum + pair.both() + precise::exp(0.0f) + fast::exp(0.0f) + M_PI_F * 0.0f;
    """
    (out,) = run(body, {"scale": mx.array([3.0])}, {"out": ((64,), mx.float32)}, header=header)
    np.testing.assert_array_equal(np.array(out), 2 + 1 + 6 + 3 + 3 + 2)
