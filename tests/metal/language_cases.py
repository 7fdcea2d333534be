"""Small kernels that use, together, every part of Metal's language that our kernels may use.

Each case has inputs, a launch and the values that numpy gives. They run on any backend: through
`test_language.py`, and through `tools/gpu/smoke.py`, which says in one line per case what a new device or
driver does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from lily_mlx.metal import Kernel
from lily_mlx.metal.kernel import PACKAGE
from lily_mlx.metal.launch import Launch, TemplateValue

F32, U32, I32, BF16, F16 = mx.float32, mx.uint32, mx.int32, mx.bfloat16, mx.float16
INCLUDE = "metal/include/"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@dataclass(frozen=True)
class Case:
    """A kernel, its launch, and what each output must hold within `tolerance` of its row's largest value."""

    name: str
    kernel: Kernel
    inputs: Sequence[mx.array]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    output_shapes: Sequence[Sequence[int]]
    output_dtypes: Sequence[mx.Dtype]
    expected: Sequence[np.ndarray]
    template: Mapping[str, TemplateValue] = field(default_factory=dict)
    tolerance: float = 0.0

    def run(self) -> list[mx.array]:
        return self.kernel(
            self.inputs,
            template=self.template,
            grid=self.grid,
            threadgroup=self.threadgroup,
            output_shapes=self.output_shapes,
            output_dtypes=self.output_dtypes,
        )

    def launch(self) -> Launch:
        return Launch(
            self.kernel.text, self.inputs, self.template, self.grid, self.threadgroup, self.output_shapes,
            self.output_dtypes,
        )  # fmt: skip

    def check(self, outputs: Sequence[mx.array]) -> list[str]:
        """What is wrong with the outputs, one line for each; empty if nothing."""
        wrong = []
        for index, (output, want) in enumerate(zip(outputs, self.expected, strict=True)):
            got = np.array(output.astype(F32)) if mx.issubdtype(output.dtype, mx.floating) else np.array(output)
            want = np.asarray(want, np.float64)
            got = got.astype(np.float64)
            if got.shape != want.shape:
                wrong.append(f"output {index}: shape {got.shape}, expected {want.shape}")
                continue
            same = (got == want) | (np.isnan(got) & np.isnan(want))
            finite = np.where(np.isfinite(want), np.abs(want), 0.0)
            bound = self.tolerance * finite.max(axis=-1, keepdims=True)
            with np.errstate(invalid="ignore"):
                bad = np.argwhere(~(same | (np.abs(got - want) <= bound)))
            if len(bad):
                where = tuple(int(i) for i in bad[0])
                wrong.append(
                    f"output {index}: {len(bad)} of {got.size} wrong, first at {where}: "
                    f"{got[where]!r}, expected {want[where]!r}"
                )
        return wrong


def _rounded(values: np.ndarray, dtype: mx.Dtype = BF16) -> np.ndarray:
    return np.array(mx.array(values.astype(np.float32)).astype(dtype).astype(F32))


def _one_group(
    name: str, body: str, inputs: Mapping[str, mx.array], outputs: Mapping[str, tuple[np.ndarray, mx.Dtype]],
    threads: int = 64, header: str = "", **options,
) -> Case:  # fmt: skip
    return Case(
        name,
        Kernel.from_source(name, tuple(inputs), tuple(outputs), body, header),
        list(inputs.values()),
        (threads, 1, 1),
        (threads, 1, 1),
        [want.shape for want, _ in outputs.values()],
        [dtype for _, dtype in outputs.values()],
        [want for want, _ in outputs.values()],
        **options,
    )


