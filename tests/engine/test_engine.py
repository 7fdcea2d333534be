"""The engine: states as values, chunks, look-ahead, sampling and limits."""

from __future__ import annotations

from itertools import islice

import mlx.core as mx
import pytest

from lily_mlx.engine import Engine, SequenceState, generate_tokens, make_sampling
from lily_mlx.model import Model, arrays_of
from tests.model import synthetic
from tests.support import rng, to_numpy

GREEDY = make_sampling()


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    # All experts are chosen, so that rounding cannot change the routing.
    settings = synthetic.config(num_experts_per_tok=8)
    return Engine(Model.load(synthetic.write_checkpoint(tmp_path_factory.mktemp("model"), settings)))


def tokens(count: int, seed: int = 0) -> list[int]:
    return rng(seed).integers(0, 320, count).tolist()


def continuation(engine: Engine, state: SequenceState, count: int) -> list[int]:
    """Greedy tokens from a state on."""
    chosen = []
    for _ in range(count):
        chosen.append(int(state.token.item()))
        state = engine.step(state, GREEDY)
    return chosen


def run(engine: Engine, prompt: list[int], count: int, **options) -> list[int]:
    return [token for token, _ in generate_tokens(engine, prompt, GREEDY, max_tokens=count, **options)]


def test_a_snapshot_is_a_reference_and_forks_are_independent(engine):
    prompt = tokens(126)  # both forks fill the tail of 128 rows and go on
    snapshot = engine.prefill(engine.empty(), prompt, GREEDY)
    before = [to_numpy(array) for array in arrays_of(snapshot.caches)]
    alone = continuation(engine, snapshot, 6)

    first, second = snapshot, engine.prefill(snapshot, [5, 6, 7], GREEDY)
    other_alone = continuation(engine, engine.prefill(snapshot, [5, 6, 7], GREEDY), 6)
    interleaved: tuple[list[int], list[int]] = ([], [])
    for _ in range(6):
        interleaved[0].append(int(first.token.item()))
        interleaved[1].append(int(second.token.item()))
        first, second = engine.step(first, GREEDY), engine.step(second, GREEDY)
    assert interleaved == (alone, other_alone)
    assert alone != other_alone

    assert continuation(engine, snapshot, 6) == alone
    for old, array in zip(before, arrays_of(snapshot.caches), strict=True):
        assert ((old == to_numpy(array)) | (old != old)).all()


def test_a_step_shares_what_it_does_not_change(engine):
    state = engine.prefill(engine.empty(), tokens(10), GREEDY)
    after = engine.step(state, GREEDY)
    assert after.caches[3].keys is state.caches[3].keys
    assert after.caches[3].tail_keys is not state.caches[3].tail_keys
    assert (state.length, after.length) == (10, 11)
    assert (state.position.item(), after.position.item()) == (10, 11)


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([1] * 97, id="1s"),
        pytest.param([7] * 13 + [6], id="7s"),
        pytest.param([64, 33], id="64s"),
        pytest.param([1, 1, 95], id="1-1-95"),
        pytest.param([2, 95], id="2-95"),
        pytest.param([3, 94], id="3-94"),
        pytest.param([3] * 32 + [1], id="3s"),
        pytest.param([96, 1], id="96-1"),
    ],
)
def test_chunks_do_not_change_the_result(engine, chunks):
    prompt = tokens(97)
    want = engine.prefill(engine.empty(), prompt, GREEDY)
    state, start = engine.empty(), 0
    for size in chunks:
        state = engine.prefill(state, prompt[start : start + size], GREEDY)
        start += size
    assert_alike(state, want)


def test_steps_and_chunks_agree(engine):
    prompt = tokens(97)
    want = engine.prefill(engine.empty(), prompt, GREEDY)
    state = engine.prefill(engine.empty(), prompt[:1], GREEDY)
    for token in prompt[1:]:
        forced = SequenceState(state.length, state.caches, mx.array([token], mx.uint32), state.position, None)
        state = engine.step(forced, GREEDY)
    assert_alike(state, want)


def assert_alike(state: SequenceState, want: SequenceState) -> None:
    got, wanted = to_numpy(state.logits), to_numpy(want.logits)
    error = abs(got - wanted).max() / (wanted.max() - wanted.min())
    print(f"logits differ by {error:.1e} of their range")
    assert error < 2e-2
    assert state.length == want.length


def test_generation_crosses_the_tail(engine):
    prompt = tokens(120)
    generated = run(engine, prompt, 20)
    state = engine.prefill(engine.empty(), prompt + generated[:-1], GREEDY)
    assert int(state.token.item()) == generated[-1]


@pytest.mark.parametrize("step", [1, 3, 30, 31, 2048])
def test_progress(engine, step):
    calls = []
    run(engine, tokens(31), 1, chunk_size=step, progress=lambda done, total: calls.append((done, total)))
    starts = list(range(0, 31, step))
    assert calls == [(done, 31) for done in [*starts, 31]]


def test_an_exception_in_the_callback_ends_the_prefill_between_chunks(engine):
    state = engine.prefill(engine.empty(), tokens(5), GREEDY)
    calls = []

    def stop(done, total):
        calls.append(done)
        if done >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.prefill(state, tokens(97), GREEDY, chunk_size=10, progress=stop)
    assert calls == [0, 10, 20]
    assert state.length == 5


