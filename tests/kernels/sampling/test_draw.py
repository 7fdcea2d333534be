"""The filtered draw: which tokens are kept, against the definition and mlx_lm's filters, and how often each comes."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils

from lily_mlx import metal
from lily_mlx.kernels import sampling
from lily_mlx.kernels.sampling import Settings, reference
from tests.support import rng

from .inputs import Case

FILTERS = [
    pytest.param({"top_p": 0.9}, id="top-p"),
    pytest.param({"top_p": 1e-6}, id="tiny top-p"),
    pytest.param({"top_p": 0.9999}, id="large top-p"),
    pytest.param({"min_p": 0.05}, id="min-p"),
    pytest.param({"min_p": 1.0}, id="largest min-p"),
    pytest.param({"min_p": 0.5, "min_tokens_to_keep": 9}, id="min-p keeping 9"),
    pytest.param({"min_p": 0.5, "min_tokens_to_keep": 5000}, id="min-p keeping all"),
    pytest.param({"top_k": 1}, id="top-1"),
    pytest.param({"top_k": 20}, id="top-20"),
    pytest.param({"top_k": 600}, id="top-600"),
    pytest.param({"top_k": 10**9}, id="top-all"),
    pytest.param({"top_p": 0.8, "min_p": 0.02, "top_k": 15}, id="all three"),
    pytest.param({"top_p": 0.5, "min_p": 0.4, "min_tokens_to_keep": 30, "top_k": 25}, id="all four"),
]
EXCLUSIONS = [
    pytest.param({"xtc_threshold": 0.1}, id="0.1"),
    pytest.param({"xtc_threshold": 0.01}, id="0.01"),
    pytest.param({"xtc_threshold": 0.0}, id="0"),
    pytest.param({"xtc_threshold": 0.5}, id="0.5"),
    pytest.param({"xtc_threshold": 0.005, "top_k": 4}, id="top-k"),
    pytest.param({"xtc_threshold": 0.01, "top_k": 30, "top_p": 0.9, "min_p": 0.01}, id="all"),
]


def mlx_lms(logits, settings, special=(), temperature=1.0):
    """The logits that mlx_lm's sampler draws from, after its filters."""
    found = []

    def draw(logprobs, temp):
        found.append(np.array(logprobs)[0])
        return mx.argmax(logprobs, axis=-1)

    original, sample_utils.categorical_sampling = sample_utils.categorical_sampling, draw
    try:
        sampler = sample_utils.make_sampler(
            temperature,
            settings.top_p,
            settings.min_p,
            settings.min_tokens_to_keep,
            settings.top_k,
            settings.xtc_probability,
            settings.xtc_threshold,
            list(special),
        )
        values = mx.array(logits.astype(np.float32))[None]
        sampler(values - mx.logsumexp(values, axis=-1, keepdims=True))
    finally:
        sample_utils.categorical_sampling = original
    return found[0]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("vocabulary", [8, 37, 512, 1291, 2600])
@pytest.mark.parametrize("spread", [1.0, 6.0], ids=["flat", "peaked"])
def test_matches_the_definition(filters, vocabulary, spread):
    logits = rng(vocabulary).standard_normal(vocabulary) * spread
    case = Case(logits.astype(np.float32), Settings(temperature=0.8, **filters))
    token, kept = case.draw()
    want_token, want = case.draw_reference()
    assert np.flatnonzero(kept).tolist() == np.flatnonzero(want).tolist()
    assert token == want_token


@pytest.mark.parametrize("filters", FILTERS)
def test_support_on_the_full_vocabulary(filters):
    """The definition's tokens, and mlx_lm's: all of them, but for what float32 sums of 248,320 terms miss of p."""
    generator = rng(1)
    logits = (generator.standard_normal(248_320) * 3).astype(np.float32)
    logits[generator.integers(0, logits.size, 12)] += 12  # a few likely tokens, as a language model has
    settings = Settings(temperature=0.8, **filters)
    with metal.checked(False):
        _, kept = Case(logits, settings).draw()
    probabilities = np.exp(logits.astype(np.float64))
    probabilities /= probabilities.sum()
    want = reference.kept(logits, settings)
    assert probabilities[kept != want].sum() < (1e-5 if settings.top_p > 0.99 else 1e-15)
    if settings.top_k >= logits.size:  # refused by mlx_lm
        assert kept.all()
        return
    theirs = np.isfinite(mlx_lms(logits, settings))
    differing = probabilities[kept != theirs].sum()
    print(f"{kept.sum()} kept, mlx_lm {theirs.sum()}, differing mass {differing:.1e}")
    assert differing < (1e-3 if 0.8 < settings.top_p < 1 else 1e-15)