def attributes() -> Case:
    names = [
        "thread_position_in_grid.x", "thread_position_in_grid.y", "thread_position_in_grid.z",
        "threadgroup_position_in_grid.x", "threadgroup_position_in_grid.y", "threadgroup_position_in_grid.z",
        "thread_position_in_threadgroup.x", "thread_position_in_threadgroup.y",
        "thread_position_in_threadgroup.z", "thread_index_in_threadgroup", "simdgroup_index_in_threadgroup",
        "thread_index_in_simdgroup", "threads_per_threadgroup.y", "threadgroups_per_grid.x",
        "threads_per_grid.z", "simdgroups_per_threadgroup", "threads_per_simdgroup",
    ]  # fmt: skip
    grid, group = (16, 6, 4), (8, 3, 2)
    z, y, x = np.meshgrid(*(np.arange(n) for n in grid[::-1]), indexing="ij")
    inner = (x % 8) + 8 * ((y % 3) + 3 * (z % 2))
    one = np.ones_like(x)
    columns = [
        x, y, z, x // 8, y // 3, z // 2, x % 8, y % 3, z % 2, inner, inner // 32, inner % 32,
        3 * one, 2 * one, 4 * one, 2 * one, 32 * one,
    ]  # fmt: skip
    body = f"uint3 p = thread_position_in_grid;\nuint at = (p.x + 16 * (p.y + 6 * p.z)) * {len(names)};\n" + "".join(
        f"out[at + {i}] = {name};\n" for i, name in enumerate(names)
    )
    want = np.stack(columns, axis=-1)
    kernel = Kernel.from_source("attributes", (), ("out",), body)
    return Case("attributes", kernel, [], grid, group, [want.shape], [U32], [want])


def templates_and_shapes() -> Case:
    x = np.arange(6 * 5, dtype=np.float32).reshape(6, 5)
    body = """
        uint i = thread_position_in_grid.x;
        if (i < uint(x_shape[0] * x_shape[1])) {
          out[i] = T(x[i] * SCALE + OFFSET + (ON ? 1 : 0) + x_shape[0] * 100 + x_ndim + table[i % 4]);
        }
    """
    header = "constant constexpr float OTHER = 0.5f;\nconstant constexpr int table[4] = {1, 2, 4, 8};\n"
    want = _rounded(x * 3 + 0.25 + 1 + 600 + 2 + np.array([1, 2, 4, 8])[np.arange(30) % 4].reshape(6, 5), F16)
    return _one_group(
        "templates_and_shapes", body, {"x": mx.array(x)}, {"out": (want, F16)}, header=header,
        template={"T": F16, "SCALE": 3, "OFFSET": 0.25, "ON": True},
    )  # fmt: skip


def integer_types() -> Case:
    rng = np.random.default_rng(1)
    a = rng.integers(0, 256, 64, dtype=np.uint8)
    b = rng.integers(-100, 100, 64).astype(np.int8)
    c = rng.integers(-(2**62), 2**62, 64)
    d = rng.integers(0, 2, 64).astype(bool)
    body = """
        uint i = thread_position_in_grid.x;
        ushort narrow = ushort(a[i] << 9);
        ulong wide = ulong(c[i]) >> 7;
        out[i] = int(narrow) + int(b[i]) + (d[i] ? 1 : 0);
        top[i] = uint(wide >> 32) ^ uint(wide & 0xffffffffu);
        uint wider = uint(a[i]);
        bits[i] = metal::popcount(wider) + 100 * metal::clz(wider) + 10000 * metal::ctz(wider | 256u);
        flag[i] = !d[i];
    """
    wide = c.view(np.uint64) >> np.uint64(7)
    ones = np.array([bin(v).count("1") for v in a])
    zeros = np.array([32 - int(v).bit_length() for v in a])
    low = np.array([(int(v) | 256) & -(int(v) | 256) for v in a])
    outputs = {
        "out": ((a.astype(np.int64) << 9 & 0xFFFF) + b + d, I32),
        "top": ((wide >> np.uint64(32)).astype(np.uint32) ^ wide.astype(np.uint32), U32),
        "bits": (ones + 100 * zeros + 10000 * np.log2(low).astype(int), U32),
        "flag": (~d, mx.bool_),
    }
    inputs = {name: mx.array(v) for name, v in (("a", a), ("b", b), ("c", c), ("d", d))}
    return _one_group("integer_types", body, inputs, outputs)


