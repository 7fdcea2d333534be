"""Functions are replaced by name in all of the package, and put back."""

from __future__ import annotations

import mlx.core as mx
import pytest

from lily_mlx import fallback
from lily_mlx.engine import DecodeBatch, Engine, SequenceState, generate_tokens, make_sampling
from lily_mlx.kernels import attention, linear
from lily_mlx.model import Model, cache, decode, prefill
from tests.model import synthetic
from tests.support import rng, to_numpy

GREEDY = make_sampling()


def test_names_are_replaced_where_they_were_imported():
    with fallback.using(["linear.project_add", "linear.matmul", "attention.prepare", "attention.merge_tail"]):
        assert decode.project_add is prefill.matmul.__globals__["project_add"] is fallback.linear.project_add
        assert prefill.matmul is linear.matmul is fallback.linear.matmul
        assert prefill.attention.prepare is attention.prepare is fallback.attention.prepare
        assert cache.merge_tail is fallback.attention.merge_tail
        assert decode.norm_project is fallback.kernel("linear.norm_project")
        assert len(fallback.active()) == 4
    assert fallback.active() == ()
    assert decode.project_add is linear.project_add is fallback.kernel("linear.project_add")
    assert cache.merge_tail is fallback.kernel("attention.merge_tail")


def test_use_says_whether_anything_changed():
    try:
        assert fallback.use(["moe.route"])
        assert not fallback.use(["moe.route"])
        assert fallback.use([])
        assert not fallback.use([])
    finally:
        fallback.use([])


def test_unknown_names():
    with pytest.raises(ValueError, match=r"no kernel function is called linear\.nothing"):
        fallback.use(["linear.nothing"])
    assert fallback.active() == ()


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    # All experts are chosen, so that rounding cannot change the routing.
    settings = synthetic.config(num_experts_per_tok=8)
    return Engine(Model.load(synthetic.write_checkpoint(tmp_path_factory.mktemp("model"), settings)))


def logits_of_a_run(engine: Engine, forced: list[int] | None = None) -> tuple[list[int], list]:
    """Tokens and logits of a prompt in two chunks and steps over a full tail; tokens can be prescribed."""
    prompt = rng(0).integers(0, 320, 122).tolist()
    state = engine.prefill(engine.empty(), prompt, GREEDY, chunk_size=70)
    chosen, rows = [], []
    for index in range(10):
        rows.append(to_numpy(state.logits)[0])
        chosen.append(int(state.token.item()))
        if forced is not None:
            state = type(state)(
                state.length, state.caches, mx.array([forced[index]], mx.uint32), state.position, state.logits
            )
        state = engine.step(state, GREEDY)
    return chosen, rows


@pytest.fixture(scope="module")
def plain(engine):
    return logits_of_a_run(engine)


@pytest.mark.parametrize(
    "names", [[name] for name in fallback.NAMES] + [list(fallback.NAMES)], ids=lambda n: n[0] if len(n) == 1 else "all"
)
def test_any_replacement_gives_the_same_logits(engine, plain, names):
    tokens, want = plain
    with fallback.using(names):
        _, got = logits_of_a_run(engine, forced=tokens)
    for step, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        error = abs(ours - theirs).max() / (theirs.max() - theirs.min())
        assert error < 2e-2, f"{names}: step {step} differs by {error:.1e} of the range"


def test_the_engine_chooses_the_same_tokens_with_all_replaced(engine):
    prompt = rng(1).integers(0, 320, 20).tolist()

    def run() -> list[int]:
        return [token for token, _ in generate_tokens(engine, prompt, GREEDY, max_tokens=12)]

    want = run()
    with fallback.using(fallback.NAMES):
        assert run() == want


def test_compiled_steps_and_chunks(tmp_path, monkeypatch):
    """On a GPU steps and chunks are traced once and used at other lengths; here MLX's CPU runs such a trace."""
    settings = synthetic.config(num_experts_per_tok=8, num_hidden_layers=2, full_attention_interval=2)
    plain = Engine(Model.load(synthetic.write_checkpoint(tmp_path, settings)))
    prompt = rng(2).integers(0, 320, 134).tolist()
    want = plain.prefill(plain.empty(), prompt, GREEDY)
    monkeypatch.setattr("lily_mlx.model.model.current_backend", lambda: "cuda")
    compiled = Engine(Model(plain.model.config, plain.model.weights))
    with fallback.using(fallback.NAMES):
        state = compiled.empty()
        for start in range(0, 124, 4):
            state = compiled.prefill(state, prompt[start : start + 4], GREEDY)
        for token in prompt[124:]:
            forced = SequenceState(
                state.length, state.caches, mx.array([token], mx.uint32), state.position, state.logits
            )
            state = compiled.step(forced, GREEDY)
    assert (len(compiled.model._compiled), len(compiled.model._compiled_chunks)) == (1, 1)
    got, wanted = to_numpy(state.logits), to_numpy(want.logits)
    assert abs(got - wanted).max() < 2e-2 * (wanted.max() - wanted.min())
    assert (state.length, state.position.item()) == (134, 134)


def test_compiled_batches(tmp_path, monkeypatch):
    """A step of several sequences, traced and used at other lengths: on a GPU by kernels, here by MLX's CPU."""
    settings = synthetic.config(num_experts_per_tok=8, num_hidden_layers=2, full_attention_interval=2)
    plain = Engine(Model.load(synthetic.write_checkpoint(tmp_path, settings)))
    samplings = [GREEDY, make_sampling(0.9, 3, top_k=9, presence_penalty=0.5), make_sampling(0.7, 4)]
    prompts = [rng(n).integers(0, 320, n).tolist() for n in (5, 125, 200)]
    states = [plain.prefill(plain.empty(), *given) for given in zip(prompts, samplings, strict=True)]

    def run(engine: Engine) -> list[dict[int, int]]:
        batch = DecodeBatch(engine)
        for state, sampling in zip(states, samplings, strict=True):
            batch.add(state, sampling)
        tokens = [{handle: chosen.token for handle, chosen in batch.step().items()} for _ in range(6)]
        batch.remove(1)
        return tokens + [{handle: chosen.token for handle, chosen in batch.step().items()} for _ in range(3)]

    want = run(plain)
    monkeypatch.setattr("lily_mlx.model.model.current_backend", lambda: "cuda")
    compiled = Engine(Model(plain.model.config, plain.model.weights))
    with fallback.using(fallback.NAMES):
        assert run(compiled) == want
        assert len(compiled.model._compiled_batches) == 2  # of three rows and, when one has left, of two
        assert run(compiled) == want
        assert len(compiled.model._compiled_batches) == 2
    compiled.model.forget_compiled()
    assert not compiled.model._compiled_batches
