"""Ablations on the bundled checkpoint and the `cpu` backend: each alternative runs and gives the engine's output."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from compare import full_size, results
from compare.ablations import __main__ as command
from compare.ablations import attention, dequantisation, fusion, scheduling
from compare.ablations.form import FormArm, replaced
from compare.ablations.pair import Pair, Run, distance
from compare.ablations.registry import MECHANISMS, named
from compare.ablations.scan import BLOCK_ROWS
from compare.ablations.speculation import ROWS, Speculation, accepted
from compare.arms import load_lily, prompt
from compare.graph import trace
from compare.lily_trace import caches_for
from compare.results import GateError
from lily_mlx.kernels.moe import join_routing, split_routing
from lily_mlx.metal import backend, cuda_backend, use_backend
from lily_mlx.metal.check import check_texts
from lily_mlx.metal.check.texts import exact_text, record, sources
from lily_mlx.metal.cuda import module, nvrtc
from lily_mlx.model import ModelConfig, Sampling, arrays_of, decode, prefill, with_arrays
from lily_mlx.model.abstract import abstract_weights
from tests.kernels.attention import layer as attention_layer
from tests.kernels.moe.experts import Format, make_experts
from tests.support import BFLOAT16_TOLERANCE, FLOAT32_TOLERANCE, assert_close, bf16, rng, to_numpy

PROMPT = BLOCK_ROWS + 8  # more than one block of the scan
CONTEXT = 130  # a full tail block and two rows
MIXED_ODD = Format((4, 32), (8, 32), (8, 32), (4, 32))
SHORT = ["--model", "tiny", "--lengths", "20", "--rounds", "2", "--steps", "2", "--drift", "1000"]
PAIRS = [m for m in MECHANISMS if isinstance(m, Pair)]

OTHER_ATTENTION = {
    "attention_prepare": 1, "attention_append_tail": 1, "ablation_attention_parts": 1, "attention_step_parts": -1,
}  # fmt: skip
# Launches of one kernel that a form adds (+) or saves (-) in a pass through the tiny model: 3 DeltaNet layers and 1
# attention layer.
ADDED = {
    "dequantisation-in-the-matmul": {
        "ablation_expand": 24, "ablation_grouped": 8, "moe_grouped_gate_up": -4, "moe_grouped_down": -4,
    },
    "register-resident-scan": {"deltanet_scan": 3},
    "fused-gate-up": {
        "ablation_expert_projection": 8, "ablation_expert_activation": 4, "moe_experts_gate_up": -4,
    },
    "fused-down": {"ablation_expert_down": 4, "ablation_expert_sum": 4, "moe_experts_down": -4},
    "fused-query-key": {"ablation_attention_parts": 1, "attention_step_parts": -1},
    "fused-delta": {"deltanet_prepare": 3, "deltanet_scan": 3, "deltanet_step": -3},
    "coalesced-reads": OTHER_ATTENTION,
    "packed-query-heads": OTHER_ATTENTION,
    "growing-parts": OTHER_ATTENTION,
}  # fmt: skip
ADDED_KERNELS = {name for changes in ADDED.values() for name in changes if name.startswith("ablation")}


@pytest.fixture(scope="module")
def model():
    return load_lily("tiny", 0)


@pytest.fixture
def run(model):
    ticks = itertools.count()
    return Run(model, rounds=2, steps=1, drift=1000.0, clock=lambda: float(next(ticks)))


def logits(pair: Pair, arm: FormArm) -> mx.array:
    if pair.phase == "prefill":
        return arm.prefill_logits(prompt(PROMPT, arm.vocab_size), PROMPT)
    return arm.step_logits(CONTEXT, prompt(3, arm.vocab_size))


@contextlib.contextmanager
def counted_launches():
    """Counts the kernels launched inside the block by name."""
    counts: Counter[str] = Counter()
    launcher = backend.launcher

    def counting(name):
        def launch(task):
            counts[task.text.name] += 1
            return launcher(name)(task)

        return launch

    with replaced(backend, launcher=counting):
        yield counts


LONG = ("prompt-chunks", "dequantisation-in-the-matmul")  # the first has a test of its own, too


@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, id=pair.name, marks=[pytest.mark.slow] if pair.name in LONG else []) for pair in PAIRS],
)
def test_an_alternative_gives_the_engines_output(pair, run):
    run.chunk_size = 32 if pair.name == "prompt-chunks" else PROMPT
    engine = run.engine()
    other = pair.arm(run.model, run.seed) if pair.arm else engine
    with counted_launches() as before:
        want = logits(pair, engine)
    forms = [pair.form] + ([pair.control] if pair.control else [])
    for form in forms:
        with form(), counted_launches() as after:
            got = logits(pair, other)
        error = distance(got, want)
        print(f"{pair.name}: {error:.2e}")
        assert error <= BFLOAT16_TOLERANCE
        if form is pair.form and pair.name in ADDED:
            rows = 3 if pair.phase == "decode" else 1
            changes = {name: after[name] - before[name] for name in before | after if after[name] != before[name]}
            assert changes == {name: rows * count for name, count in ADDED[pair.name].items()}


def test_everything_is_put_back(run):
    watched = [(m, dict(vars(m))) for m in (prefill, decode, backend, fusion.attention, fusion.deltanet)]
    for pair in PAIRS:
        with contextlib.suppress(ZeroDivisionError), pair.form():
            raise ZeroDivisionError
    assert all(vars(module) == before for module, before in watched)


def test_replacing_what_is_not_there_is_an_error():
    with (
        pytest.raises(LookupError, match=r"lily_mlx.model.prefill has no grouped_matmul"),
        replaced(prefill, grouped_matmul=None),
    ):
        pass


def test_the_fixed_tile_is_smaller_than_the_engines(model):
    scores = mx.random.normal((PROMPT, model.config.experts + 1), key=mx.random.key(1))
    with scheduling.fixed_tile():
        routing = prefill.route(scores, model.config.top_k, True)
    assert routing.tile_rows == 16 < prefill.route(scores, model.config.top_k, True).tile_rows


def test_expanded_weights_are_the_dequantised_ones(model):
    weight = model.weights.layers[0].moe.experts.down
    expanded = mx.view(dequantisation.expand(weight), mx.bfloat16)
    exact = mx.dequantize(
        weight.weight,
        weight.scales.astype(mx.float32),
        weight.biases.astype(mx.float32),
        group_size=weight.group_size,
        bits=weight.bits,
    )
    assert mx.array_equal(expanded, exact.astype(mx.bfloat16))


def test_serial_launches_form_one_chain(model):
    """Two products of one input are independent in the engine, and one after the other in the serial form."""
    layer = model.weights.layers[0]

    def both(x):
        args = (layer.mixer.in_norm, layer.mixer.in_proj, model.config.norm_eps)
        return [decode.norm_project(x, *args), decode.norm_project(x, *args)]

    x = mx.zeros((1, model.config.hidden_size), mx.bfloat16)
    with use_backend("metal", tracing=True):
        assert trace(both, [x]).stages() == 1
        with scheduling.serial_launches():
            graph = trace(both, [x])
    assert (len(graph.launches), graph.stages()) == (2, 2)


def test_the_host_form_generates_the_engines_tokens(run):
    engine, host = run.engine(), scheduling.HostTokenArm(run.model, run.seed)
    assert engine.decode(CONTEXT, 3).digest == host.decode(CONTEXT, 3).digest


def test_a_pair_reports_speeds_memory_and_effect(run):
    (pair,) = named(["coalesced-reads"])
    (row,) = pair.rows(run, CONTEXT)
    assert (row["with"], row["without"], row["control"]) == (1.0, 1.0, 1.0)  # a tick of the clock for each token
    assert (row["effect"], row["effect_of_control"]) == (0.0, 0.0)
    assert row["article_effect"] is None  # the article has no figure for this length
    assert min(row["peak_memory_bytes"], row["peak_memory_bytes_without"]) > 0
    assert run.gate.is_green


def test_the_whole_prompt_is_one_chunk(run):
    run.chunk_size = 32
    chunks = []
    for arm in (run.engine(), scheduling.WholePromptArm(run.model, run.seed)):
        with counted_launches() as counts:
            arm.prefill(prompt(PROMPT, arm.vocab_size), run.clock)
        chunks.append(counts["embed"])
    assert chunks == [3, 1]


def test_a_wrong_alternative_is_refused(run):
    """An expert sum that forgets the scores must not be timed."""

    def forgetful():
        right = decode.experts_down

        def down(hidden, routing, weights, residual):
            experts, scores = split_routing(routing)
            return right(hidden, join_routing(experts, mx.ones_like(scores)), weights, residual)

        return replaced(decode, experts_down=down)

    pair = Pair("scores", "all experts count the same", "decode", {}, forgetful)
    with pytest.raises(GateError, match="rms error of logits"):
        pair.rows(run, CONTEXT)


def test_drifting_rounds_are_refused(run):
    now = itertools.accumulate(1.5**i for i in range(100))
    run.clock = lambda: next(now)
    run.drift = 0.1
    pair = Pair("nothing", "the engine again", "prefill", {})
    with pytest.raises(GateError, match=r"the rounds of nothing at 4 \(with\) differ by"):
        pair.rows(run, 4)


@pytest.mark.parametrize(("name", "length"), [("prompt-chunks", 32), ("register-resident-scan", BLOCK_ROWS)])
def test_lengths_without_a_difference_are_refused(name, length, run):
    run.chunk_size = 32
    (pair,) = named([name])
    with pytest.raises(GateError, match=f"both forms are the same: give {length + 1} or more"):
        pair.rows(run, length)


def test_speculation_follows_its_cost_model(run):
    rows = Speculation(article={}).rows(run, CONTEXT)
    assert [row["mechanism"] for row in rows] == [f"speculative-decoding-{n}-rows" for n in ROWS]
    for count, row in zip(ROWS, rows, strict=True):
        # The clock ticks once for a step of either model and once for a pass.
        cycle = 1 + (count - 1)
        assert row["without"] == pytest.approx(accepted(0.8, count) / cycle)
        assert row["speed_ratio_by_acceptance"]["1.0"] == pytest.approx(count / cycle)
        assert row["speed_ratio_with_a_free_draft"] == pytest.approx(count)
    assert accepted(0.5, 3) == 1.75


ATTENTION_FORMS = (
    attention.own_attention,
    attention.uncoalesced_reads,
    attention.unpacked_heads,
    fusion.unfused_query_key,
)


@pytest.mark.checked
@pytest.mark.parametrize("length", [0, 127, 300])
@pytest.mark.parametrize("form", ATTENTION_FORMS, ids=lambda form: form.__name__)
def test_attention_with_two_kv_heads(form, length):
    """The full model's heads, a full block and part of a tail, with NaN in the rows that nobody owns."""
    generator, shape = rng(1 + length), attention_layer.shape_of((16, 2))
    keys, values = (attention_layer.random_rows(generator, length, shape) for _ in range(2))
    cache = attention_layer.cache_of(keys, values, shape, capacity=512)
    proj, gains = attention_layer.projection(generator, 1, shape), attention_layer.norms(generator, shape)
    arguments = (proj, *gains, attention_layer.position_of(length), cache, shape, 1e-6)
    want, want_cache = fusion.attention.step(*arguments)
    with form():
        got, got_cache = fusion.attention.step(*arguments)
    assert_close("out", got, to_numpy(want), BFLOAT16_TOLERANCE / 2)
    for name in ("tail_keys", "tail_values"):
        rows = length % 128 + 1
        ours, theirs = (getattr(c, name)[:, :rows] for c in (want_cache, got_cache))
        assert_close(name, theirs, to_numpy(ours), BFLOAT16_TOLERANCE / 2)