def sixteen_bit_floats(dtype: mx.Dtype, kind: str) -> Case:
    rng = np.random.default_rng(2)
    f = np.concatenate([rng.normal(size=120), [0.0, -0.0, 1e-30, 100.0, np.inf, -np.inf, np.nan, 1.00390625]])
    f = f.astype(np.float32)
    g = _rounded(rng.normal(size=128), dtype)
    body = f"""
        uint i = thread_position_in_grid.x;
        {kind} a = {kind}(f[i]);
        float b = g[i];
        out[i] = a;
        mixed[i] = f[i] * g[i] + 1 - (i % 2 ? b : float(a));
        pattern[i] = as_type<ushort>(a);
    """
    with np.errstate(invalid="ignore"):
        rounded = _rounded(f, dtype)
        mixed = (f * g + 1) - np.where(np.arange(128) % 2, g, rounded)
    pattern = np.array(mx.array(f).astype(dtype).view(mx.uint16)).astype(np.int64)
    # A NaN has many patterns; the kernel's own is checked by `out`.
    nan = np.isnan(f)
    body += f"  if (f[i] != f[i]) pattern[i] = {int(pattern[nan][0])};\n"
    outputs = {"out": (rounded, dtype), "mixed": (mixed, F32), "pattern": (pattern, mx.uint16)}
    inputs = {"f": mx.array(f), "g": mx.array(g).astype(dtype)}
    return _one_group(f"{kind}_conversions", body, inputs, outputs, threads=128, tolerance=2e-6)


def vectors() -> Case:
    rng = np.random.default_rng(3)
    x = _rounded(rng.normal(size=512))
    y = rng.normal(size=(64, 4)).astype(np.float32)
    body = """
        uint i = thread_position_in_grid.x;
        uint4 packed = *(const device uint4*)(x + 8 * i);
        float4 low = float4(as_type<float>(packed.x << 16), as_type<float>(packed.y << 16),
                            as_type<float>(packed.z << 16), as_type<float>(packed.w << 16));
        uint4 tops = packed & 0xffff0000u;
        float4 high = float4(as_type<float>(tops[0]), as_type<float>(tops[1]), as_type<float>(tops[2]),
                             as_type<float>(tops[3]));
        float4 v = ((const device float4*)y)[i];
        float4 sum = low * v + 2.0f * high - v / 2.0f;
        sum += float4(1.0f);
        sum[1] = -sum[1];
        *(device float4*)(out + 4 * i) = metal::max(sum, float4(-1.0f));
        dots[i] = metal::dot(low, high) + float2(v.x, v.y).y;
        bfloat4 b = bfloat4(bfloat(v.x), bfloat(v.y), bfloat(v.z), bfloat(v.w));
        *(device uint2*)(halves + 4 * i) = as_type<uint2>(b);
        uint3 u = uint3(i, 2, 3) + uint3(1u);
        int4 shifted = (int4(int(i)) << 2) | int4(1, 2, 3, 0);
        ints[i] = int(u.x * u.y + u.z) + shifted.w + shifted.x;
    """
    pairs = x.reshape(64, 4, 2)
    low, high = pairs[..., 0], pairs[..., 1]
    total = low * y + 2 * high - y / 2 + 1
    total[:, 1] *= -1
    i = np.arange(64)
    outputs = {
        "out": (np.maximum(total, -1), F32),
        "dots": ((low * high).sum(-1) + y[:, 1], F32),
        "halves": (_rounded(y), BF16),
        "ints": ((i + 1) * 3 + 4 + 4 * i + (4 * i | 1), I32),
    }
    return _one_group("vectors", body, {"x": mx.array(x).astype(BF16), "y": mx.array(y)}, outputs, tolerance=1e-6)


