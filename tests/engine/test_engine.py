"""The engine: states as values, chunks, look-ahead, sampling and limits."""

from __future__ import annotations

from itertools import islice

import mlx.core as mx
import pytest

from lily_mlx.engine import Engine, SequenceState, generate_tokens, make_sampling, recent_tokens
from lily_mlx.kernels.sampling import NO_TOKEN
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


PENALTIES = [
    pytest.param({"repetition_penalty": 20.0, "repetition_context_size": 100}, id="repetition"),
    pytest.param({"presence_penalty": 2.0, "presence_context_size": 40}, id="presence"),
    pytest.param({"frequency_penalty": 3.0, "frequency_context_size": 32}, id="frequency"),
    pytest.param({"repetition_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {7: 9.0, 11: -4.0}}, id="several"),
    pytest.param({"logit_bias": {5: 1e4}}, id="bias"),
]


class TestControls:
    """Filters, penalties and biases inside the step, against mlx_lm's functions on the same engine's logits."""

    @pytest.mark.parametrize("options", PENALTIES)
    @pytest.mark.parametrize("chunk_size", [2048, 33], ids=lambda size: f"chunks of {size}")
    def test_penalties_are_mlx_lms(self, engine, options, chunk_size):
        from mlx_lm.sample_utils import make_logits_processors

        prompt = tokens(70)
        ours = list(
            generate_tokens(engine, prompt, make_sampling(0.0, **options), max_tokens=16, chunk_size=chunk_size)
        )
        theirs = list(
            generate_tokens(engine, prompt, GREEDY, max_tokens=16, logits_processors=make_logits_processors(**options))
        )
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [token for token, _ in ours] != run(engine, prompt, 16)
        for (_, got), (_, want) in zip(ours, theirs, strict=True):
            assert abs(to_numpy(got) - to_numpy(want)).max() < 0.1

    def test_a_fork_keeps_its_own_recent_tokens(self, engine):
        sampling = make_sampling(frequency_penalty=2.0)
        start = engine.prefill(engine.empty(), tokens(5), sampling)
        alone = [engine.prefill(start, [token], sampling) for token in (3, 4)]
        for _ in range(4):
            alone = [engine.step(state, sampling) for state in alone]
        recent = [to_numpy(state.recent).tolist() for state in alone]
        assert recent[0] != recent[1]
        assert [slots[5] for slots in recent] == [3, 4]

    def test_recent_tokens_are_those_of_the_text(self, engine):
        sampling = make_sampling(presence_penalty=1.0, presence_context_size=50)
        prompt = tokens(100)
        state = engine.prefill(engine.empty(), prompt[:97], sampling)
        text = prompt[:97]
        for _ in range(3):
            text.append(int(state.token.item()))
            state = engine.step(state, sampling)
        assert state.recent.tolist() == recent_tokens(text, sampling).tolist()
        assert len(set(state.recent.tolist()) - set(text)) == 0

    def test_a_state_without_recent_tokens_starts_to_remember(self, engine):
        sampling = make_sampling(presence_penalty=1.0)
        plain = engine.prefill(engine.empty(), tokens(9), GREEDY)
        assert plain.recent is None
        after = engine.step(plain, sampling)
        assert sorted(set(after.recent.tolist())) == sorted({int(plain.token.item()), NO_TOKEN})
        assert engine.step(after, GREEDY).recent is None
        assert recent_tokens([1, 2], GREEDY) is None

    def test_another_context_size_is_refused(self, engine):
        state = engine.prefill(engine.empty(), tokens(9), make_sampling(presence_penalty=1.0))
        other = make_sampling(presence_penalty=1.0, presence_context_size=33)
        with pytest.raises(ValueError, match=r"remembers 32 recent tokens and the sampling's penalties need 64"):
            engine.step(state, other)
        with pytest.raises(ValueError, match="remembers 32"):
            engine.prefill(state, [1], other)

    @pytest.mark.parametrize(
        "options",
        [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_p": 0.9, "min_p": 0.05, "top_k": 6}],
        ids=str,
    )
    def test_filtered_tokens_are_mlx_lms(self, engine, options):
        """Every token that comes out is one that mlx_lm's filters keep, and not always the most likely one."""
        from mlx_lm import sample_utils

        sampling = make_sampling(1.5, 4, **options)
        others = 0
        for token, logits in generate_tokens(engine, tokens(9), sampling, max_tokens=30):
            values = logits - mx.logsumexp(logits)
            if "top_p" in options:
                values = sample_utils.apply_top_p(values, options["top_p"])
            if "min_p" in options:
                values = sample_utils.apply_min_p(values, options["min_p"])
            if "top_k" in options:
                values = sample_utils.apply_top_k(values, options["top_k"])
            assert values[0, token].item() > -float("inf")
            others += token != mx.argmax(logits).item()
        assert others

    @pytest.mark.parametrize("options", [{"top_p": 0.5}, {"top_k": 5, "presence_penalty": 1.0}], ids=str)
    def test_a_seed_repeats_and_seeds_differ(self, engine, options):
        def drawn(seed):
            sampling = make_sampling(2.0, seed, **options)
            return [token for token, _ in generate_tokens(engine, tokens(9), sampling, max_tokens=12)]

        assert drawn(1) == drawn(1) != drawn(2)

    @pytest.mark.parametrize("options", [{"top_k": 320}, {"top_p": 1.0}, {"min_p": 0.0, "top_k": 5000}], ids=str)
    def test_filters_without_effect(self, engine, options):
        plain, filtered = make_sampling(1.0, 5), make_sampling(1.0, 5, **options)
        prompt = tokens(9)
        assert [t for t, _ in generate_tokens(engine, prompt, plain, max_tokens=12)] == [
            t for t, _ in generate_tokens(engine, prompt, filtered, max_tokens=12)
        ]

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"top_p": 0.5, "top_k": 3},  # without a temperature
            {"temp": 0.7, "top_p": 1.0, "repetition_penalty": 1.0, "presence_penalty": None, "xtc_threshold": 0.2},
            {"repetition_penalty": 0, "logit_bias": {}},
        ],
        ids=str,
    )
    def test_what_has_no_effect_costs_nothing(self, options):
        assert make_sampling(**options).controls is None

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"top_p": 1.5}, "top_p 1.5 .* from 0 to 1"),
            ({"top_p": -0.1}, "top_p -0.1"),
            ({"top_p": float("nan")}, "top_p nan"),
            ({"min_p": 2}, "min_p 2"),
            ({"min_tokens_to_keep": 0}, "min_tokens_to_keep 0"),
            ({"top_k": -1}, "top_k -1 .* 0 to keep all"),
            ({"top_k": 2.5}, "top_k 2.5 .* whole number"),
            ({"top_k": True}, "top_k True"),
            ({"xtc_probability": 1.1}, "xtc_probability 1.1"),
            ({"xtc_threshold": 0.6}, "xtc_threshold 0.6 .* 0 to 0.5"),
            ({"repetition_penalty": -1.0}, "repetition_penalty -1.0"),
            ({"repetition_context_size": 0}, "repetition_context_size 0 .* from 1 to 65536"),
            ({"presence_penalty": float("inf")}, "presence_penalty inf"),
            ({"presence_context_size": 2**20}, "presence_context_size 1048576"),
            ({"frequency_penalty": "1"}, "frequency_penalty '1'"),
            ({"logit_bias": {-3: 1.0}}, "logit_bias names token id -3"),
            ({"logit_bias": {3: float("nan")}}, "logit_bias of token id 3 is nan"),
            ({"xtc_special_tokens": ["x"]}, "xtc_special_tokens names token id 'x'"),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_values_out_of_range_are_refused(self, options, words):
        with pytest.raises(ValueError, match=words):
            make_sampling(1.0, **options)

    def test_a_bias_outside_the_vocabulary_is_refused(self, engine):
        with pytest.raises(ValueError, match="token id 320, which is not in the model's vocabulary of 320"):
            engine.prefill(engine.empty(), [1], make_sampling(logit_bias={320: 1.0}))


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
