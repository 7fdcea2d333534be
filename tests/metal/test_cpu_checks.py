"""The checked mode of the cpu backend: for each rule a kernel that breaks it and one that just keeps it.

The broken kernels mark the line that must be reported with `BAD`; two marks mean that both lines must be
in the message.
"""

from __future__ import annotations

import time

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx import metal
from lily_mlx.metal import Kernel, LaunchError

pytestmark = pytest.mark.checked

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def run(body: str, *, inputs=None, outputs=None, grid=64, threadgroup=64, template=None, name="tested"):
    """Launches `body`; `x` is float32 [64] and `out` float32 [64] unless given."""
    inputs = {"x": mx.arange(64, dtype=mx.float32)} if inputs is None else inputs
    outputs = {"out": ((64,), mx.float32)} if outputs is None else outputs
    kernel = Kernel.from_source(name, tuple(inputs), tuple(outputs), body)
    grid = (grid, 1, 1) if isinstance(grid, int) else grid
    threadgroup = (threadgroup, 1, 1) if isinstance(threadgroup, int) else threadgroup
    return kernel(
        list(inputs.values()),
        template=template,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
        backend="cpu",
    )


def error_of(body: str, **options) -> str:
    body = "uint i = thread_position_in_threadgroup.x;\n" + body
    with pytest.raises(LaunchError) as caught:
        run(body, **options)
    message = str(caught.value)
    print(message)
    assert "kernel tested:" in message
    assert "thread (" in message
    for number, line in enumerate(body.splitlines(), start=1):
        if "BAD" in line:
            assert f"<tested>:{number}\n" in message + "\n" or f"<tested>:{number})" in message, (
                f"line {number} is not named: {line}"
            )
    works_after_an_error()
    return message


def works_after_an_error() -> None:
    (out,) = run("uint i = thread_position_in_grid.x;\nout[i] = simd_sum(x[i]);")
    np.testing.assert_array_equal(np.array(out), np.repeat([496.0, 1520.0], 32))