@pytest.mark.parametrize("exclusion", EXCLUSIONS)
@pytest.mark.parametrize("special", [(), (3, 9, 700)], ids=["none", "special"])
@pytest.mark.parametrize("vocabulary", [40, 1291])
def test_xtc_drops_what_mlx_lm_drops(exclusion, special, vocabulary):
    logits = rng(vocabulary).standard_normal(vocabulary).astype(np.float32) * 3
    logits[3] = logits.max() + 1
    special = [token for token in special if token < vocabulary]
    case = Case(logits, Settings(temperature=0.8, xtc_probability=1.0, **exclusion), special=special)
    token, kept = case.draw()
    want_token, want = case.draw_reference()
    assert np.flatnonzero(kept).tolist() == np.flatnonzero(want).tolist()
    assert token == want_token
    assert (
        np.flatnonzero(kept).tolist() == np.flatnonzero(np.isfinite(mlx_lms(logits, case.settings, special))).tolist()
    )


@pytest.mark.parametrize("special", [(), (5,)], ids=["none", "special"])
def test_xtc_after_a_number_of_tokens_that_parts_equals(special):
    """Min-p keeps three tokens, of two equals the lower id; XTC then drops the two above."""
    logits = np.array([0, 0, 1, 0, -1, 1, 3, 2], np.float32)
    settings = Settings(0.3, min_p=0.3, min_tokens_to_keep=3, xtc_probability=1.0, xtc_threshold=0.0)
    case = Case(logits, settings, special=list(special))
    token, kept = case.draw()
    assert (token, np.flatnonzero(kept).tolist()) == (2, [2])
    assert np.array_equal(kept, case.draw_reference()[1])


def test_xtc_comes_with_its_probability():
    logits = np.log(np.array([0.4, 0.3, 0.2, *[0.1 / 13] * 13])).astype(np.float32)
    settings = Settings(temperature=1.0, xtc_probability=0.3, xtc_threshold=0.15)
    hits = 0
    with metal.checked(False):
        for position in range(600):
            case = Case(logits, settings, position=position)
            dropped = not case.draw()[1][0]
            assert dropped == (reference.coin(case.seed, position) <= 0.3)
            hits += dropped
    print(f"{hits} of 600")
    assert abs(hits / 600 - 0.3) < 4 * (0.3 * 0.7 / 600) ** 0.5


@pytest.mark.parametrize("filters", FILTERS)
def test_equal_logits(filters):
    """Top-p and min-p take all equals or none, as in mlx_lm; numbers of tokens take the lower ids."""
    generator = rng(7)
    logits = generator.integers(-3, 4, 1300).astype(np.float32)
    case = Case(logits, Settings(temperature=0.8, **filters))
    token, kept = case.draw()
    want_token, want = case.draw_reference()
    assert np.flatnonzero(kept).tolist() == np.flatnonzero(want).tolist()
    assert token == want_token
    settings = case.settings
    if settings.top_k < logits.size and settings.min_tokens_to_keep < logits.size:
        theirs = np.isfinite(mlx_lms(logits, settings))
        assert kept.sum() == theirs.sum()
        if not settings.top_k and settings.min_tokens_to_keep == 1:
            assert (kept == theirs).all()


@pytest.mark.parametrize("filters", FILTERS)
def test_all_equal(filters):
    case = Case(np.full(700, -2.5, np.float32), Settings(temperature=0.8, **filters))
    token, kept = case.draw()
    want_token, want = case.draw_reference()
    assert np.flatnonzero(kept).tolist() == np.flatnonzero(want).tolist()
    assert token == want_token


@pytest.mark.parametrize("filters", FILTERS)
def test_nan_and_minus_infinity_are_never_drawn(filters):
    logits = rng(8).standard_normal(600).astype(np.float32)
    logits[:300:2], logits[1:300:2] = np.nan, -np.inf
    settings = Settings(temperature=2.0, **filters)
    for position in range(5):
        token, kept = Case(logits, settings, position=position).draw()
        want_token, want = Case(logits, settings, position=position).draw_reference()
        assert token == want_token >= 300
        assert np.flatnonzero(kept[300:]).tolist() == np.flatnonzero(want[300:]).tolist()


@pytest.mark.parametrize("value", [np.nan, -np.inf], ids=["nan", "-inf"])
@pytest.mark.parametrize("filters", FILTERS)
def test_no_finite_logit_gives_the_first_token(filters, value):
    token, _ = Case(np.full(600, value, np.float32), Settings(temperature=0.8, **filters)).draw()
    assert token == 0