def math_functions() -> Case:
    x = np.linspace(-4, 4, 64).astype(np.float32)
    functions: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "metal::exp(x)": np.exp,
        "metal::precise::exp(x)": np.exp,
        "metal::fast::exp(x)": np.exp,
        "metal::exp2(x)": np.exp2,
        "metal::fast::exp2(x)": np.exp2,
        "metal::log(p)": lambda x: np.log(np.abs(x) + 0.1),
        "metal::fast::log(p)": lambda x: np.log(np.abs(x) + 0.1),
        "metal::log2(p)": lambda x: np.log2(np.abs(x) + 0.1),
        "metal::sqrt(p)": lambda x: np.sqrt(np.abs(x) + 0.1),
        "metal::rsqrt(p)": lambda x: 1 / np.sqrt(np.abs(x) + 0.1),
        "metal::precise::rsqrt(p)": lambda x: 1 / np.sqrt(np.abs(x) + 0.1),
        "metal::sin(x)": np.sin,
        "metal::cos(x)": np.cos,
        "metal::fast::sin(x)": np.sin,
        "metal::fast::cos(x)": np.cos,
        "metal::precise::cos(1000.0f * x)": lambda x: np.cos(
            (np.float32(1000) * x.astype(np.float32)).astype(np.float64)
        ),
        "metal::tanh(x)": np.tanh,
        "metal::pow(p, 1.5f)": lambda x: (np.abs(x) + 0.1) ** 1.5,
        "metal::floor(x)": np.floor,
        "metal::ceil(x)": np.ceil,
        "metal::rint(x)": np.rint,
        "metal::fabs(x)": np.abs,
        "metal::abs(x)": np.abs,
        "metal::fma(x, x, 1.0f)": lambda x: x * x + 1,
        "metal::clamp(x, -1.0f, 2.0f)": lambda x: np.clip(x, -1, 2),
        "metal::max(x, 0.5f)": lambda x: np.maximum(x, 0.5),
        "metal::min(x, 0.5f)": lambda x: np.minimum(x, 0.5),
        "metal::sign(x)": np.sign,
        "metal::isnan(x / 0.0f) ? 1.0f : 0.0f": lambda x: x * 0,
        "metal::isinf(x / 0.0f) ? 1.0f : 0.0f": lambda x: x * 0 + 1,
        "metal::isnan(NAN * x) ? 1.0f : 0.0f": lambda x: x * 0 + 1,
        "metal::max(-INFINITY, x)": lambda x: x,
        "float(metal::max(int(x), 1) + metal::min(3u, uint(p)))": lambda x: (
            np.maximum(np.trunc(x), 1) + np.minimum(3, np.trunc(np.abs(x) + 0.1))
        ),
    }
    body = "uint i = thread_position_in_grid.x;\nfloat x = values[i];\nfloat p = metal::abs(x) + 0.1f;\n"
    body += "".join(f"out[{64 * n} + i] = {call};\n" for n, call in enumerate(functions))
    exact = x.astype(np.float64)
    want = np.stack([function(exact) for function in functions.values()])
    return _one_group("math_functions", body, {"values": mx.array(x)}, {"out": (want, F32)}, tolerance=5e-6)


