"""The cpu backend around the kernel: compiler and cache, inputs and outputs, threadgroups."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx import metal
from lily_mlx.metal import CompileError, CompilerMissingError, Kernel, KernelError, SourceError, cpu_backend
from lily_mlx.metal.cpu import compiler

COPY = "uint i = thread_position_in_grid.x;\nout[i] = x[i];"


def run(body=COPY, inputs=None, *, output=((64,), mx.float32), grid=(64, 1, 1), threadgroup=(64, 1, 1), **options):
    inputs = {"x": mx.arange(64, dtype=mx.float32)} if inputs is None else inputs
    kernel = Kernel.from_source("backend", tuple(inputs), ("out",), body)
    (out,) = kernel(
        list(inputs.values()), grid=grid, threadgroup=threadgroup, output_shapes=[output[0]],
        output_dtypes=[output[1]], backend="cpu", **options,
    )  # fmt: skip
    return out


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A cache of its own, as a fresh process would see it."""
    monkeypatch.setenv(compiler.CACHE_ENVIRONMENT, str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_backend, "_compiled", {})
    compiler.find_compiler.cache_clear()
    yield tmp_path / "cache"
    compiler.find_compiler.cache_clear()


def test_compiled_kernel_is_used_again(empty_cache, monkeypatch):
    run()
    (library,) = empty_cache.glob("backend-*.so")
    assert [path.name for path in empty_cache.iterdir() if path.name.startswith(".")] == []
    monkeypatch.setattr(cpu_backend, "_compiled", {})
    monkeypatch.setattr(compiler, "_run", lambda *_: pytest.fail("compiled again"))
    np.testing.assert_array_equal(np.array(run()), np.arange(64))
    assert list(empty_cache.glob("backend-*.so")) == [library]


@pytest.mark.parametrize(
    "change",
    [{"template": {"A": 1}}, {"template": {"A": True}}, {"template": {"A": 1.0}}, {"output": ((64,), mx.int32)}],
    ids=["int", "bool", "float", "dtype"],
)  # fmt: skip
def test_variants_are_compiled_separately(empty_cache, change):
    run()
    np.testing.assert_array_equal(np.array(run(**change)), np.arange(64))
    assert len(list(empty_cache.glob("backend-*.so"))) == 2


def test_bool_and_int_templates_differ():
    body = "uint i = thread_position_in_grid.x;\nout[i] = is_same_v<decltype(A), const bool> || sizeof(A) == 1 ? 1 : 0;"
    assert run(body, template={"A": 1})[0].item() == 0
    assert run(body, template={"A": True})[0].item() == 1


