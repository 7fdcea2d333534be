"""The front end for Metal: it accepts right kernels, and rejects each wrong one for the right reason and place."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest

from lily_mlx.kernels import mlp
from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.metal import metal_backend, use_backend, use_matrix_engine
from lily_mlx.metal.check import ExactText, Result, check_texts
from lily_mlx.metal.check.__main__ import main
from lily_mlx.metal.check.frontend import FrontEnd
from lily_mlx.metal.check.texts import collect, exact_text, record, sources
from lily_mlx.metal.check.unit import units_of
from lily_mlx.metal.launch import Launch, TemplateValue
from lily_mlx.metal.source import KernelText, SourcePart, blank_comments

CORPUS = sorted((Path(__file__).parent / "bad_kernels").glob("*.metal"))
# x float32, w bfloat16, and `small`, whose four elements make it `constant`.
INPUTS = {"x": mx.zeros(64), "w": mx.zeros(64, mx.bfloat16), "small": mx.zeros(4, mx.int32)}


def exact_texts(
    path: str,
    body: str,
    helpers: str = "",
    more_inputs: int = 0,
    template: dict[str, TemplateValue] | None = None,
) -> list[ExactText]:
    """What MLX would compile for a kernel over INPUTS with one output `out`, without the checks of `Kernel`."""
    inputs = {**INPUTS, **{f"more{i}": mx.zeros(64) for i in range(more_inputs)}}
    parts = [SourcePart(path, blank_comments(text)) for text in (helpers, body)]
    text = KernelText(Path(path).stem, tuple(inputs), ("out",), tuple(parts[:1]) if helpers else (), parts[1])
    sizes = ((64, 1, 1), (64, 1, 1), [(64,)], [mx.float32])
    with use_backend("metal", tracing=True):
        recorded = record(
            lambda *arrays: metal_backend.launch(Launch(text, arrays, template or {}, *sizes)), list(inputs.values())
        )
    found = [exact_text(name, text, sources()) for text, name in recorded]
    assert len(found) == 1
    return found


def check(*arguments, **options) -> Result:
    (result,) = check_texts(exact_texts(*arguments, **options))
    for finding in result.findings:
        print(finding)
    return result


def split(text: str) -> tuple[str, str]:
    """The helpers and the body of a file of the corpus, each at the lines where it stands."""
    helpers, body = text.split("// body\n")
    return helpers, "\n" * (helpers.count("\n") + 1) + body


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_a_bad_kernel_is_rejected_for_its_reason(path):
    text = path.read_text(encoding="utf-8")
    expected = re.match(r"// rejected, ([\w-]+): (.*)\n(?:// inputs: (\d+))?", text)
    assert expected, "the first line must say `// rejected, rule: reason`"
    rule, reason, more = expected.groups()
    helpers, body = split(text)
    result = check(str(path), body, helpers, more_inputs=int(more or 0))
    right = [f for f in result.findings if f.rule == rule and reason in f.message]
    assert right, f"expected {rule}: {reason}"
    marked = [number for number, line in enumerate(text.splitlines(), 1) if "// BAD" in line]
    if marked:
        assert [(f.path, f.line) for f in right] == [(str(path), marked[0])]


HELPERS = """\
constant constexpr int WIDTH = 4;
template <typename T>
inline void add(thread T& total, T value) {
  total += value;
}
inline float first(const threadgroup float* tile, const device float* x) {
  return tile[0] + x[0];
}
"""
BODY = """\
threadgroup float tile[8191];
const uint i = thread_position_in_grid.x;
float total = 1.0;
if (small[0] > 0) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
if (simdgroup_index_in_threadgroup == 0) {
  total = simd_sum(x[i]);
}
if (thread_index_in_threadgroup < 32) {
  tile[thread_index_in_threadgroup] = total;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
add<float>(total, first(tile, x));
const float4 v = float4(total, 1.0f, float(WIDTH), float(w[i]));
const bfloat rounded = bfloat(v.x + v[1]);
out[i] = float(rounded) + as_type<float>(uint(as_type<ushort>(rounded)) << 16) + float(N);
"""


def test_a_right_kernel_passes_at_the_edge_of_every_rule():
    result = check("right.metal", BODY, HELPERS, template={"N": 3, "EPS": 1e-6})
    assert result.passed
    assert result.unit.instantiations == ["<3>"]


def test_instantiations_of_one_function_share_a_unit_and_are_named_when_wrong():
    body = 'out[thread_position_in_grid.x] = float(small[0]);\nstatic_assert(N < 5, "too large");'
    texts = [text for n in (3, 4, 7) for text in exact_texts("shared.metal", body, template={"N": n})]
    (unit,) = units_of(texts)
    assert unit.instantiations == ["<3>", "<4>", "<7>"]
    (result,) = check_texts(texts)
    (finding,) = result.findings
    assert (finding.path, finding.line, finding.instantiation) == ("shared.metal", 2, "<7>")


def test_lines_are_those_of_the_file_though_mlx_gets_stripped_text():
    body = "// a comment\n\n/* two\nlines */\nconst uint i = thread_position_in_grid.x;\n\nout[i] = nothing; // BAD\n"
    (finding,) = check("lines.metal", body, "\n\n// helper\n\ninline int f() {\n\n  return 1;\n}\n").findings
    assert (finding.path, finding.line) == ("lines.metal", 7)
    assert "'nothing'" in finding.message


def test_every_kernel_of_the_engine_passes():
    results = list(check_texts(collect(quick=True)))
    failed = [str(finding) for result in results for finding in result.findings]
    assert not failed, "\n".join(failed)
    names = {result.unit.name for result in results}
    assert {"embed", "head", "select", "matmul", "deltanet_scan", "moe_sort_rows", "attention_prefill_parts"} <= names
    both = {"moe_grouped_gate_up", "moe_grouped_down", "moe_tensor_gate_up", "moe_tensor_down", "tensor_matmul"}
    assert both | {"tensor_check"} <= names
    assert all(text.source is not None for text in collect(quick=True))


@pytest.mark.parametrize("engine", ["simdgroup", "tensor"])
def test_a_dense_model_passes_with_both_engines(engine):
    """The texts of dense models are among all of them, but not among those of --quick."""
    ones = mx.ones((96, 2), mx.bfloat16)
    matrix = QuantizedWeight.pack(mx.zeros((96, 8), mx.uint32), ones, ones, 4, 32)
    with use_backend("metal", tracing=True), use_matrix_engine(engine):
        recorded = record(lambda x: [mlp.gate_up_chunk(x, matrix, matrix)], [mx.zeros((40, 64), mx.bfloat16)])
    (result,) = check_texts([exact_text(name, text, sources()) for text, name in recorded])
    assert result.passed, result.findings
    assert result.unit.name == {"simdgroup": "mlp_gate_up_chunk", "tensor": "mlp_tensor_gate_up_chunk"}[engine]


@pytest.mark.slow
def test_the_command_checks_every_encoding(capsys):
    assert main([]) == 0
    assert "0 with errors" in capsys.readouterr().out


def test_the_command_names_the_kernels_if_one_is_unknown(capsys):
    with pytest.raises(SystemExit):
        main(["--quick", "--kernel", "nonsense"])
    assert "no kernel named nonsense" in capsys.readouterr().err


# Apple's compiler accepts MLX's own kernels, so our front end must, too. (rms_norm and rope are not in the wheel.)
MLX_KERNELS = {
    "quantized": (
        ["steel/gemm/gemm.h", "quantized_utils.h", "quantized.h"],
        [
            "affine_qmv_fast<bfloat16_t, 64, 4, 0>",
            "affine_qmv<bfloat16_t, 128, 3, 0>",
            "affine_gather_qmv<bfloat16_t, 64, 4>",
            "affine_qmm_t<bfloat16_t, 64, 4, true, 0>",
            "affine_qmm_n<bfloat16_t, 32, 8, 0>",
        ],
    ),
    "sdpa_vector": (["sdpa_vector.h"], ["sdpa_vector<bfloat16_t, 128, 128>", "sdpa_vector_2pass_1<half, 256, 256>"]),
    # Without an instantiation: libclang does not apply a `thread` conversion operator to a pointer's offset.
    "steel_attention": (["steel/attn/kernels/steel_attention.h"], []),
    "gated_delta_update": (
        ["gated_delta_update.h"],
        [
            "gated_delta_seq<bfloat16_t, 128, 128, 16, 32, 64>",
            "gated_delta_fused_chunk<bfloat16_t, 128, 128, 16, 32, 8>",
        ],
    ),
    "softmax": (["softmax.h"], ["softmax_single_row<bfloat16_t, float>", "softmax_looped<bfloat16_t, float>"]),
    "logsumexp": (["logsumexp.h"], ["logsumexp<float, float>"]),
    "sort": (["sort.h"], ["block_sort<float, uint, true, 128, 8>"]),
    "scan": (
        ["binary_ops.h", "scan.h"],
        ["contiguous_scan<float, float, CumSum<float>, 4, true, false>"],
    ),
    "arange": (["arange.h"], ["arange<float>"]),
}


@pytest.mark.parametrize("name", MLX_KERNELS)
def test_mlx_own_kernels_pass(name):
    headers, instantiations = MLX_KERNELS[name]
    includes = "".join(f'#include "mlx/backend/metal/kernels/{header}"\n' for header in headers)
    errors = FrontEnd().errors(includes + "".join(f"template decltype({f}) {f};\n" for f in instantiations))
    assert not errors, "\n".join(errors)


def test_an_error_next_to_mlx_kernels_shows():
    include = '#include "mlx/backend/metal/kernels/softmax.h"\n'
    errors = FrontEnd().errors(include + "template decltype(softmax_none<float>) softmax_none<float>;\n")
    assert any("softmax_none" in error for error in errors)