@pytest.mark.parametrize("filters", [{"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}], ids=str)
def test_an_infinite_logit_is_drawn(filters):
    logits = rng(9).standard_normal(600).astype(np.float32)
    logits[345] = np.inf
    assert Case(logits, Settings(temperature=0.8, **filters)).draw()[0] == 345


def test_filters_look_at_penalised_logits():
    logits = np.arange(20, dtype=np.float32)
    settings = Settings(temperature=0.01, top_k=2, presence_penalty=10.0)
    token, kept = Case(logits, settings, tokens=[19]).draw()
    assert np.flatnonzero(kept).tolist() == [17, 18]
    assert token == 18


def test_without_effect_the_draw_is_selects():
    """The same noise decides: filters that drop nothing change no token."""
    generator = rng(10)
    logits = generator.standard_normal(900).astype(np.float32)
    for position in range(8):
        plain = Case(logits, Settings(temperature=0.9), position=position)
        _, _, values, indices, _ = plain.adjust(filtered=False)
        token, _ = sampling.select(values, indices, mx.array([position], mx.int32))
        filtered = Case(logits, Settings(temperature=0.9, top_k=900, top_p=1.0, min_p=0.0), position=position)
        assert filtered.draw()[0] == token.item()


@pytest.mark.parametrize(
    "filters",
    [
        pytest.param({"top_p": 0.85}, id="top-p"),
        pytest.param({"min_p": 0.1}, id="min-p"),
        pytest.param({"top_k": 7}, id="top-k"),
        pytest.param({"top_p": 0.95, "min_p": 0.02, "top_k": 12}, id="all"),
    ],
)
def test_draws_follow_mlx_lms_sampler(filters):
    """The kernel's draws against the probabilities that mlx_lm's sampler draws with."""
    temperature, draws = 1.3, 2000
    logits = rng(12).standard_normal(24).astype(np.float32) * 2
    settings = Settings(temperature=temperature, **filters)
    theirs = mlx_lms(logits, settings, temperature=temperature).astype(np.float64) / temperature
    probabilities = np.exp(theirs - theirs.max())
    probabilities /= probabilities.sum()
    counts = np.zeros(24)
    with metal.checked(False):
        for position in range(draws):
            counts[Case(logits, settings, position=position).draw()[0]] += 1
    check_counts(counts, probabilities)


@pytest.mark.parametrize("seed", [1, 2])
def test_definition_follows_mlx_lms_sampler(seed):
    """100,000 draws of the definition, which the kernel agrees with token by token."""
    temperature = 0.7
    logits = rng(seed).standard_normal(32) * 2
    settings = Settings(temperature=temperature, top_p=0.95, min_p=0.01, top_k=20)
    kept = np.isfinite(mlx_lms(logits, settings, temperature=temperature))
    assert reference.kept(logits, settings).tolist() == kept.tolist()
    probabilities = np.where(kept, np.exp(logits / temperature), 0)
    probabilities /= probabilities.sum()
    counter = np.zeros((4, 100_000, 32), np.uint32)
    counter[0] = np.arange(32)
    counter[1] = np.arange(100_000)[:, None]
    uniform = (reference.philox((seed, 0), counter)[0] + 0.5) / 2.0**32
    values = np.where(kept, logits / temperature - np.log(-np.log1p(-uniform)), -np.inf)
    check_counts(np.bincount(values.argmax(axis=1), minlength=32), probabilities)


def check_counts(counts, probabilities):
    """Chi-square over the tokens that can come; none of the others did."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = possible.sum() - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.5 * (2 / (9 * freedom)) ** 0.5) ** 3  # Wilson and Hilferty
    print(f"{counts.sum():.0f} draws, chi-square {statistic:.1f}, {freedom} degrees of freedom, limit {limit:.1f}")
    assert statistic < limit


def test_wrong_arguments_are_refused():
    settings = Settings(temperature=1.0, top_k=2).array()
    logits, part, one = mx.zeros((1, 600)), mx.zeros(2), mx.array([0], mx.uint32)
    special, position = mx.zeros(8, mx.uint32), mx.array([0], mx.int32)
    with pytest.raises(ValueError, match=r"largest has shape \[3\]; expected \[2\]"):
        sampling.draw(logits, mx.zeros(3), part, special, settings, one, position)
    with pytest.raises(ValueError, match="4 special tokens"):
        sampling.draw(logits, part, part, special[:4], settings, one, position)
    with pytest.raises(ValueError, match=r"settings has shape \[8\]; expected \[16\]"):
        sampling.draw(logits, part, part, special, settings[:8], one, position)