def test_several_processes_share_an_empty_cache(empty_cache):
    code = (
        "import mlx.core as mx\nfrom tests.metal.test_cpu_backend import run\n"
        "assert mx.array_equal(run(), mx.arange(64, dtype=mx.float32))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    assert len(list(empty_cache.glob("*.so"))) == 2


def test_processors_without_our_own_switch(empty_cache):
    """The portable way to switch stacks, which other processors than x86-64 and AArch64 use."""
    code = (
        "from tests.metal.test_cpu_checks import RIGHT, test_right_kernel_passes as passes\n"
        "passes('neighbours-after-a-barrier')\npasses('simdgroup-barrier-inside-a-simdgroup')\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.getcwd(),
        "CXX": " ".join(compiler.find_compiler().command) + " -DLILY_UCONTEXT",
        "LILY_MLX_CHECKED": "1",
    }
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


def test_compiled_kernels_do_not_name_their_checkout(empty_cache):
    """Another checkout uses them too, and tells the compat headers' lines from the kernel's."""
    with metal.checked():
        run()
    (library,) = empty_cache.glob("backend-*.so")
    content = library.read_bytes()
    assert compiler._RECORDED.encode() in content
    assert str(compiler.SOURCES).encode() not in content


@pytest.mark.parametrize("cxx", [None, "", " "], ids=["unset", "empty", "blank"])
def test_missing_compiler_is_named_with_the_remedy(cxx, empty_cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    if cxx is not None:
        monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("PATH", str(empty_cache))
    remedy = "xcode-select --install" if sys.platform == "darwin" else "apt-get install g\\+\\+"
    with pytest.raises(CompilerMissingError, match=f"needs a C\\+\\+ compiler .* PATH.*{remedy}"):
        compiler.find_compiler()


def test_wrong_cxx_is_named(empty_cache, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++ -v")
    with pytest.raises(CompilerMissingError, match="CXX=/nowhere/c\\+\\+ -v"):
        compiler.find_compiler()


def test_cxx_chooses_the_compiler(empty_cache, monkeypatch):
    chosen = compiler.find_compiler().command
    monkeypatch.setenv("CXX", f"{chosen[0]} -DCHOSEN=1")
    compiler.find_compiler.cache_clear()
    body = "uint i = thread_position_in_grid.x;\nout[i] = CHOSEN;"
    np.testing.assert_array_equal(np.array(run(body)), 1)


@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
def test_compile_error_has_the_compilers_words_and_our_line(checked):
    with metal.checked(checked), pytest.raises(CompileError) as caught:
        run("uint i = thread_position_in_grid.x;\n\nout[i] = x[i] + nothing_of_that_name;")
    message = str(caught.value)
    assert "kernel backend does not compile" in message
    assert "<backend>:3" in message
    assert "nothing_of_that_name" in message


def test_compile_error_in_a_header_names_its_line():
    kernel = Kernel.from_source("backend", ("x",), ("out",), COPY, header="\n\ninline float f() { return missing; }\n")
    with pytest.raises(CompileError, match="<backend header>:3"):
        kernel(
            [mx.zeros((64,))], grid=(64, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(64,)],
            output_dtypes=[mx.float32], backend="cpu",
        )  # fmt: skip


def test_cache_that_cannot_be_written(empty_cache):
    empty_cache.write_text("a file where the directory should be")
    with pytest.raises(KernelError, match=r"cannot keep compiled kernels in .*set LILY_MLX_CACHE"):
        run()


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.delenv(compiler.CACHE_ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiler.cache_directory() == tmp_path / "lily_mlx"
    monkeypatch.setenv(compiler.CACHE_ENVIRONMENT, str(tmp_path / "other"))
    assert compiler.cache_directory() == tmp_path / "other"


DTYPES = [
    mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64, mx.float16,
    mx.bfloat16, mx.float32,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype):
    x = (mx.arange(64) % 3).astype(dtype)
    out = run(inputs={"x": x}, output=((64,), dtype))
    assert out.dtype == dtype
    assert mx.array_equal(out, x)


def test_complex_is_refused():
    with pytest.raises(SourceError, match="complex64 has no counterpart in Metal"):
        run(inputs={"x": mx.zeros((64,), mx.complex64)})


@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize(
    "view",
    [lambda x: x.T, lambda x: x[:, 1:3], lambda x: x[::2], lambda x: mx.broadcast_to(x[:1], (4, 6)), lambda x: x[2:]],
    ids=["transposed", "columns", "every-other-row", "broadcast", "rows"],
)
def test_views_are_read_in_row_major_order(view, checked):
    x = view(mx.arange(24, dtype=mx.int32).reshape(4, 6))
    body = COPY + "\nout[i] += 1000 * x_shape[1] + 10000 * x_strides[0] + 100000 * x_ndim;"
    with metal.checked(checked):
        out = run(body, {"x": x}, output=(x.shape, mx.int32), grid=(x.size, 1, 1), threadgroup=(1, 1, 1))
    want = np.array(x) + 1000 * x.shape[1] + 10000 * x.shape[1] + 200000
    np.testing.assert_array_equal(np.array(out), want)


def test_inputs_that_are_still_to_be_computed():
    x = mx.exp(mx.arange(64, dtype=mx.float32) * 0.01) * 2
    assert mx.array_equal(run(inputs={"x": x}), x)


def test_scalars_and_python_numbers():
    kernel = Kernel.from_source("backend", ("x", "n", "f"), ("out",), COPY + "\nout[i] = n * f + x[i];")
    (out,) = kernel(
        [mx.zeros((64,)), 3, mx.array(0.5)], grid=(64, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(64,)],
        output_dtypes=[mx.float32], backend="cpu",
    )  # fmt: skip
    np.testing.assert_array_equal(np.array(out), 1.5)


def test_outputs_are_independent_and_inputs_unchanged():
    x = mx.arange(64, dtype=mx.float32)
    first, second = run(inputs={"x": x}), run("uint i = thread_position_in_grid.x;\nout[i] = -x[i];", {"x": x})
    np.testing.assert_array_equal(np.array(first), np.arange(64))
    np.testing.assert_array_equal(np.array(second), -np.arange(64))
    np.testing.assert_array_equal(np.array(x), np.arange(64))


def test_large_output():
    count = 1 << 20
    out = run(
        "uint i = thread_position_in_grid.x;\nout[i] = i;", {}, output=((count,), mx.uint32), grid=(count, 1, 1),
        threadgroup=(256, 1, 1),
    )  # fmt: skip
    np.testing.assert_array_equal(np.array(out), np.arange(count))


@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize(
    ("grid", "threadgroup"),
    [
        ((7, 5, 3), (7, 5, 3)),
        ((12, 10, 6), (3, 5, 2)),
        ((1, 1, 200), (1, 1, 8)),
        ((1000, 1, 1), (1, 1, 1)),
        ((66, 2, 2), (33, 2, 1)),
    ],
    ids=lambda size: "x".join(map(str, size)),
)  # fmt: skip
def test_threadgroup_shapes(grid, threadgroup, checked):
    """Every thread runs once, with the right position, and barriers hold for odd threadgroups."""
    body = """
        uint3 p = thread_position_in_grid, n = threads_per_grid;
        threadgroup uint counts[512];
        uint at = thread_index_in_threadgroup;
        counts[at] = at;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint3 size = threads_per_threadgroup;
        uint last = size.x * size.y * size.z - 1u;
        uint3 q = threadgroup_position_in_grid * size + thread_position_in_threadgroup;
        bool right = q.x == p.x && q.y == p.y && q.z == p.z;
        out[p.x + n.x * (p.y + n.y * p.z)] = right ? counts[last - at] + at - last : 1u;
    """
    with metal.checked(checked):
        out = run(body, {}, output=((np.prod(grid).item(),), mx.uint32), grid=grid, threadgroup=threadgroup)
    np.testing.assert_array_equal(np.array(out), 0)


@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
def test_results_do_not_depend_on_the_run(checked):
    x = mx.array(np.random.default_rng(0).normal(size=64 * 300).astype(np.float32))
    body = """
        uint i = thread_position_in_grid.x;
        threadgroup float part[2];
        float v = simd_sum(x[i]);
        if (thread_index_in_simdgroup == 0) { part[simdgroup_index_in_threadgroup] = v; }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = part[0] + part[1] * x[i];
    """
    with metal.checked(checked):
        results = [np.array(run(body, {"x": x}, output=(x.shape, mx.float32), grid=(x.size, 1, 1))) for _ in range(5)]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_checked_and_unchecked_give_the_same_bits():
    x = mx.array(np.random.default_rng(1).normal(size=64).astype(np.float32))
    body = """
        uint i = thread_position_in_grid.x;
        float v = x[i];
        for (int k = 0; k < 9; ++k) { v = v * x[(i + k) % 64] + simd_sum(v); }
        out[i] = metal::exp(-v * v);
    """
    with metal.checked(False):
        plain = np.array(run(body, {"x": x}))
    with metal.checked():
        np.testing.assert_array_equal(np.array(run(body, {"x": x})), plain)


def test_launches_from_several_python_threads():
    failures = []

    def work(number: int) -> None:
        x = mx.full((64 * 8,), float(number))
        for _ in range(20):
            out = run(inputs={"x": x}, output=((512,), mx.float32), grid=(512, 1, 1))
            if not np.all(np.array(out) == number):
                failures.append(number)

    run()
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_many_threads_with_large_private_arrays():
    body = """
        uint i = thread_position_in_grid.x;
        float v[4096];
        for (int k = 0; k < 4096; ++k) { v[k] = float(k) + x[i % 64]; }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = v[(i * 37u) % 4096u];
    """
    out = run(body, output=((512,), mx.float32), grid=(512, 1, 1), threadgroup=(512, 1, 1))
    i = np.arange(512)
    np.testing.assert_array_equal(np.array(out), i * 37 % 4096 + i % 64)