BROKEN = {
    # 1. bounds
    "read-past-an-input": ("out[i] = x[i + 1]; // BAD", "input x[64] of 64 elements"),
    "read-before-an-input": ("out[i] = (x - 1)[i]; // BAD", "input x[-1] of 64 elements"),
    "read-far-past-an-input": ("out[i] = x[i + 100000]; // BAD", "input x[100000] of 64 elements"),
    "write-past-an-output": ("out[i + 63] = 0.0f; // BAD", "writes 4 bytes out of bounds: output out[64]"),
    "write-before-an-output": ("out[int(i) - 1] = 0.0f; // BAD", "output out[-1] of 64 elements"),
    "half-outside": ("((device uint4*)out)[i] = uint4(i); // BAD", "16 bytes out of bounds: output out[64]"),
    "half-inside": (
        "if (i == 0) {\n*(device packed_float2*)(out + 63) = packed_float2(float2(x[i], x[i + 1])); // BAD\n}",
        "output out[63] of 64 elements",
    ),
    "read-past-a-threadgroup-array": (
        f"threadgroup float tile[64];\ntile[i] = 0.0f;\n{BARRIER}\nout[i] = tile[i + 1]; // BAD",
        "threadgroup array tile[64] of 64 elements",
    ),
    "write-before-a-threadgroup-array": (
        "threadgroup float tile[64];\ntile[int(i) - 1] = 0.0f; // BAD\nout[i] = 0;",
        "threadgroup array tile[-1] of 64 elements",
    ),
    "read-past-into-the-next-threadgroup-array": (
        "threadgroup float a[64];\nthreadgroup float b[64];\na[i] = 0; b[i] = 1;\n"
        f"{BARRIER}\nout[i] = a[64 + i % 1]; // BAD",
        "threadgroup array a[64] of 64 elements",
    ),
    "wild-pointer": (
        "out[i] = *(const device float*)(size_t(16)); // BAD",
        "reads address 0x10, which is in no buffer",
    ),
    "pointer-to-another-threads-memory": (
        f"threadgroup ulong shared[1];\nfloat mine[4] = {{1.0f, 2.0f, 3.0f, float(i)}};\n"
        f"if (i == 0) {{ shared[0] = ulong(&mine[i % 4]); }}\n{BARRIER}\n"
        "out[i] = *(thread float*)(shared[0]); // BAD\n"
        f"{BARRIER}\nout[i] += mine[i % 4];",
        "which is in no buffer",
    ),
    # 2. inputs are read only
    "write-to-an-input": ("((device float*)x)[i] = 0.0f; // BAD\nout[i] = 0;", "writes to input x[0]"),
    # 3. values that nobody wrote
    "uninitialised-threadgroup-value": (
        f"threadgroup float tile[64];\nif (i != 5) {{ tile[i] = 1; }}\n{BARRIER}\nout[i] = tile[63 - i]; // BAD",
        "threadgroup array tile[5], which nobody has written",
    ),
    "uninitialised-after-the-first-threadgroup": (
        "threadgroup float tile[1];\nif (threadgroup_position_in_grid.x == 0 && i == 0) { tile[0] = 1; }\n"
        f"{BARRIER}\nif (i == 0) {{\nout[threadgroup_position_in_grid.x] = tile[0]; // BAD\n}}",
        "tile[0], which nobody has written",
    ),
    "read-of-an-unwritten-output": (
        "out[i] = out[i] + 1.0f; // BAD",
        "output out[0], which nobody has written",
    ),
    # 4. races
    "write-after-write": (
        f"threadgroup float tile[1];\ntile[0] = float(i); // BAD\n{BARRIER}\nout[i] = tile[0];",
        "writes threadgroup array tile[0], which thread (0, 0, 0) of threadgroup (0, 0, 0) wrote with no barrier",
    ),
    "read-after-write": (
        "threadgroup float tile[64];\ntile[i] = 1; // BAD\nif (i % 2) { out[i] = tile[i ^ 1]; } // BAD",
        "with no barrier between",
    ),
    "read-before-write": (
        "threadgroup float tile[64];\ntile[i] = 1;\nout[i] = tile[i ^ 1]; // BAD",
        "which nobody has written",
    ),
    "write-after-read": (
        f"threadgroup float tile[64];\ntile[i] = 1;\n{BARRIER}\nfloat v = tile[i ^ 1]; // BAD\n"
        "tile[i] = v; // BAD\nout[i] = v;",
        "with no barrier between",
    ),
    "one-reader-of-several-in-another-simdgroup": (
        f"threadgroup float tile[2];\nif (i < 2) {{ tile[i] = 1; }}\n{BARRIER}\nfloat v = tile[0]; // BAD\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup);\nif (i == 40) {\ntile[0] = 2; // BAD\n}\nout[i] = v;",
        "with no barrier between",
    ),
    "simdgroup-barrier-between-simdgroups": (
        "threadgroup float tile[64];\ntile[i] = 1; // BAD\nsimdgroup_barrier(mem_flags::mem_threadgroup);\n"
        "if (i >= 32) {\nout[i] = tile[63 - i]; // BAD\n}",
        "with no barrier between",
    ),
    "simd-operation-instead-of-a-barrier": (
        "threadgroup float tile[64];\ntile[i] = 1; // BAD\nfloat s = simd_sum(x[i]);\nout[i] = s + tile[i ^ 1]; // BAD",
        "with no barrier between",
    ),
    "barrier-that-orders-no-memory": (
        "threadgroup float tile[64];\ntile[i] = 1; // BAD\nthreadgroup_barrier(mem_flags::mem_none);\n"
        "out[i] = tile[63 - i]; // BAD",
        "no barrier between that orders this memory",
    ),
    "barrier-for-the-other-memory": (
        f"out[i] = x[i]; // BAD\n{BARRIER}\nfloat v = out[63 - i]; // BAD\nout[i] = v;",
        "no barrier between that orders this memory",
    ),
    "two-threads-write-one-output-element": ("out[i / 2] = x[i]; // BAD", "writes output out[0]"),
    "two-threadgroups-write-one-output-element": (
        "out[i] = x[i]; // BAD",
        "which a thread of another threadgroup wrote",
    ),
    "plain-access-beside-an-atomic": (
        f"threadgroup atomic_uint n[1];\nif (i == 0) {{ n[0] = {{0u}}; }}\n{BARRIER}\n"
        "atomic_fetch_add_explicit(&n[0], 1u, memory_order_relaxed);\n"
        "if (i == 63) {\nout[i] = float(*(threadgroup uint*)(&n[0])); // BAD\n}",
        "with no barrier between that orders this memory",
    ),
    "atomic-on-an-uninitialised-value": (
        "threadgroup atomic_uint n[1];\natomic_fetch_add_explicit(&n[0], 1u, memory_order_relaxed);\nout[i] = 0;",
        "n[0], which nobody has written",
    ),
    # 5. collectives that not all threads reach
    "barrier-in-a-branch": (
        f"if (i < 32) {{\n{BARRIER} // BAD\n}}\nout[i] = 0;",
        "not reached by all threads",
    ),
    "return-before-a-barrier": (f"if (i == 3) {{ return; }}\n{BARRIER} // BAD\nout[i] = 0;", "has ended"),
    "return-after-others-reached-a-barrier": (
        f"if (i == 63) {{ return; }}\n{BARRIER} // BAD\nout[i] = 0;",
        "thread (63, 0, 0) of threadgroup (0, 0, 0) has ended",
    ),
    "simd-sum-in-a-branch": (
        "float v = x[i];\nif (i % 2) {\nv = simd_sum(v); // BAD\n}\nout[i] = v;",
        "has ended",
    ),
    "simd-operations-in-two-branches": (
        "float v = x[i];\nif (i % 2) {\nv = simd_sum(v); // BAD\n} else {\nv = simd_max(v); // BAD\n}\nout[i] = v;",
        "at different barriers or simd operations",
    ),
    "barriers-in-two-branches": (
        f"if (i % 64 < 32) {{\n{BARRIER} // BAD\n}} else {{\n{BARRIER} // BAD\n}}\nout[i] = 0;",
        "at different barriers or simd operations",
    ),
    "barrier-against-simd-operation": (
        f"float v = 0;\nif (i % 32 < 16) {{\n{BARRIER} // BAD\n}} else {{\nv = simd_sum(x[i]); // BAD\n}}\nout[i] = v;",
        "not reached by all threads",
    ),
    "load-of-a-matrix-in-a-branch": (
        "threadgroup float t[64];\nt[i] = 0;\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "simdgroup_matrix<float, 8, 8> m;\nif (i % 32 != 7) {\nsimdgroup_load(m, t, 8); // BAD\n}\nout[i] = 0;",
        "has ended",
    ),
    "shuffle-from-a-lane-that-is-not-there": (
        "out[i] = simd_shuffle(x[i], 20); // BAD",
        "simd_shuffle reads lane 20, which takes no part",
    ),
    # 6. space
    "too-much-threadgroup-memory": (
        "threadgroup float a[4096];\nthreadgroup float b[4097 * (1 + 0 * sizeof(float))]; // BAD\n"
        "a[i] = 0; b[i] = 1; out[i] = a[i] + b[i];",
        "threadgroup memory exceeds 32,768 bytes at b",
    ),
    # 7. alignment
    "misaligned-vector-load": (
        "uint4 v = *(const device uint4*)(x + 1); // BAD\nout[i] = float(v.x + v.y + v.z + v.w);",
        "reads 16 bytes at input x[1], which is not aligned to 16 bytes",
    ),
    "misaligned-vector-store": (
        "if (i < 8) {\n*(device float2*)(out + 2 * i + 1) = *(const device float2*)(x + 2 * i); // BAD\n}",
        "writes 8 bytes at output out[1], which is not aligned to 8 bytes",
    ),
}
OPTIONS = {
    "uninitialised-after-the-first-threadgroup": {"grid": 128},
    "two-threadgroups-write-one-output-element": {"grid": 128},
    "shuffle-from-a-lane-that-is-not-there": {"grid": 40, "threadgroup": 40},
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernel_is_reported(name):
    body, message = BROKEN[name]
    assert message in error_of(body, **OPTIONS.get(name, {}))


RIGHT = {
    "last-element": "out[i] = x[63 - i];",
    "neighbours-after-a-barrier": f"threadgroup float t[64];\nt[i] = x[i];\n{BARRIER}\nout[i] = t[63 - i];",
    "own-value-without-a-barrier": "threadgroup float t[64];\nt[i] = x[i];\nt[i] += 1.0f;\nout[i] = t[i];",
    "simdgroup-barrier-inside-a-simdgroup": (
        "threadgroup float t[64];\nt[i] = x[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\n"
        "float v = t[i ^ 1];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\nt[i ^ 2] = v;\nout[i] = v;"
    ),
    "array-used-again-in-a-loop": (
        "threadgroup float t[64];\nfloat v = x[i];\nfor (int k = 0; k < 5; ++k) {\n"
        f"t[i] = v;\n{BARRIER}\nv += t[(i + 1) % 64];\n{BARRIER}\n}}\nout[i] = v;"
    ),
    "all-threads-read-one-value": (
        f"threadgroup float t[1];\nif (i == 0) {{ t[0] = 3; }}\n{BARRIER}\nout[i] = t[0];\n{BARRIER}\n"
        f"if (i == 63) {{ t[0] = 4; }}\n{BARRIER}\nout[i] += t[0];"
    ),
    "halves-of-words": (
        "threadgroup uint t[32];\nthreadgroup ushort* h = (threadgroup ushort*)t;\nh[i] = ushort(i);\n"
        f"{BARRIER}\nout[i] = float(t[i / 2]);"
    ),
    "bytes-of-words": (
        "threadgroup uint t[16];\nthreadgroup uchar* h = (threadgroup uchar*)t;\n"
        f"if (i < 16) {{ t[i] = 0u; }}\n{BARRIER}\nh[i] = uchar(i);\n{BARRIER}\nout[i] = float(t[i / 4]);"
    ),
    "atomics-of-many-threads": (
        f"threadgroup atomic_uint n[2];\nif (i < 2) {{ atomic_store_explicit(&n[i], 0u, memory_order_relaxed); }}\n"
        f"{BARRIER}\natomic_fetch_add_explicit(&n[i % 2], 1u, memory_order_relaxed);\n{BARRIER}\n"
        "out[i] = float(atomic_load_explicit(&n[0], memory_order_relaxed));"
    ),
    "output-read-back-after-a-device-barrier": (
        "out[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_device);\nfloat v = out[63 - i];\n"
        "threadgroup_barrier(mem_flags::mem_device);\nout[i] = v;"
    ),
    "whole-simdgroup-returns": "if (i >= 32) { return; }\nout[i] = simd_sum(x[i]);",
    "constant-table": "constexpr float table[4] = {1, 2, 3, 4};\nout[i] = table[i % 4] + x[i];",
    "private-array": "float v[8];\nfor (int k = 0; k < 8; ++k) { v[(k + i) % 8] = x[k]; }\nout[i] = v[i % 8];",
    "aligned-vectors": (
        "if (i < 16) { ((device float4*)out)[i] = ((const device float4*)x)[15 - i]; }"
    ),
    "threadgroup-memory-to-the-limit": (
        f"threadgroup float a[4096];\nthreadgroup float b[4096];\na[i] = x[i];\nb[4095 - i] = 1;\n{BARRIER}\n"
        "out[i] = a[63 - i] + b[4032 + i];"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_kernel_passes(name):
    body = "uint i = thread_position_in_threadgroup.x;\n" + RIGHT[name]
    (checked,) = run(body)
    with metal.checked(False):
        (unchecked,) = run(body)
    written = 32 if name == "whole-simdgroup-returns" else 64
    np.testing.assert_array_equal(np.array(checked)[:written], np.array(unchecked)[:written])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_unwritten_outputs_are_nan(dtype):
    (out,) = run(
        "uint i = thread_position_in_grid.x;\nif (i % 2) { out[i] = T(x[i]); }",
        template={"T": dtype},
        outputs={"out": ((64,), dtype)},
    )
    np.testing.assert_array_equal(np.isnan(np.array(out.astype(mx.float32))), np.arange(64) % 2 == 0)


def test_slice_keeps_its_misalignment():
    whole = mx.arange(72, dtype=mx.float32)
    body = "uint i = thread_position_in_threadgroup.x;\nfloat4 v = *(const device float4*)x;\nout[i] = v.y + 0 * v.w;"
    (out,) = run(body, inputs={"x": whole[4:68]})
    np.testing.assert_array_equal(np.array(out), 5.0)
    with pytest.raises(LaunchError, match="x\\[0\\], which is not aligned to 16 bytes"):
        run(body, inputs={"x": whole[1:65]})


@pytest.mark.parametrize(
    "body",
    [
        "while (x[i] >= 0.0f) { out[i] = 1; }",
        "volatile int n = 0; while (n >= 0) { n = 1; } out[i] = 0;",
        f"while (x[i] >= 0.0f) {{ {BARRIER} }} out[i] = 1;",
    ],
    ids=["with-memory", "private", "with-barriers"],
)  # fmt: skip
def test_endless_loop_ends(body, monkeypatch):
    monkeypatch.setenv("LILY_MLX_TIMEOUT", "0.3")
    start = time.monotonic()
    message = error_of(body)
    assert "did not end in time" in message
    assert time.monotonic() - start < 30


def test_timeout_must_be_a_number(monkeypatch):
    monkeypatch.setenv("LILY_MLX_TIMEOUT", "soon")
    with pytest.raises(metal.SourceError, match="LILY_MLX_TIMEOUT='soon' must be a number of seconds"):
        run(RIGHT["last-element"].replace("i]", "thread_position_in_grid.x]").replace("63 - i", "0"))


def test_line_in_a_header():
    kernel = Kernel.from_source(
        "tested",
        ("x",),
        ("out",),
        "uint i = thread_position_in_grid.x;\nout[i] = fetch(x, i);",
        header="\ninline float fetch(const device float* p, uint i) {\n  return p[i + 1];\n}\n",
    )
    with pytest.raises(LaunchError, match="<tested header>:3"):
        kernel(
            [mx.zeros((64,))], grid=(64, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(64,)],
            output_dtypes=[mx.float32], backend="cpu",
        )  # fmt: skip


def test_first_of_many_threadgroups_that_fail():
    message = error_of("out[i] = x[i + 64 * threadgroup_position_in_grid.y]; // BAD", grid=(64, 50, 1))
    assert "input x[" in message


def test_unchecked_mode_does_not_hang_either():
    body = """
        uint i = thread_position_in_threadgroup.x;
        if (i % 2) { out[i] = simd_sum(x[i]); } else { threadgroup_barrier(mem_flags::mem_none); }
    """
    with metal.checked(False), pytest.raises(LaunchError, match="not reached by all threads"):
        run(body)
    works_after_an_error()
