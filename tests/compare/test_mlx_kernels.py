"""MLX's own Metal kernels, unchanged from the wheel, on our runtime, against MLX's operations on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from compare import mlx_kernels
from compare.mlx_kernels import headers, portable, quantized
from compare.mlx_kernels.attention import split_count, two_passes
from compare.mlx_kernels.function import find_kernels, remove_kernels
from compare.mlx_kernels.kernel import WheelKernel
from lily_mlx import metal
from lily_mlx.metal import SourceError, cuda_backend
from lily_mlx.metal import backend as backends
from lily_mlx.metal.cuda import module, nvrtc
from lily_mlx.metal.launch import Launch
from tests.support import assert_close, bf16, rng, to_numpy
from tests.support import quantized as random_weight

# One rounding to bfloat16, of a float32 result: half a unit in the last place is at most 2^-8.
BFLOAT16 = 4e-3
# Values rounded on the way too: the weights of matrix products, the parts of two-pass attention.
BFLOAT16_TWICE = 8e-3
FLOAT32 = 2e-6

matvec, gather_matvec = mlx_kernels.quantized_matvec, mlx_kernels.gather_quantized_matvec
matmul, gather_matmul = mlx_kernels.quantized_matmul, mlx_kernels.gather_quantized_matmul_sorted

Pair = tuple[str, mx.array, np.ndarray, float]


@dataclass(frozen=True)
class Case:
    """A call of a wrapper: `run` gives for each output its name, value, expected value and tolerance."""

    name: str
    run: Callable[[], Sequence[Pair]]


def in_float32(*arrays: mx.array) -> list[mx.array]:
    return [x.astype(mx.float32, stream=mx.cpu) if mx.issubdtype(x.dtype, mx.floating) else x for x in arrays]


def normal(generator: np.random.Generator, *shape: int, scale: float = 1.0) -> mx.array:
    return bf16(generator.normal(size=shape) * scale)


def product(function: Callable[..., mx.array], rows: int, columns: int, out: int, bits: int, **options) -> Case:
    def run() -> list[Pair]:
        generator = rng(rows + columns + out + bits)
        weight, _ = random_weight(generator, (out, columns), bits)
        x = normal(generator, rows, columns)
        parts = (weight.weight, weight.scales, weight.biases)
        want = mx.quantized_matmul(*in_float32(x, *parts), group_size=64, bits=bits, stream=mx.cpu)
        got = function(x, *parts, group_size=64, bits=bits, **options)
        return [("product", got, to_numpy(want), BFLOAT16_TWICE if function is matmul else BFLOAT16)]

    suffix = "".join(f"-{name}={value}" for name, value in options.items())
    return Case(f"{function.__name__}-{rows}x{columns}x{out}-{bits}bit{suffix}", run)


def expert_product(
    function: Callable[..., mx.array], ids: Sequence[int], rows: int, columns: int, out: int, bits: int
) -> Case:
    def run() -> list[Pair]:
        generator = rng(len(ids) + columns + out + bits)
        weight, _ = random_weight(generator, (5, out, columns), bits)
        x, experts = normal(generator, rows, columns), mx.array(ids, dtype=mx.uint32)
        parts = (weight.weight, weight.scales, weight.biases)
        exact, *exact_parts = in_float32(x, *parts)
        want = mx.gather_qmm(
            exact[:, None], *exact_parts, rhs_indices=experts, group_size=64, bits=bits, stream=mx.cpu
        )[:, 0]  # fmt: skip
        tolerance = BFLOAT16_TWICE if function is gather_matmul else BFLOAT16
        return [("product", function(x, *parts, experts, 64, bits), to_numpy(want), tolerance)]

    return Case(f"{function.__name__}-{rows}x{columns}x{out}-{bits}bit", run)


def attention(
    function: Callable[..., mx.array], heads: tuple[int, int], queries: int, rows: int, dim: int, length=None, **options
) -> Case:
    def run() -> list[Pair]:
        generator = rng(queries + rows + dim)
        q = normal(generator, 1, heads[0], queries, dim)
        k, v = (normal(generator, 1, heads[1], rows, dim) for _ in range(2))
        keys = length or rows
        if keys < rows:  # what stands behind the keys in use must not be read
            unused = mx.arange(rows)[None, None, :, None] >= keys
            k, v = (mx.where(unused, mx.array(float("nan"), mx.bfloat16), x) for x in (k, v))
        exact_q, exact_k, exact_v = in_float32(q, k[:, :, :keys], v[:, :, :keys])
        mask = "causal" if queries > 1 else None
        want = mx.fast.scaled_dot_product_attention(
            exact_q, exact_k, exact_v, scale=dim**-0.5, mask=mask, stream=mx.cpu
        )
        got = function(q, k, v, dim**-0.5, length, **options)
        return [("attention", got, to_numpy(want), BFLOAT16 if function is mlx_kernels.sdpa_vector else BFLOAT16_TWICE)]

    return Case(f"{function.__name__}-{heads[0]}of{heads[1]}-{queries}x{length or rows}x{dim}", run)


def delta(batch: int, length: int, heads: tuple[int, int], dtype: mx.Dtype = mx.bfloat16) -> Case:
    def run() -> list[Pair]:
        generator, dim = rng(length), 128
        key_heads, value_heads = heads
        q, k = (normal(generator, batch, length, key_heads, dim, scale=dim**-0.5).astype(dtype) for _ in range(2))
        v = normal(generator, batch, length, value_heads, dim).astype(dtype)
        gamma = bf16(generator.uniform(0.6, 1, (batch, length, value_heads))).astype(dtype)
        beta = bf16(generator.uniform(0, 1, (batch, length, value_heads))).astype(dtype)
        state = mx.array(generator.normal(size=(batch, value_heads, dim, dim)).astype(np.float32))
        exact = in_float32(q, k, v, gamma, beta)
        want_y, want_state = mx.fast.gated_delta_update(*exact, state, stream=mx.cpu)
        y, new_state = mlx_kernels.gated_delta_update(q, k, v, gamma, beta, state)
        return [
            ("y", y, to_numpy(want_y), BFLOAT16 if dtype == mx.bfloat16 else FLOAT32),
            # On NVIDIA GPUs the chunked kernel's matrices of float32 are sums of TF32 products.
            ("state", new_state, to_numpy(want_state), FLOAT32 if metal.current_backend() == "cpu" else 1e-5),
        ]

    return Case(f"gated_delta_update-{batch}x{length}-{heads[0]}of{heads[1]}-{dtype.size * 8}bit", run)


def rows_of(name: str, shape: tuple[int, ...], **options) -> Case:
    def run() -> list[Pair]:
        generator = rng(shape[-1])
        if name == "softmax":
            x = normal(generator, *shape, scale=3.0)
            want = mx.softmax(*in_float32(x), axis=-1, stream=mx.cpu)
            return [("softmax", mlx_kernels.softmax(x), to_numpy(want), BFLOAT16)]
        x = mx.array(generator.normal(size=shape).astype(np.float32))
        if name == "sort":
            operation = mx.argsort if options.get("indices") else mx.sort
            want = operation(x, axis=-1, stream=mx.cpu)
            return [("sort", mlx_kernels.sort(x, **options), to_numpy(want), 0.0)]
        want = mx.cumsum(x, axis=-1, stream=mx.cpu, **options)
        return [("cumulative sum", mlx_kernels.cumulative_sum(x, **options), to_numpy(want), FLOAT32)]

    suffix = "".join(f"-{key}={value}" for key, value in options.items())
    return Case(f"{name}-{'x'.join(map(str, shape))}{suffix}", run)


EXPERTS_IN_ORDER = [0] * 3 + [1] * 20 + [4] * 17

CASES = [
    product(matvec, 1, 512, 16, 4),
    product(matvec, 1, 1024, 13, 4),  # rows beyond the last multiple of 8
    product(matvec, 3, 512, 16, 8, wide=False),
    product(matvec, 1, 192, 13, 4),
    product(matvec, 1, 192, 5, 8),
    product(matvec, 7, 192, 13, 4),
    product(matvec, 2, 512, 16, 8),
    product(matvec, 1, 128, 70, 4),
    expert_product(gather_matvec, [3, 0, 4], 1, 512, 16, 4),
    expert_product(gather_matvec, [3, 3, 1], 3, 192, 13, 8),
    attention(mlx_kernels.sdpa_vector, (8, 1), 1, 77, 256, length=45),
    attention(mlx_kernels.sdpa_vector, (4, 2), 3, 40, 64),
    attention(mlx_kernels.sdpa_vector_2pass, (8, 1), 1, 333, 256, blocks=64),
    attention(mlx_kernels.sdpa_vector_2pass, (4, 2), 2, 100, 64, length=70, blocks=32),
    attention(mlx_kernels.decode_attention, (8, 1), 1, 1100, 256, length=1024),
    delta(1, 1, (2, 4)),
    delta(2, 7, (1, 2)),
    delta(1, 13, (1, 2)),
    delta(1, 16, (2, 2), mx.float32),
    product(matmul, 37, 192, 70, 4),  # split along K
    product(matmul, 64, 128, 64, 8),
    product(matmul, 37, 64, 70, 4),
    product(matmul, 33, 64, 64, 8),
    expert_product(gather_matmul, EXPERTS_IN_ORDER, 40, 128, 70, 8),
    expert_product(gather_matmul, EXPERTS_IN_ORDER, 40, 192, 64, 4),
    rows_of("softmax", (3, 37)),
    rows_of("softmax", (2, 5000)),
    rows_of("sort", (3, 37)),
    rows_of("sort", (2, 1000), indices=True),
    rows_of("cumulative_sum", (3, 37)),
    rows_of("cumulative_sum", (2, 5000), reverse=True, inclusive=False),
]
EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@EACH_CASE
def test_matches_mlx_on_the_cpu(case: Case) -> None:
    for name, got, want, tolerance in case.run():
        assert_close(name, got, want, tolerance)


# What the checked mode has against MLX's kernels. The last rows of `qmv` are computed twice, to the same values;
# the next chunk's decay may overtake a lane that still reads the last one's, were it not for lock step; a sum
# reads places that no simdgroup has, and does not use them.
FINDINGS = {
    "quantized_matvec-1x192x13-4bit": r"writes output y_out.* wrote with no barrier between",
    "gather_quantized_matvec-3x192x13-8bit": r"writes output y_out.* wrote with no barrier between",
    "gated_delta_update-1x13-1of2-16bit": r"writes threadgroup array gamma_all.* read with no barrier between",
    "gated_delta_update-1x16-2of2-32bit": r"writes threadgroup array gamma_all.* read with no barrier between",
    "cumulative_sum-3x37": r"reads threadgroup array simdgroup_sums.* which nobody has written",
    "cumulative_sum-2x5000-reverse=True-inclusive=False": r"reads threadgroup array simdgroup_sums.* nobody has written",
}


@pytest.mark.checked
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case.name in FINDINGS else pytest.mark.slow) for case in CASES],
    ids=lambda case: case.name,
)
def test_checked_mode_finds_only_what_is_there(case: Case, kernel_backend: str) -> None:
    if kernel_backend != "cpu":
        pytest.skip("the checked mode belongs to the cpu backend")
    if case.name in FINDINGS:
        with pytest.raises(metal.LaunchError, match=FINDINGS[case.name]):
            case.run()
        return
    for name, got, want, tolerance in case.run():
        assert_close(name, got, want, tolerance)


needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not installed (package nvidia-cuda-nvrtc)")
# One of each kind in every run, the others with --slow.
QUICK = {"quantized_matvec-1x512x16-4bit", "sdpa_vector_2pass-8of1-1x333x256", "quantized_matmul-37x64x70-4bit"}


@needs_nvrtc
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case.name in QUICK else pytest.mark.slow) for case in CASES],
    ids=lambda case: case.name,
)
def test_compiles_for_nvidia_gpus(case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    launches: list[Launch] = []
    launch_on_cpu = backends.launcher("cpu")

    def record(request: Launch) -> list[mx.array]:
        launches.append(request)
        return launch_on_cpu(request)

    monkeypatch.setenv(cuda_backend.CACHE_ENVIRONMENT, str(tmp_path))
    cuda_backend.cache_directory.cache_clear()
    monkeypatch.setattr(backends, "launcher", lambda name: record)
    try:
        with metal.use_backend("cpu"):
            case.run()
        assert launches
        for launch in launches:
            source = cuda_backend.generate(launch, "sm_90a")
            cuda_backend.write(source)
            result = module.compile_short(source, launch.inputs, launch.output_dtypes, "sm_90a")
            assert result.symbol
    finally:
        cuda_backend.cache_directory.cache_clear()


def test_metal_text_keeps_address_spaces_and_leaves_the_prelude_to_mlx() -> None:
    kernel = WheelKernel("sdpa_vector", "sdpa_vector.h")
    with metal.use_backend("metal", tracing=True):
        parts = kernel._header_parts({})
    assert [part.path for part in parts] == [headers.FOLDER + "sdpa_vector.h"]
    with metal.use_backend("cpu"):
        assert headers.FOLDER + "utils.h" in [part.path for part in kernel._header_parts({})]


def test_split_counts_of_mlx() -> None:
    assert quantized.split_count(64, 2048, 4096, 64) == 2  # 256 tiles of the 512 that fill a GPU
    assert quantized.split_count(512, 2048, 2048, 64) == 1
    assert quantized.split_count(20, 192, 64, 64) == 3  # no more parts than groups


@pytest.mark.parametrize("gpu", ["g", "s", "d"])
def test_attention_splits_long_contexts(gpu: str) -> None:
    assert not two_passes(8, 1, 512, gpu)
    assert two_passes(8, 1, 4096, gpu)
    assert all(split_count(8, length, gpu) % 32 == 0 for length in (1024, 8192, 32768, 131072))


class TestHeaders:
    def test_unknown_kernel_is_named_with_the_known_ones(self) -> None:
        with pytest.raises(SourceError, match=r"no kernel softmax_none in softmax\.h; it has softmax_single_row"):
            _ = WheelKernel("softmax_none", "softmax.h").function

    def test_unknown_header(self) -> None:
        with pytest.raises(SourceError, match=r"no Metal header nothing\.h"):
            headers.read("nothing.h")

    def test_arguments_are_checked_by_name(self) -> None:
        kernel = WheelKernel("softmax_single_row", "softmax.h")
        with pytest.raises(SourceError, match=r"arrays missing \['in'\], unknown \['x'\]"):
            kernel({"x": mx.zeros((4,))}, {"axis_size": 4}, {"out": ((4,), mx.float32)}, template={"T": mx.float32},
                   threadgroups=(1, 1, 1), threadgroup=(32, 1, 1))  # fmt: skip
        with pytest.raises(SourceError, match=r"template values missing \['T'\]"):
            kernel({"in": mx.zeros((4,))}, {"axis_size": 4}, {"out": ((4,), mx.float32)}, template={},
                   threadgroups=(1, 1, 1), threadgroup=(32, 1, 1))  # fmt: skip

    def test_a_function_constant_without_a_value_is_not_defined(self) -> None:
        text = "constant bool a [[function_constant(1)]];\nconstant int b [[function_constant(2)]];\n"
        assert headers.set_function_constants(text, {"b": 32}) == "\nconstant constexpr int b = 32;\n"

    def test_kernels_are_found_and_removed_without_moving_lines(self) -> None:
        text = (
            "int helper();\ntemplate <typename T, const int N = 2>\n[[kernel]] void scale(\n"
            "    const device T* x [[buffer(0)]],\n    device T* y,\n    constant int& n,\n"
            "    uint i [[thread_position_in_grid]]) {\n  y[i] = x[i];\n}\nint last();\n"
        )
        kernel = find_kernels(text)["scale"]
        assert [(p.kind, p.name, p.default) for p in kernel.template] == [("typename", "T", None), ("int", "N", "2")]
        assert [p.name for p in kernel.parameters if p.is_output] == ["y"]
        assert [p.attribute for p in kernel.parameters][-1] == "thread_position_in_grid"
        assert kernel.parameters[2].value_type == "int"
        assert kernel.line == 7
        assert remove_kernels(text) == "int helper();\n" + "\n" * 8 + "int last();\n"

    def test_marks_vanish_and_attribute_names_get_a_prefix(self) -> None:
        text = "void f(uint lane [[thread_index_in_simdgroup]], uint grid_size);\n#define A [[host_name( \\\n n)]] x\n"
        assert headers.strip_marks(text) == "void f(uint lane , uint mlx_grid_size);\n#define A \\\n x\n"


class TestPortable:
    @pytest.mark.parametrize(
        ("text", "want"),
        [
            ("struct A {\n A() thread {}\n A() threadgroup {}\n int n;\n};", "struct A {\n A() thread {}\n \n int n;\n};"),
            ("struct P<device T*> { int x; };\nstruct P<constant T*> { int x; };", "struct P<device T*> { int x; };\n"),
            ("namespace m { int a() { return 1; } }\nnamespace m { int b() { return 2; } }", None),
            ("struct A { A(int n) thread : x{n}, y{n} {} A(float n) thread : x{1}, y{1} {} };", None),
            ("int f(int a) { return a; }\nint f(float a) { return 1; }", None),
            ("struct A {\n template <> int f<int>(int) { return 1; }\n};", "struct A {\n int f<int>(int) { return 1; }\n};"),
            ("template <> int f<int>(int) { return 1; }", None),
            ("#define OPEN { \\\n  {\nint f() { return 1; }", None),
        ],
        ids=[
            "constructors",
            "specialisations",
            "namespaces",
            "member-braces",
            "overloads",
            "in-class-specialisation",
            "namespace-specialisation",
            "macros",
        ],
    )  # fmt: skip
    def test_rewrite(self, text: str, want: str | None) -> None:
        got = portable.rewrite(text)
        assert " ".join(got.split()) == " ".join((text if want is None else want).split())
        assert got.count("\n") == text.count("\n")

    def test_constant_implies_const(self) -> None:
        text = "f(constant int& n, const constant int* s, constant constexpr int k)"
        assert portable.spell_const(text) == "f(const constant int& n, const constant int* s, constant constexpr int k)"