@pytest.mark.checked
def test_unfused_experts_of_odd_sizes():
    """Rows that do not fill a block, columns that do not fill the lanes, mixed encodings, softmax over all experts."""
    generator, experts, top_k, hidden = rng(2), 33, 8, 1088
    weights, _ = make_experts(generator, experts, 96, hidden, MIXED_ODD)
    x, gain = bf16(generator.normal(size=(1, hidden))), bf16(generator.uniform(0.5, 1.5, hidden))
    scores = mx.array(generator.integers(-3, 3, (1, experts + 1)).astype(np.float32))  # with ties
    arguments = (x, gain, scores, weights, top_k, 1e-6, False)
    want = decode.experts_gate_up(*arguments)
    with fusion.unfused_gate_up():
        got = decode.experts_gate_up(*arguments)
    (got_experts, got_scores), (want_experts, want_scores) = split_routing(got[1]), split_routing(want[1])
    assert got_experts.tolist() == want_experts.tolist()
    assert_close("scores", got_scores, to_numpy(want_scores), FLOAT32_TOLERANCE)
    assert_close("hidden", got[0], to_numpy(want[0]), BFLOAT16_TOLERANCE / 2)
    out = decode.experts_down(*want, weights, x)
    with fusion.unfused_down():
        assert_close("out", decode.experts_down(*want, weights, x), to_numpy(out), BFLOAT16_TOLERANCE / 2)


