"""Every kind of the family gives the logits of mlx_lm's own model, in prefill and in decode."""

from __future__ import annotations

import json

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

import lily_mlx
from lily_mlx import accelerate
from lily_mlx.accelerate.model import AcceleratedModel
from lily_mlx.engine import Engine, SequenceState, make_sampling
from lily_mlx.loading import why_mlx_lm
from lily_mlx.model import Model
from tests.support import rng, to_numpy

from .families import KINDS, UNQUANTISED
from .tokenizer import write_tokenizer

MAX_LOGIT_ERROR = 0.03  # of the range of mlx_lm's logits, which are in float32
GREEDY = make_sampling()


# Each size of heads has kernels of its own, which take long to compile.
LONG = ("dense, heads of 27B", "experts, heads of 122B")


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=[pytest.mark.slow] if kind in LONG else []) for kind in KINDS],
    ids=lambda name: name.replace(", ", "-").replace(" ", "-"),
)
def checkpoint(request, tmp_path_factory):
    directory = KINDS[request.param].write(tmp_path_factory.mktemp("model"))
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def theirs(checkpoint):
    model, _ = mlx_lm.load(str(checkpoint))
    model.set_dtype(mx.float32)
    return model


@pytest.fixture(scope="module")
def ours(checkpoint):
    return lily_mlx.load(checkpoint)[0]


def text(count: int) -> list[int]:
    return rng(count).integers(0, 320, count).tolist()


def check(got, want) -> None:
    got, want = to_numpy(got), to_numpy(want)
    assert got.shape == want.shape
    error = np.abs(got - want).max() / (want.max() - want.min())
    print(f"logits differ by {error:.1e} of their range")
    assert error < MAX_LOGIT_ERROR


@pytest.mark.parametrize("count", [1, 7, 70])
def test_prefill_is_mlx_lms(ours, theirs, count):
    tokens = text(count)
    check(ours.logits(tokens), theirs(mx.array(tokens)[None])[0])


def test_chunks_and_the_last_row_alone_are_mlx_lms(ours, theirs):
    tokens = text(21)
    engine = Engine(ours)
    state = engine.empty()
    for start, end in ((0, 9), (9, 10), (10, 21)):
        state = engine.prefill(state, tokens[start:end], GREEDY)
    check(state.logits[0], theirs(mx.array(tokens)[None])[0, -1])


def test_decode_is_mlx_lms(ours, theirs):
    tokens = text(8)
    engine, got = Engine(ours), []
    state = engine.prefill(engine.empty(), tokens[:2], GREEDY)
    for token in tokens[2:]:
        forced = SequenceState(state.length, state.caches, mx.array([token], mx.uint32), state.position, None)
        state = engine.step(forced, GREEDY)
        got.append(state.logits[0])
    check(mx.stack(got), theirs(mx.array(tokens)[None])[0, 2:])


def test_load_and_generate(checkpoint, caplog):
    assert why_mlx_lm(json.loads((checkpoint / "config.json").read_text())) is None
    model, tokenizer = lily_mlx.load(checkpoint)
    assert isinstance(model, Model)
    responses = list(lily_mlx.stream_generate(model, tokenizer, prompt=text(5), max_tokens=4))
    assert 1 <= len(responses) <= 4
    assert "mlx_lm's own path" not in caplog.text


def test_accelerated_model_is_mlx_lms(checkpoint, theirs):
    model, tokenizer = mlx_lm.load(str(checkpoint))
    before = type(model)
    fast = accelerate(model)
    assert isinstance(fast, AcceleratedModel)
    assert isinstance(fast, before)
    cache, tokens = fast.make_cache(), mx.array([text(9), text(10)[:9]])
    got = mx.concatenate([fast(tokens[:, :7], cache=cache), fast(tokens[:, 7:8], cache=cache)], axis=1)
    check(got, theirs(tokens)[:, :8])
    out = mlx_lm.generate(fast, tokenizer, prompt=text(5), max_tokens=3)
    assert isinstance(out, str)


@pytest.mark.parametrize("kind", ["experts, mixed", "next, mixed"])
def test_gates_that_are_not_quantised_leave_the_others_as_they_are(kind, tmp_path):
    weights = Model.load(KINDS[kind].write(tmp_path)).weights
    mixer = weights.layers[0].mixer
    assert (mixer.in_proj.bits, mixer.gate_proj.bits) == (4, 16)


class TestHuggingFaceCheckpoints:
    @pytest.mark.parametrize("kind", UNQUANTISED)
    def test_reads_as_mlx_lm_does(self, kind, tmp_path):
        raw = KINDS[kind].write_hugging_face(tmp_path / "raw")
        converted = KINDS[kind].write(tmp_path / "converted")
        ours = Model.load(raw)
        write_tokenizer(raw)
        theirs, _ = mlx_lm.load(str(raw))
        for got, name in ((ours.weights.norm, "norm"), (ours.weights.layers[0].mixer.in_norm, "input norm")):
            want = theirs.model.norm.weight if name == "norm" else theirs.layers[0].input_layernorm.weight
            assert mx.array_equal(got, want), name
        theirs.set_dtype(mx.float32)
        tokens = text(12)
        check(ours.logits(tokens), theirs(mx.array(tokens)[None])[0])
        # Factors minus one round to other values; the matrices are the same.
        same = Model.load(converted)
        assert mx.array_equal(ours.weights.embedding.packed, same.weights.embedding.packed)
        for a, b in zip(ours.weights.layers, same.weights.layers, strict=True):
            assert mx.array_equal(a.mixer.in_proj.packed, b.mixer.in_proj.packed)

    def test_a_missing_expert_is_named(self, tmp_path):
        from . import synthetic

        raw = KINDS["next, bfloat16"].write_hugging_face(tmp_path)
        tensors = synthetic.read_tensors(raw)
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
        synthetic.write_tensors(raw, tensors)
        with pytest.raises(ValueError, match=r"7 experts of layers\.1\.mlp\.switch_mlp\.up_proj\.weight"):
            Model.load(raw)