def simdgroup_operations() -> Case:
    rng = np.random.default_rng(4)
    x = rng.normal(size=64).astype(np.float32)
    n = rng.integers(-50, 50, 64).astype(np.int32)
    floats = [
        "simd_sum(v)", "simd_max(v)", "simd_min(v)", "simd_product(1.0f + v * 0.01f)",
        "simd_shuffle(v, ushort(lane ^ 5))", "simd_shuffle_xor(v, ushort(3))",
        "lane >= 2 ? simd_shuffle_up(v, ushort(2)) : 0.0f",
        "simd_shuffle_down(v, ushort(4)) * (lane < 28 ? 1.0f : 0.0f)", "simd_broadcast(v, ushort(7))",
        "simd_broadcast_first(v)", "simd_prefix_inclusive_sum(v)", "simd_prefix_exclusive_sum(v)",
    ]  # fmt: skip
    ints = [
        "simd_sum(k)", "simd_max(k)", "simd_min(k)", "int(simd_sum(uint(k + 50)))",
        "int(simd_max(uint(k + 50)))",
        "simd_prefix_inclusive_sum(k)", "simd_prefix_exclusive_sum(k)", "simd_all(k > -60) ? 1 : 0",
        "simd_all(k > 0) ? 1 : 0", "simd_any(k > 40) ? 1 : 0", "simd_any(k > 60) ? 1 : 0",
        "simd_shuffle(k, ushort(31 - lane))", "int(simd_shuffle_xor(uint(k + 50), ushort(16)))",
    ]  # fmt: skip
    body = (
        "uint i = thread_position_in_grid.x;\nuint lane = thread_index_in_simdgroup;\nfloat v = x[i];\nint k = n[i];\n"
    )
    # Every simd operation is reached by the whole simdgroup: the conditions stand outside.
    body += "".join(
        f"{{ float r = {call.split(' ? ')[1].split(' : ')[0] if call.startswith('lane') else call};\n"
        f"  out[{64 * j} + i] = {'lane >= 2 ? r : 0.0f' if call.startswith('lane') else 'r'}; }}\n"
        for j, call in enumerate(floats)
    )
    body += "".join(f"whole[{64 * j} + i] = {call};\n" for j, call in enumerate(ints))
    xs, ns = x.astype(np.float64).reshape(2, 32), n.astype(np.int64).reshape(2, 32)
    lane = np.arange(32)
    spread = lambda v: np.broadcast_to(np.asarray(v)[:, None], (2, 32))  # noqa: E731
    floats_want = [
        spread(xs.sum(1)), spread(xs.max(1)), spread(xs.min(1)), spread((1 + xs * 0.01).prod(1)),
        xs[:, lane ^ 5], xs[:, lane ^ 3], np.where(lane >= 2, xs[:, lane - 2], 0),
        np.where(lane < 28, xs[:, (lane + 4) % 32], 0),
        spread(xs[:, 7]), spread(xs[:, 0]), xs.cumsum(1), xs.cumsum(1) - xs,
    ]  # fmt: skip
    ints_want = [
        spread(ns.sum(1)), spread(ns.max(1)), spread(ns.min(1)), spread((ns + 50).sum(1)),
        spread((ns + 50).max(1)), ns.cumsum(1), ns.cumsum(1) - ns, spread((ns > -60).all(1)),
        spread((ns > 0).all(1)), spread((ns > 40).any(1)),
        spread((ns > 60).any(1)), ns[:, ::-1], (ns + 50)[:, lane ^ 16],
    ]  # fmt: skip
    outputs = {
        "out": (np.stack(floats_want).reshape(-1, 64), F32),
        "whole": (np.stack(ints_want).reshape(-1, 64), I32),
    }
    return _one_group("simdgroup_operations", body, {"x": mx.array(x), "n": mx.array(n)}, outputs, tolerance=1e-6)


def odd_threadgroup() -> Case:
    x = np.random.default_rng(5).normal(size=120).astype(np.float32)
    body = """
        uint i = thread_position_in_grid.x;
        float total = simd_sum(x[i]);
        float largest = simd_max(x[i]);
        int count = simd_sum(1);
        out[i] = total + 100.0f * float(count);
        top[i] = largest;
    """
    total, top = np.zeros(120), np.zeros(120)
    for group in range(3):
        for start, stop in ((0, 32), (32, 40)):
            part = slice(40 * group + start, 40 * group + stop)
            total[part] = x[part].astype(np.float64).sum() + 100 * (stop - start)
            top[part] = x[part].max()
    kernel = Kernel.from_source("odd_threadgroup", ("x",), ("out", "top"), body)
    return Case(
        "odd_threadgroup", kernel, [mx.array(x)], (120, 1, 1), (40, 1, 1), [(120,), (120,)], [F32, F32],
        [total, top], tolerance=1e-6,
    )  # fmt: skip


def threadgroup_memory() -> Case:
    x = np.random.default_rng(6).normal(size=(128, 8)).astype(np.float32)
    body = f"""
        threadgroup float tile[128][9];
        threadgroup bfloat small[128], other[128];
        threadgroup float scratch[4];
        uint t = thread_index_in_threadgroup;
        for (int j = 0; j < 8; ++j) tile[t][j] = x[8 * t + j];
        small[t] = bfloat(x[8 * t]);
        other[t] = bfloat(1.0f);
        {BARRIER}
        for (int j = 0; j < 8; ++j) out[128 * j + t] = tile[t ^ 64][j] + float(other[t ^ 1]);
        rounded[t] = small[127 - t];
        uint simdgroup = simdgroup_index_in_threadgroup;
        uint lane = thread_index_in_simdgroup;
        float sum = threadgroup_sum<4>(tile[t][1], scratch, simdgroup, lane);
        float most = threadgroup_max<4>(tile[t][2], scratch, simdgroup, lane);
        sums[t] = sum + most;
    """
    header = (PACKAGE / INCLUDE / "reduce.h").read_text()
    exact = x.astype(np.float64)
    outputs = {
        "out": ((x[np.arange(128) ^ 64] + 1).T, F32),
        "rounded": (_rounded(x[::-1, 0]), BF16),
        "sums": (np.full(128, exact[:, 1].sum() + exact[:, 2].max()), F32),
    }
    return _one_group(
        "threadgroup_memory", body, {"x": mx.array(x)}, outputs, threads=128, header=header, tolerance=1e-6
    )