@pytest.mark.checked
def test_expanded_experts_of_odd_sizes():
    generator, tokens = rng(3), 21
    weights, _ = make_experts(generator, 12, 96, 128, MIXED_ODD)
    x = bf16(generator.normal(size=(tokens, 128)))
    routing = prefill.route(mx.array(generator.normal(size=(tokens, 13)).astype(np.float32)), 3, True, tile_rows=32)
    want = prefill.grouped_gate_up(x, routing, weights)
    outputs = prefill.grouped_down(want, routing, weights)
    with dequantisation.separate_dequantisation():
        got = prefill.grouped_gate_up(x, routing, weights)
        assert_close("hidden", got, to_numpy(want), BFLOAT16_TOLERANCE / 2)
        assert_close("outputs", prefill.grouped_down(want, routing, weights), to_numpy(outputs), BFLOAT16_TOLERANCE / 2)


@pytest.fixture(scope="module")
def full_size_kernels():
    """The alternatives' kernels at the full model's shapes: launches, and the texts that MLX would compile on Metal."""
    config = ModelConfig.from_dict(full_size.configuration(layers=4))
    launches, texts = {}, {}

    def recording(name):
        def launch(task):
            if task.text.name.startswith("ablation"):
                launches.setdefault((task.text.name, *task.template.items()), task)
            return launcher(name)(task)

        return launch

    launcher = backend.launcher
    forms = {form: pair for pair in PAIRS for form in (pair.form, pair.control) if form and pair.name in ADDED}
    with use_backend("metal", tracing=True), replaced(backend, launcher=recording):
        for form, pair in forms.items():
            state = (abstract_weights(config), caches_for(config, 3840 if pair.phase == "decode" else 0))

            def function(tokens, position, *arrays, phase=pair.phase, like=state):
                weights, caches = with_arrays(like, arrays)
                if phase == "prefill":
                    x, caches = prefill.prefill_chunk(weights, config, tokens, 0, caches)
                    return [x, *arrays_of(caches)]
                sampling = Sampling(mx.zeros(8), mx.zeros(1, mx.uint32))
                output = decode.decode_step(weights, config, tokens, position, caches, sampling)
                return [output.token, *arrays_of(output.caches)]

            rows = 512 if pair.phase == "prefill" else 1
            with form():
                found = record(function, [mx.zeros(rows, mx.uint32), mx.zeros(1, mx.int32), *arrays_of(state)])
            texts.update({text: name for text, name in found if "ablation" in name})
    return list(launches.values()), texts


