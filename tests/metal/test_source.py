"""The text of a kernel: stripping, checks and the rewrite of threadgroup declarations."""

import pytest

from lily_mlx.metal import SourceError
from lily_mlx.metal.source import (
    SourcePart,
    blank_comments,
    make_text,
    rewrite_threadgroup,
    strip,
    threadgroup_bytes,
)

BODY = "uint i = thread_position_in_grid.x; out[i] = x[i];"


def text(body: str = BODY, header: str = "", inputs=("x",), outputs=("out",)):
    parts = (SourcePart("helpers.h", header),) if header else ()
    return make_text("probe", inputs, outputs, SourcePart("probe.metal", body), parts)


def test_strip_removes_comments_and_blank_space_but_not_preprocessor_lines():
    source = "// first\n\n  #define A 1 /* one\n two */\n\tint   x = A; // x\n"
    assert strip(source) == "#define A 1\nint x = A;\n"


def test_strip_keeps_comment_marks_inside_strings():
    assert strip('call("a // b");\n') == 'call("a // b");\n'


def test_blank_comments_keeps_every_line():
    source = "a /* b\nc */ d\n// e\nf"
    assert blank_comments(source).splitlines() == ["a     ", "     d", "    ", "f"]


@pytest.mark.parametrize(
    ("body", "header", "message"),
    [
        (BODY + " // \u00e9", "", r"probe.metal:1 holds the non-ASCII character"),
        (
            BODY,
            "inline uint f() { return thread_position_in_grid.x; }",
            r"helpers.h:1 names thread_position_in",
        ),
        (BODY, "\ninline int f() { return x_shape[0]; }", r"helpers.h:2 names x_shape in a header"),
        (BODY + "\nint max_shape = 1;", "", r"probe.metal:2 has an identifier that contains 'x_shape'"),
        ("out[0] = x[0];", "", r"uses no attribute"),
        (BODY + "\n\nthreadgroup float a = 0.0f;", "", r"probe.metal:3 initialises threadgroup memory"),
    ],
    ids=[
        "non-ASCII",
        "attribute in header",
        "shape in header",
        "shape as part of a name",
        "no attribute",
        "initialised threadgroup",
    ],
)
def test_a_broken_rule_is_named_with_its_line(body, header, message):
    with pytest.raises(SourceError, match=message):
        text(body, header)


def test_shape_buffers_count_towards_the_limit():
    names = tuple(f"input{i}" for i in range(15))
    body = BODY.replace("x[i]", "input0[i]") + "".join(f" int s{i} = {n}_shape[0];" for i, n in enumerate(names))
    assert len(text(body, inputs=names).shape_buffers) == 15
    with pytest.raises(SourceError, match="32 buffers"):
        text(body, inputs=names, outputs=("out", "second"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("threadgroup float a[4];", "LILY_THREADGROUP(float, a, [4]);"),
        ("threadgroup T a[N][M + 1];", "LILY_THREADGROUP(T, a, [N][M+1]);"),
        ("threadgroup uint count;", "LILY_THREADGROUP(uint, count, );"),
        (
            "threadgroup float a[2], b[3];",
            "LILY_THREADGROUP(float, a, [2]); LILY_THREADGROUP(float, b, [3]);",
        ),
        (
            "threadgroup array<float, 4> a;",
            "using Threadgroup_a = array<float, 4>; LILY_THREADGROUP(Threadgroup_a, a, );",
        ),
        ("const threadgroup float* p = a;", "const threadgroup float* p = a;"),
        ("void f(threadgroup float* p, threadgroup float (&q)[4]);",) * 2,
        (
            "threadgroup_barrier(mem_flags::mem_threadgroup);",
            "threadgroup_barrier(mem_flags::mem_threadgroup);",
        ),
    ],
)
def test_only_declarations_of_threadgroup_memory_are_rewritten(source, expected):
    assert rewrite_threadgroup(source) == expected


def test_the_rewrite_keeps_lines():
    source = "int a;\nthreadgroup float\n  b[4];\nint c;"
    rewritten = rewrite_threadgroup(source)
    assert rewritten.count("\n") == source.count("\n")
    assert rewritten.endswith("\nint c;")


@pytest.mark.parametrize(
    ("declaration", "template", "expected"),
    [
        ("threadgroup float a[8];", {}, 32),
        ("threadgroup T a[ROWS * (COLUMNS + 8)];", {"ROWS": 4, "COLUMNS": 56}, 512),
        ("constexpr int PAD = 64 / 8; threadgroup float4 a[PAD][2];", {}, 256),
        ("threadgroup uint count;", {}, 16),
        ("constexpr int W = N < 16 ? N : 16; threadgroup float a[W > 8 ? W : 8];", {"N": 4}, 32),
        ("constexpr int W = N < 16 ? N : 16; threadgroup float a[W > 8 ? W : 8];", {"N": 64}, 64),
        ("threadgroup float a[unknown(3)];", {}, None),
        ("threadgroup Record a[3];", {}, None),
    ],
)
def test_threadgroup_memory_is_counted(declaration, template, expected):
    assert threadgroup_bytes(text(declaration + BODY), template, {"T": 2}) == expected