def atomics() -> Case:
    keys = np.random.default_rng(7).integers(0, 10, 256).astype(np.uint32)
    body = f"""
        threadgroup atomic_uint counts[16];
        uint t = thread_index_in_threadgroup;
        if (t < 16) atomic_store_explicit(&counts[t], 0u, memory_order_relaxed);
        {BARRIER}
        atomic_fetch_add_explicit((threadgroup atomic_uint*)counts + keys[t], 1u, memory_order_relaxed);
        atomic_fetch_max_explicit(&counts[15], t, memory_order_relaxed);
        {BARRIER}
        if (t < 16) out[t] = atomic_load_explicit(&counts[t], memory_order_relaxed);
    """
    want = np.bincount(keys, minlength=16)
    want[15] = 255
    return _one_group("atomics", body, {"keys": mx.array(keys)}, {"out": (want, U32)}, threads=256)


def _matrix_header() -> str:
    return (PACKAGE / INCLUDE / "fragment.h").read_text()


def simdgroup_matrices(dtype: mx.Dtype, kind: str, tolerance: float) -> Case:
    rng = np.random.default_rng(8)
    a, b, c = (_rounded(rng.normal(size=(8, 8)), dtype) for _ in range(3))
    body = f"""
        threadgroup {kind} left[64];
        threadgroup {kind} right[64];
        uint lane = thread_index_in_simdgroup;
        for (int j = 0; j < 2; ++j) {{
          left[2 * lane + j] = a[2 * lane + j];
          right[2 * lane + j] = b[2 * lane + j];
        }}
        {BARRIER}
        simdgroup_matrix<{kind}, 8, 8> A;
        simdgroup_matrix<{kind}, 8, 8> B;
        simdgroup_matrix<{kind}, 8, 8> BT;
        simdgroup_matrix<float, 8, 8> sum = simdgroup_matrix<float, 8, 8>(0.0f);
        simdgroup_load(A, left, 8);
        simdgroup_load(B, right, 8);
        simdgroup_load(BT, right, 8, ulong2(0, 0), true);
        int row = lily_fragment_row(lane);
        int column = lily_fragment_column(lane);
        sum.thread_elements()[0] = float(c[8 * row + column]);
        sum.thread_elements()[1] = float(c[8 * row + column + 1]);
        simdgroup_multiply_accumulate(sum, A, B, sum);
        simdgroup_store(sum, out, 8);
        simdgroup_matrix<float, 8, 8> turned = simdgroup_matrix<float, 8, 8>(1.0f);
        simdgroup_multiply_accumulate(turned, A, BT, turned);
        turned_out[8 * row + column] = turned.thread_elements()[0];
        turned_out[8 * row + column + 1] = turned.thread_elements()[1];
    """
    wide = [m.astype(np.float64) for m in (a, b, c)]
    outputs = {
        "out": (wide[0] @ wide[1] + wide[2], F32),
        "turned_out": (wide[0] @ wide[1].T + np.eye(8), F32),
    }
    inputs = {name: mx.array(v).astype(dtype) for name, v in (("a", a), ("b", b), ("c", c))}
    return _one_group(
        f"simdgroup_matrix_{kind}",
        body,
        inputs,
        outputs,
        threads=32,
        header=_matrix_header(),
        tolerance=tolerance,
    )