def test_the_alternatives_pass_the_metal_front_end(full_size_kernels):
    _, texts = full_size_kernels
    files = sources()
    checked = list(check_texts([exact_text(name, text, files) for text, name in texts.items()]))
    assert {result.unit.name for result in checked} == ADDED_KERNELS
    assert [finding for result in checked for finding in result.findings] == []


@pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not installed (package nvidia-cuda-nvrtc)")
def test_the_alternatives_compile_for_nvidia_gpus(full_size_kernels, monkeypatch, tmp_path):
    """In registers: an alternative that spills would be slow for another reason than the mechanism."""
    monkeypatch.setenv(cuda_backend.CACHE_ENVIRONMENT, str(tmp_path))
    cuda_backend.cache_directory.cache_clear()
    launches, _ = full_size_kernels
    try:
        for launch in launches:
            source = cuda_backend.generate(launch, "sm_90a")
            cuda_backend.write(source)
            result = module.compile_short(source, launch.inputs, launch.output_dtypes, "sm_90a")
            assert (launch.text.name, result.spill_bytes, result.stack_bytes) == (launch.text.name, 0, 0)
    finally:
        cuda_backend.cache_directory.cache_clear()


@pytest.mark.parametrize("form", ["table", "json"])
def test_the_short_form_writes_rows_and_reports_what_it_refused(form, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LILY_MLX_RESULTS", str(tmp_path))
    monkeypatch.setattr(Run, "measure_noise", lambda run: run.gate.at_most("noise", 0.0, 1.0))
    options = [*SHORT, "--json"] if form == "json" else SHORT
    with pytest.raises(GateError, match="prompt-chunks at 20: 20 tokens are too few"):
        command.main([*options, "--mechanisms", "routing-on-the-device", "prompt-chunks"])
    (result,) = results.read_all(tmp_path)
    assert result["kind"] == "ablations"
    assert result["gate"]["green"] is True
    (row,) = result["rows"]
    assert row["effect"] == pytest.approx(row["with"] / row["without"] - 1)
    assert len(result["refused"]) == 1
    printed = capsys.readouterr().out
    assert json.loads(printed) == [row] if form == "json" else "| routing-on-the-device | prefill |" in printed


def test_the_tolerance_follows_the_engines_own_noise(run, monkeypatch):
    run.measure_noise(rows=6)
    assert run.tolerance == BFLOAT16_TOLERANCE  # the tiny model's paths are far nearer to each other
    monkeypatch.setattr("compare.ablations.pair.distance", lambda a, b: 0.04)
    run.measure_noise(rows=2)
    assert run.tolerance == pytest.approx(0.12)
    monkeypatch.setattr("compare.ablations.pair.distance", lambda a, b: 0.2)
    with pytest.raises(GateError, match="decode against prefill"):
        run.measure_noise(rows=2)


def test_the_list_has_every_mechanism_of_the_article(capsys):
    command.main(["--list"])
    printed = capsys.readouterr().out
    assert all(m.name in printed for m in MECHANISMS)
    figures = {(m.name, n): e for m in PAIRS for n, e in m.article.items() if e is not None}
    assert sorted(figures.values()) == [0.021, 0.056, 0.077, 0.132, 0.238, 0.274, 0.402, 0.774, 0.89]


def test_an_unknown_mechanism_is_named():
    with pytest.raises(SystemExit, match="--mechanisms magic: choose from dequantisation-in-the-matmul"):
        named(["magic"])
