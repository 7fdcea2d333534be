"""Kernels broken on purpose are caught: by the front end, by the checked mode of `cpu`, or by the reference.

Each mutation changes the text of a real kernel as it is read from its file. Patterns are short, so that they
survive changes around them; if one is gone the test says so, and another place of the same kind must be found.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx import metal
from lily_mlx.kernels import attention, deltanet, linear
from lily_mlx.kernels.attention.decode import combine
from lily_mlx.kernels.deltanet import reference as deltanet_reference
from lily_mlx.metal import Kernel, LaunchError, use_backend
from lily_mlx.metal import source as kernel_source
from lily_mlx.metal.check import check_texts
from lily_mlx.metal.check.texts import exact_text, record, sources
from tests.kernels.deltanet.layer import assert_rounded_once
from tests.kernels.linear.weights import integer_weight
from tests.support import bf16, quantized, rng, to_numpy

EPS = 1e-6
SHAPE = deltanet.DeltaNetShape(1, 2, 128, 128, 4)
ATTENTION = attention.AttentionShape(2, 1, 64, 32, 1e7)
COLUMNS, PARTS = 384, 11


@dataclass(frozen=True)
class Operation:
    """A small launch of a real kernel.

    Attributes:
        launch: the wrapper, on `arrays` and in their order.
        expected: its result by definition, in float64, without the last rounding.
    """

    launch: Callable[..., mx.array]
    arrays: list[mx.array]
    expected: np.ndarray


def rms_norm() -> Operation:
    generator = rng(1)
    x, gain = bf16(generator.normal(size=(3, COLUMNS)) * 1e-3), bf16(generator.normal(size=COLUMNS))
    values, gains = to_numpy(x), to_numpy(gain)
    expected = values / np.sqrt(np.mean(values**2, axis=1, keepdims=True) + EPS) * gains
    return Operation(lambda x, gain: linear.rms_norm(x, gain, EPS), [x, gain], expected)


def embed() -> Operation:
    weight, dense = quantized(rng(2), (40, 256), 4, 64)
    tokens = np.array([3, 39, 0])

    def launch(tokens: mx.array, packed: mx.array) -> mx.array:
        return linear.embed(tokens, replace(weight, packed=packed))

    return Operation(launch, [mx.array(tokens, mx.uint32), weight.packed], dense[tokens])


def gated_norm() -> Operation:
    generator = rng(3)
    y, proj, gain = (bf16(generator.normal(size=size)) for size in ((5, 256), (5, SHAPE.projection_width), (128,)))
    expected = deltanet_reference.gated_norm(to_numpy(y), to_numpy(proj), to_numpy(gain), SHAPE, EPS)
    return Operation(lambda y, proj, gain: deltanet.gated_norm(y, proj, gain, SHAPE, EPS), [y, proj, gain], expected)


def combine_parts() -> Operation:
    """Two heads of one token; the ninth simdgroup's turn begins again at the first."""
    generator = rng(4)
    partial = generator.normal(size=(2, PARTS, 64)).astype(np.float32)
    stats = np.stack([generator.normal(size=(2, PARTS)), generator.uniform(1, 2, (2, PARTS))], -1).astype(np.float32)
    proj = bf16(generator.normal(size=(1, ATTENTION.projection_width)))
    weights = 2.0 ** (stats[..., 0] - stats[..., 0].max(1, keepdims=True))
    values = np.einsum("hp,hpd->hd", weights, partial) / (weights * stats[..., 1]).sum(1, keepdims=True)
    gates = to_numpy(proj)[0, : 2 * 2 * 64].reshape(2, 2, 64)[:, 1]
    expected = (values / (1 + np.exp(-gates))).reshape(1, -1)
    joined = np.concatenate([partial.ravel(), stats.ravel()]).reshape(2, PARTS, 64 + 2)  # one array for the two
    arrays = [mx.array(joined), proj]
    return Operation(lambda *arrays: combine(*arrays, ATTENTION), arrays, expected)


def tensor_product() -> Operation:
    """Integers, so that every sum is exact, with Metal 4's tensor operations."""
    generator = rng(5)
    codes = generator.integers(0, 256, (70, 96))
    weight, x = integer_weight(codes), bf16(generator.integers(-3, 4, (20, 96)))

    def launch(x: mx.array, packed: mx.array) -> mx.array:
        with metal.use_matrix_engine("tensor"):
            return linear.matmul(x, replace(weight, packed=packed))

    return Operation(launch, [x, weight.packed], to_numpy(x) @ codes.T)


