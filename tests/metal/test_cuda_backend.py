"""The `cuda` backend without a GPU: its text compiles with NVRTC, into the instructions that it promises."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import mlx.core as mx
import pytest

from lily_mlx.metal import CompileError, Kernel, LaunchError, SourceError, cuda_backend
from lily_mlx.metal.cuda import module, nvrtc
from lily_mlx.metal.launch import Launch
from lily_mlx.metal.matrix_engines import CHECK

from .language_cases import Case, cases, tile, vectors

ARCHITECTURE = "sm_90a"
TOOLKIT = Path("/usr/local/cuda/include")

needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not installed (package nvidia-cuda-nvrtc)")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(cuda_backend.CACHE_ENVIRONMENT, str(tmp_path))
    cuda_backend.cache_directory.cache_clear()
    yield
    cuda_backend.cache_directory.cache_clear()


def compiled(launch: Launch) -> nvrtc.Compiled:
    source = cuda_backend.generate(launch, ARCHITECTURE)
    cuda_backend.write(source)
    return module.compile_short(source, launch.inputs, launch.output_dtypes, ARCHITECTURE)


def launch_of(
    body: str,
    template=None,
    inputs=None,
    threadgroup=(32, 1, 1),
    grid=None,
    header="",
    output_dtype=mx.float32,
) -> Launch:
    kernel = Kernel.from_source("probe", ("x",), ("out",), body, header)
    return Launch(
        kernel.text, inputs or [mx.zeros((64,))], template or {}, grid or threadgroup, threadgroup, [(64,)],
        [output_dtype],
    )  # fmt: skip


COPY = "uint i = thread_position_in_grid.x; out[i] = x[i];"


@needs_nvrtc
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_compiles_in_registers(case: Case) -> None:
    result = compiled(case.launch())
    assert result.spill_bytes == 0
    # The accurate sine and cosine of large arguments keep a table of 2/pi in local memory.
    assert result.stack_bytes == 0 or case.name == "math_functions"


@needs_nvrtc
def test_sixteen_byte_loads_and_stores() -> None:
    ptx = compiled(vectors().launch()).ptx
    assert re.search(r"ld\.global(\.nc)?\.v4\.(u32|b32)", ptx), "the uint4 load is split"
    assert re.search(r"ld\.global(\.nc)?\.v4\.f32", ptx), "the float4 load is split"
    assert "st.global.v4.f32" in ptx, "the float4 store is split"


@needs_nvrtc
@pytest.mark.parametrize("transposed", [True, False], ids=["transposed", "plain"])
def test_tiles_use_tensor_cores_and_ldmatrix(transposed: bool) -> None:
    ptx = compiled(tile(32, 32, 64, transposed).launch()).ptx
    assert ptx.count("mma.sync.aligned.m16n8k16") == 2 * 2 * 4 * 4
    assert ptx.count("ldmatrix.sync.aligned.m8n8.x4") == 2 * 4 * (2 + 2)
    assert ("x4.trans" in ptx) == (not transposed)
    assert "mma.sync.aligned.m16n8k8" not in ptx


@needs_nvrtc
def test_rows_that_ldmatrix_cannot_read() -> None:
    ptx = compiled(tile(16, 16, 32, True, pad=4).launch()).ptx
    assert "ldmatrix" not in ptx
    assert "mma.sync.aligned.m16n8k16" in ptx


def tensor_product(m: int, n: int, k: int) -> Launch:
    operands = [mx.zeros((rows, k), mx.bfloat16) for rows in (m, n)]
    sizes = {"M": m, "N": n, "K": k}
    return Launch(CHECK.text, operands, sizes, (32, 1, 1), (32, 1, 1), [(m, n)], [mx.float32])


@needs_nvrtc
def test_tensor_operations_are_tiles_on_tensor_cores() -> None:
    result = compiled(tensor_product(32, 32, 64))
    assert result.stack_bytes == result.spill_bytes == 0
    assert result.ptx.count("mma.sync.aligned.m16n8k16") == 2 * (2 * 4 * 4)  # two products
    assert result.ptx.count("ldmatrix.sync.aligned.m8n8.x4") == 2 * 4 * (2 + 2)


def test_only_kernels_that_name_tensor_operations_get_them() -> None:
    assert "struct matmul2d_descriptor" in cuda_backend.generate(tensor_product(16, 16, 16)).text
    assert "struct matmul2d_descriptor" not in cuda_backend.generate(launch_of(COPY)).text


@needs_nvrtc
def test_registers_leave_room_for_the_threadgroup() -> None:
    body = "float v[64]; for (int i = 0; i < 64; ++i) v[i] = x[i * 32 + thread_position_in_grid.x];\n"
    body += "for (int k = 0; k < x_shape[0]; ++k)\n"
    body += "  for (int i = 0; i < 64; ++i) v[i] = v[i] * v[(i + 7) % 64] + 1;\n"
    body += "float s = 0; for (int i = 0; i < 64; ++i) s += v[i]; out[thread_position_in_grid.x] = s;"
    assert compiled(launch_of(body, threadgroup=(1024, 1, 1))).registers <= 64


@needs_nvrtc
def test_compiles_behind_the_toolkits_headers() -> None:
    """As MLX does it: real half types, CCCL and cooperative groups before our text."""
    if not (TOOLKIT / "cuda_bf16.h").exists() or not (TOOLKIT / "cccl").exists():
        pytest.skip(f"no CUDA headers in {TOOLKIT}")
    launch = vectors().launch()
    source = cuda_backend.generate(launch, ARCHITECTURE)
    cuda_backend.write(source)
    text = module.mlx_text(source, launch.inputs, launch.output_dtypes).replace(
        '#include "mlx/backend/cuda/device/utils.cuh"',
        "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"
        "#include <cuda/std/array>\n#include <cuda/std/limits>\n"
        "namespace mlx::core::cu {\nusing Shape = cuda::std::array<int32_t, 10>;\n"
        "using Strides = cuda::std::array<int64_t, 10>;\n}\n"
        "#define inf cuda::std::numeric_limits<float>::infinity()\n",
    )
    name = f"mlx::core::cu::{module.kernel_name(source)}"
    assert nvrtc.compile_text(text, "headers", name, ARCHITECTURE, [str(TOOLKIT), str(TOOLKIT / "cccl")]).symbol


@needs_nvrtc
def test_compile_error_names_file_line_and_words() -> None:
    with pytest.raises(CompileError, match=r"<probe>\(2\): error: identifier .nonsense. is undefined"):
        compiled(launch_of(COPY + "\nout[i] += nonsense;"))


def test_mlx_gets_a_short_text() -> None:
    source = cuda_backend.generate(vectors().launch())
    assert len(source.header + source.source) < 600
    assert str(source.path) in source.header
    assert "float4" not in source.source


@pytest.mark.parametrize(
    "other",
    [
        launch_of(COPY, {"K": 2}),
        launch_of(COPY, {"K": 1, "EPS": 1e-6}),
        launch_of(COPY, {"K": 1}, inputs=[mx.zeros((64,), mx.bfloat16)]),
        launch_of(COPY, {"K": 1}, output_dtype=mx.bfloat16),
        launch_of(COPY, {"K": 1}, threadgroup=(64, 1, 1)),
        launch_of(COPY + " ", {"K": 1}, header="inline float f() { return 1; }"),
    ],
    ids=["template", "float", "input dtype", "output dtype", "threadgroup", "header"],
)
def test_the_name_holds_everything_that_decides_the_code(other: Launch) -> None:
    assert cuda_backend.generate(other).name != cuda_backend.generate(launch_of(COPY, {"K": 1})).name


def test_one_text_gives_one_name() -> None:
    assert cuda_backend.generate(launch_of(COPY)).name == cuda_backend.generate(launch_of(COPY)).name


def test_a_scalar_input_is_a_reference() -> None:
    source = cuda_backend.generate(launch_of("out[thread_position_in_grid.x] = x;", inputs=[mx.array(1.0)]))
    assert "const float& x" in source.text
    assert "*reinterpret_cast<const float*>(in_x)" in source.source


def test_shapes_are_passed_when_the_body_names_them() -> None:
    source = cuda_backend.generate(launch_of("out[thread_position_in_grid.x] = x_shape[0] + x_ndim;"))
    assert "in_x_shape.data()" in source.source
    assert "in_x_ndim" in source.source
    assert "in_x_strides" not in source.source


def test_pragmas_become_cudas() -> None:
    body = '#pragma clang loop unroll(full)\nfor (;;) {}\n_Pragma("clang loop unroll(disable)") for (;;) {}\n' + COPY
    text = cuda_backend.generate(launch_of(body)).text
    assert "#pragma unroll\nfor" in text
    assert '_Pragma("unroll 1") for' in text


def test_dtype_without_a_metal_type() -> None:
    with pytest.raises(SourceError, match=r"array x has dtype mlx\.core\.complex64"):
        cuda_backend.generate(launch_of(COPY, inputs=[mx.zeros((4,), mx.complex64)]))


def test_too_many_threadgroups_in_y(monkeypatch) -> None:
    monkeypatch.setattr(cuda_backend, "_prepare", lambda launch: cuda_backend._Prepared(launch.text, None))
    with pytest.raises(LaunchError, match=r"more than 65535 threadgroups in y or z.*put the long dimension in x"):
        cuda_backend.launch(launch_of(COPY, grid=(32, 65_536, 1)))


def test_cache_that_cannot_be_written(tmp_path, monkeypatch) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv(cuda_backend.CACHE_ENVIRONMENT, str(blocker))
    cuda_backend.cache_directory.cache_clear()
    with pytest.raises(LaunchError, match=r"set LILY_MLX_CACHE to a directory"):
        cuda_backend.write(cuda_backend.generate(launch_of(COPY)))


def test_writers_at_once_leave_one_whole_file() -> None:
    source = cuda_backend.generate(launch_of(COPY))
    threads = [threading.Thread(target=cuda_backend.write, args=(source,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert source.path.read_text() == source.text
    assert [path.name for path in source.path.parent.iterdir()] == [source.path.name]


@needs_nvrtc
def test_machine_code_is_left_where_mlx_looks(tmp_path) -> None:
    launch = vectors().launch()
    source = cuda_backend.generate(launch, ARCHITECTURE)
    cuda_backend.write(source)
    path = module.store(source, launch.inputs, launch.output_dtypes, ARCHITECTURE, tmp_path / "ptx")
    assert re.fullmatch(rf"custom_kernel_{source.name}_[0-9a-f]{{1,16}}\.ptx", path.name)
    assert path.read_bytes()[:4] == b"\x7fELF"
    name, symbol = path.with_suffix(".txt").read_text().rstrip("\n").split("\t")
    assert name == f"mlx::core::cu::custom_kernel_{source.name}"
    assert symbol.encode() in path.read_bytes()
    before = path.stat().st_mtime_ns
    module.store(source, launch.inputs, launch.output_dtypes, ARCHITECTURE, tmp_path / "ptx")
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0x553E93901E462A6E),
        ("a", 0x454DDEE488C1ED6B),
        ("12345678", 0x8C5B90A33A04DCA5),
        ("hello world, this is text\n", 0xB994ACD6886A0048),
    ],
)
def test_hash_is_libstdcxxs(text: str, expected: int) -> None:
    assert module.hash_bytes(text.encode()) == expected