def tile(m: int, n: int, k: int, transposed: bool, pad: int = 8) -> Case:
    rng = np.random.default_rng(9)
    a = _rounded(rng.normal(size=(m, k)))
    b = _rounded(rng.normal(size=(n, k) if transposed else (k, n)))
    rows, columns = b.shape
    lda, ldb = k + pad, columns + pad
    multiply = f"tile_multiply{'_transposed' if transposed else ''}<{m}, {n}, {k}>"
    body = f"""
        threadgroup bfloat left[{m} * {lda}];
        threadgroup bfloat right[{rows} * {ldb}];
        uint lane = thread_index_in_simdgroup;
        for (int i = int(lane); i < {m * k}; i += 32) left[i / {k} * {lda} + i % {k}] = a[i];
        for (int i = int(lane); i < {b.size}; i += 32) right[i / {columns} * {ldb} + i % {columns}] = b[i];
        {BARRIER}
        Tile<{m}, {n}> acc;
        acc.clear();
        {multiply}(acc, left, {lda}, right, {ldb});
        {multiply}(acc, left, {lda}, right, {ldb});
#pragma unroll
        for (int i = 0; i < Tile<{m}, {n}>::ELEMENTS; ++i) {{
          acc.set(i, acc.get(i) + 1.0f);
          out[Tile<{m}, {n}>::row(i, lane) * {n} + Tile<{m}, {n}>::column(i, lane)] = acc.get(i);
        }}
    """
    header = _matrix_header() + (PACKAGE / INCLUDE / "tile.h").read_text()
    right = b.T if transposed else b
    want = 2 * a.astype(np.float64) @ right.astype(np.float64) + 1
    name = f"tile_{m}x{n}x{k}{'_transposed' if transposed else ''}_pad{pad}"
    inputs = {"a": mx.array(a).astype(BF16), "b": mx.array(b).astype(BF16)}
    return _one_group(name, body, inputs, {"out": (want, F32)}, threads=32, header=header, tolerance=1e-5)


def helpers() -> Case:
    x = np.arange(64, dtype=np.float32)
    header = """
        #include <metal_stdlib>
        using namespace metal;
        template <int N>
        struct Polynomial {
          static constant constexpr int DEGREE = N;
          float terms[N];
          float value(float x) const thread {
            float sum = 0.0f;
        #pragma clang loop unroll(full)
            for (int i = 0; i < N; ++i) sum = fma(sum, x, terms[i]);
            return sum;
          }
        };
        template <int N, typename T>
        METAL_FUNC void fill(thread float (&values)[N], const device T* from, thread T& last) {
          _Pragma("clang loop unroll(full)") for (int i = 0; i < N; ++i) values[i] = float(from[i]);
          last = from[N - 1];
        }
        inline float pair(const thread float2& p) { return p.x + max(p.y, 0.0f); }
    """
    body = """
        uint i = thread_position_in_grid.x;
        Polynomial<4> p;
        float last = 0.0f;
        fill<4>(p.terms, x, last);
        float2 both = float2(x[i], -1.0f);
        thread float2* pointer = &both;
        out[i] = p.value(0.5f) + last + pair(*pointer) + float(Polynomial<4>::DEGREE);
    """
    want = (1 * 0.25 + 2 * 0.5 + 3) + 3 + x + 4
    return _one_group("helpers", body, {"x": mx.array(x)}, {"out": (want, F32)}, header=header, tolerance=1e-6)


TILES = [
    (16, 16, 16, True, 8), (16, 16, 16, False, 8), (8, 8, 8, True, 0), (8, 8, 8, False, 0),
    (8, 32, 64, True, 8), (24, 40, 24, True, 8), (24, 40, 24, False, 8), (16, 8, 40, True, 4),
    (16, 8, 40, False, 2), (32, 32, 32, True, 1), (32, 64, 32, False, 8), (64, 32, 64, True, 8),
]  # fmt: skip


def cases() -> list[Case]:
    """All cases, in the order in which a new backend should pass them."""
    return [
        attributes(),
        templates_and_shapes(),
        integer_types(),
        sixteen_bit_floats(BF16, "bfloat"),
        sixteen_bit_floats(F16, "half"),
        vectors(),
        math_functions(),
        helpers(),
        simdgroup_operations(),
        odd_threadgroup(),
        threadgroup_memory(),
        atomics(),
        simdgroup_matrices(F32, "float", 1e-5),
        simdgroup_matrices(BF16, "bfloat", 1e-5),
        simdgroup_matrices(F16, "half", 1e-5),
        *(tile(*shape) for shape in TILES),
    ]