OPERATIONS: dict[str, Callable[[], Operation]] = {
    "rms_norm": rms_norm,
    "embed": embed,
    "gated_norm": gated_norm,
    "combine": combine_parts,
    "tensor_product": tensor_product,
}


# ---- the three checks; each raises AssertionError or LaunchError, or returns what the front end says -----------


def front_end(operation: Operation) -> list[str]:
    with use_backend("metal", tracing=True):
        recorded = record(lambda *arrays: [operation.launch(*arrays)], operation.arrays)
    texts = [exact_text(name, text, sources()) for text, name in recorded]
    return [str(finding) for result in check_texts(texts) for finding in result.findings]


def run_checked(operation: Operation) -> mx.array:
    with use_backend("cpu"), metal.checked():
        return operation.launch(*operation.arrays)


def compare(operation: Operation) -> None:
    with use_backend("cpu"), metal.checked(False):
        out = operation.launch(*operation.arrays)
    assert_rounded_once("out", out, operation.expected, slack=1e-6)


# ---- mutations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutation:
    """`pattern` in `file` (relative to the package) becomes `replacement`; `reason` is in the error."""

    operation: str
    file: str
    pattern: str
    replacement: str
    reason: str = ""


COMBINE = "kernels/attention/combine.metal"
RMS_NORM = "kernels/linear/rms_norm.metal"
EMBED = "kernels/linear/embed.metal"
DELTANET = "kernels/deltanet/deltanet.h"
REDUCE = "metal/include/reduce.h"
MATMUL = "kernels/linear/matmul.metal"
TENSOR = "metal/include/tensor_engine.h"

FRONT_END = {
    "wrong address space": Mutation(
        "rms_norm", "metal/include/quantized.h", r"(unpack_eight\(uint4 \w+, )thread", r"\1threadgroup", "language"
    ),
    "missing const": Mutation(
        "rms_norm", RMS_NORM, r"const (device uint4\* source =)", r"\1", "cannot initialize"
    ),
    "recursion": Mutation(
        "combine", REDUCE, r"value = simd_max\(value\)",
        "value = threadgroup_max<SIMDGROUPS>(value, scratch, simdgroup, lane)", "recursion",
    ),
    "divergent barrier": Mutation(
        "combine", COMBINE, r"\n(threadgroup_barrier\()", r"\nif (lane < 16) \1", "barrier-uniform"
    ),
    "unconverted bfloat": Mutation("combine", COMBINE, r"= bfloat\((value / .*)\);", r"= \1;", "bfloat-conversion"),
    "unknown function": Mutation("rms_norm", RMS_NORM, r"precise::rsqrt", "precise::rsqrt1", "rsqrt1"),
    "too much threadgroup memory": Mutation(
        "combine", COMBINE, r"part_values\[SIMDGROUPS\]\[32\]", "part_values[SIMDGROUPS][1024]", "threadgroup"
    ),
    "write to an input": Mutation(
        "combine", COMBINE, r"(part_values\[simdgroup\]\[lane\] =)", r"stats[first] = 0.0f; \1", "read-only"
    ),
    "tensor of another address space": Mutation(
        "tensor_product", TENSOR, r"\(threadgroup (bfloat\*\)a)", r"(device \1", "language"
    ),
    "divergent tensor operation": Mutation(
        "tensor_product", MATMUL, r"(tile_multiply_transposed<)", r"if (lane < 16) \1", "simd-uniform"
    ),
}  # fmt: skip
CHECKED = {
    "missing barrier": Mutation("combine", COMBINE, r"\nthreadgroup_barrier\([^;]*;", "\n", "nobody has written"),
    "off-by-one read of threadgroup memory": Mutation(
        "combine", COMBINE, r"s < SIMDGROUPS", "s <= SIMDGROUPS", "out of bounds"
    ),
    "off-by-one read of an input": Mutation("rms_norm", RMS_NORM, r"piece < K / 8", "piece <= K / 8", "out of bounds"),
    "uninitialised threadgroup memory": Mutation(
        "combine", COMBINE, r"if \(lane == 0\)", "if (lane == 0 && simdgroup > 0)", "nobody has written"
    ),
    "missing barrier before a tensor operation": Mutation(
        "tensor_product", MATMUL, r"(store_units<[^;]*;\n)\s*threadgroup_barrier\([^;]*;", r"\1", "nobody has written"
    ),
    "tensor beyond its memory": Mutation(
        "tensor_product", TENSOR, r"TensorStrides\{1, ldb\}", "TensorStrides{1, 2 * ldb}", "out of bounds"
    ),
    "elements that stand nowhere": Mutation(
        "tensor_product", TENSOR, r"return NO_ROW;", "return 0;", "no barrier between"
    ),
}
COMPARED = {
    "wrong rounding": Mutation(
        "gated_norm", DELTANET, r"as_type<ushort>\(bfloat\((\w+(?:\.\w+|\[\w+\])?)\)\)", r"(as_type<uint>(\1) >> 16)"
    ),
    "wrong constant": Mutation("embed", "metal/include/quantized.h", r"1 << \(23 - POSITION\)", "1 << (22 - POSITION)"),
    "missing epsilon": Mutation("rms_norm", RMS_NORM, r" \+ EPS\)", ")"),
    "wrong gate": Mutation("gated_norm", DELTANET, r"silu\((gate\[i\])\)", r"\1"),
    "wrong group of scales": Mutation("embed", EMBED, r" \+ unit / \(GROUP / UNIT\)", ""),
    "wrong place of an element": Mutation("tensor_product", TENSOR, r"int\(index\[1\]\)", "int(index[0])"),
    "operands in the other order": Mutation("tensor_product", TENSOR, r"run\(left, right", "run(right, left"),
    "wrong sign": Mutation("combine", COMBINE, r"metal::exp\(-gate\)", "metal::exp(gate)"),
}


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch):
    """A function that puts a mutation in the place of the file's text."""
    read = kernel_source._read_part

    def apply(mutation: Mutation) -> None:
        def read_mutated(name: str, path: Any) -> kernel_source.SourcePart:
            part = read(name, path)
            if not str(path).endswith("lily_mlx/" + mutation.file):
                return part
            text, count = re.subn(mutation.pattern, mutation.replacement, part.text)
            if not count or text == part.text:
                pytest.fail(f"{mutation.file} has no {mutation.pattern!r} any more: find the mutation another place")
            return kernel_source.SourcePart(part.path, text)

        monkeypatch.setattr(kernel_source, "_read_part", read_mutated)
        _forget_texts()

    yield apply
    monkeypatch.undo()
    _forget_texts()