class TestLookAhead:
    """The next step is submitted before a token is read; what goes wrong there belongs to the next token."""

    @pytest.fixture
    def steps(self, engine, monkeypatch):
        """Counts steps; the third one fails."""
        done = []
        step = Engine.step

        def counted(self, state, sampling):
            done.append(state.length)
            if len(done) == 3:
                raise RuntimeError("launch failed")
            return step(self, state, sampling)

        monkeypatch.setattr(Engine, "step", counted)
        return done

    @pytest.mark.parametrize("ahead", [True, False])
    def test_errors_surface_on_their_token(self, engine, steps, monkeypatch, ahead):
        monkeypatch.setattr(Engine, "looks_ahead", property(lambda self: ahead))
        generator = generate_tokens(engine, tokens(4), GREEDY, max_tokens=9)
        assert len(list(islice(generator, 3))) == 3
        with pytest.raises(RuntimeError, match="launch failed"):
            next(generator)

    @pytest.mark.parametrize(("ahead", "submitted"), [(True, 1), (False, 0)])
    def test_submits_one_step_ahead(self, engine, steps, monkeypatch, ahead, submitted):
        monkeypatch.setattr(Engine, "looks_ahead", property(lambda self: ahead))
        next(generate_tokens(engine, tokens(4), GREEDY, max_tokens=9))
        assert len(steps) == submitted

    def test_does_not_step_past_the_last_token(self, engine, steps, monkeypatch):
        monkeypatch.setattr(Engine, "looks_ahead", property(lambda self: True))
        assert len(list(generate_tokens(engine, tokens(4), GREEDY, max_tokens=2))) == 2
        assert len(steps) == 1


class TestSampling:
    def draws(self, engine, temp, seed, count=12):
        sampling = make_sampling(temp, seed)
        return [token for token, _ in generate_tokens(engine, tokens(9), sampling, max_tokens=count)]

    def test_a_seed_repeats_and_seeds_differ(self, engine):
        assert self.draws(engine, 1.0, 1) == self.draws(engine, 1.0, 1) != self.draws(engine, 1.0, 2)

    def test_no_seed_follows_mlx(self, engine):
        mx.random.seed(4)
        first = self.draws(engine, 1.0, None)
        assert self.draws(engine, 1.0, None) != first
        mx.random.seed(4)
        assert self.draws(engine, 1.0, None) == first

    @pytest.mark.parametrize("temp", [0, 0.0, 1e-40, 1e-7])
    def test_tiny_temperatures_are_greedy(self, engine, temp):
        assert self.draws(engine, temp, 3, 5) == run(engine, tokens(9), 5)

    @pytest.mark.parametrize("temp", [-1.0, float("nan"), float("inf")])
    def test_refuses_temperatures(self, temp):
        with pytest.raises(ValueError, match="temperature"):
            make_sampling(temp)

    def test_refuses_a_negative_seed(self):
        with pytest.raises(ValueError, match="seed -1"):
            make_sampling(1.0, -1)

    def test_draws_follow_the_probabilities(self, engine):
        """Over many seeds the first token's frequencies are softmax(logits / temperature)."""
        prompt, draws = tokens(9), 400
        state = engine.prefill(engine.empty(), prompt, GREEDY)
        logits = to_numpy(state.logits)[0]
        weights = 2.718281828459045 ** ((logits - logits.max()) / 0.3)
        best, probability = int(logits.argmax()), weights.max() / weights.sum()
        from lily_mlx.model import choose_token, prefill_chunk

        model = engine.model
        x, caches = prefill_chunk(model.weights, model.config, mx.array(prompt, mx.uint32), 0, engine.empty().caches)
        hits = 0
        for seed in range(draws):
            output = choose_token(model.weights, model.config, x, 9, caches, make_sampling(0.3, seed))
            hits += int(output.token.item()) == best
        deviation = (probability * (1 - probability) / draws) ** 0.5
        print(f"best token: probability {probability:.3f}, frequency {hits / draws:.3f}")
        assert abs(hits / draws - probability) < 4 * deviation


class TestLimits:
    def test_empty_prompt(self, engine):
        with pytest.raises(ValueError, match="the prompt is empty"):
            engine.prefill(engine.empty(), [], GREEDY)

    def test_prompt_longer_than_the_context(self, engine):
        with pytest.raises(ValueError, match=r"4097 tokens.*context is 4096.*max_position_embeddings"):
            engine.prefill(engine.empty(), [1] * 4097, GREEDY)

    @pytest.mark.parametrize("token", [-1, 320])
    def test_token_outside_the_vocabulary(self, engine, token):
        with pytest.raises(ValueError, match=f"token id {token} is not in the model's vocabulary of 320"):
            engine.prefill(engine.empty(), [1, token], GREEDY)

    def test_chunk_size(self, engine):
        with pytest.raises(ValueError, match="chunk size is 0"):
            engine.prefill(engine.empty(), [1], GREEDY, chunk_size=0)

    @pytest.mark.parametrize(("length", "asked", "want"), [(10, 5, 5), (10, -1, 4087), (4096, 5, 1), (4095, -1, 2)])
    def test_generation_ends_with_the_context(self, engine, length, asked, want):
        assert engine.token_limit(length, asked) == want