def _forget_texts() -> None:
    """Makes every kernel read its files again."""
    for name, module in list(sys.modules.items()):
        if name.startswith("lily_mlx.kernels"):
            for kernel in vars(module).values():
                if isinstance(kernel, Kernel):
                    kernel.__dict__.pop("text", None)
                    kernel._prepared.clear()


@functools.cache
def operation_named(name: str) -> Operation:
    return OPERATIONS[name]()


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_kernels_pass_every_check_as_they_are(name):
    operation = operation_named(name)
    assert front_end(operation) == []
    compare(operation)
    assert_rounded_once("checked", run_checked(operation), operation.expected, slack=1e-6)


@pytest.mark.parametrize("name", FRONT_END)
def test_the_front_end_catches(name, mutate, monkeypatch):
    mutation = FRONT_END[name]
    # The front end alone is judged: a kernel's own check of its memory would come before it.
    monkeypatch.setattr(Kernel, "_check_template", lambda *_: None)
    mutate(mutation)
    findings = front_end(operation_named(mutation.operation))
    print(*findings, sep="\n")
    assert any(mutation.reason in finding for finding in findings)


@pytest.mark.parametrize("name", CHECKED)
def test_the_checked_mode_catches(name, mutate):
    mutation = CHECKED[name]
    operation = operation_named(mutation.operation)
    mutate(mutation)
    with pytest.raises(LaunchError) as caught:
        run_checked(operation)
    print(caught.value)
    assert mutation.reason in str(caught.value)


@pytest.mark.parametrize("name", COMPARED)
def test_the_reference_catches(name, mutate):
    mutation = COMPARED[name]
    operation = operation_named(mutation.operation)
    mutate(mutation)
    assert front_end(operation) == [], "the mutation is legal Metal"
    with pytest.raises(AssertionError):
        compare(operation)
