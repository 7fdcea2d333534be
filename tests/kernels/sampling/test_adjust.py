"""Bias and penalties against their definition and mlx_lm's processors, and the parts' choices."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors

from lily_mlx.kernels import sampling
from lily_mlx.kernels.sampling import NO_TOKEN, Settings, policy, reference
from tests.support import FLOAT32_TOLERANCE, assert_close, rng, to_numpy

from .inputs import Case, filled

VOCABULARIES = pytest.mark.parametrize("vocabulary", [8, 511, 512, 513, 1291])
PENALTIES = [
    pytest.param({}, id="none"),
    pytest.param({"repetition_penalty": 1.3}, id="repetition"),
    pytest.param({"repetition_penalty": 0.5, "repetition_context_size": 3}, id="rewarded repetition"),
    pytest.param({"presence_penalty": 0.7}, id="presence"),
    pytest.param({"presence_penalty": -0.7, "presence_context_size": 1}, id="rewarded presence"),
    pytest.param({"frequency_penalty": 0.4, "frequency_context_size": 32}, id="frequency"),
    pytest.param(
        {
            "repetition_penalty": 1.1,
            "repetition_context_size": 5,
            "presence_penalty": 0.3,
            "presence_context_size": 9,
            "frequency_penalty": 0.2,
            "frequency_context_size": 30,
        },
        id="all",
    ),
]


def history(generator, vocabulary, count):
    """Tokens with repetitions, some of them at the ends of parts."""
    pool = [0, vocabulary - 1, *generator.integers(0, vocabulary, 5)]
    return generator.choice(pool, count).tolist()


def remembered(tokens, size=32):
    """`recent` when `tokens` have been fed from position 0 on."""
    return reference.remember(filled([], size), np.array(tokens, np.uint32), np.array([len(tokens) - 1]))


@VOCABULARIES
@pytest.mark.parametrize("penalties", PENALTIES)
@pytest.mark.parametrize("fed", [1, 3, 12, 33])
def test_matches_reference_and_mlx_lm(vocabulary, penalties, fed):
    generator = rng(vocabulary + fed)
    before = history(generator, vocabulary, 40)
    tokens = history(generator, vocabulary, fed)
    logits = generator.standard_normal(vocabulary).astype(np.float32) * 3
    bias = {0: 1.5, vocabulary - 1: -2.0, 3: -np.inf}
    case = Case(logits, Settings(**penalties), tokens, 39 + fed, 0, remembered(before), bias)
    adjusted, recent, _, _, _ = case.adjust(filtered=False)
    want, want_recent, *_ = case.adjust_reference(filtered=False)
    finite = np.arange(vocabulary) != 3
    assert np.isneginf(to_numpy(adjusted)[0, 3])
    assert_close("adjusted", to_numpy(adjusted)[:, finite], want[:, finite], 1e-6)
    assert np.array(recent).tolist() == want_recent.tolist() == remembered(before + tokens).tolist()
    theirs = mx.array(logits)[None]
    for processor in make_logits_processors(bias, **penalties):
        theirs = processor(mx.array(before + tokens), theirs)
    assert_close("mlx_lm's", to_numpy(adjusted)[:, finite], to_numpy(theirs)[:, finite], 1e-6)


@pytest.mark.parametrize("fed", [1, 5, 19, 20, 21])
def test_few_tokens_so_far(fed):
    """Empty slots are no tokens, and a context longer than the text is the text."""
    generator = rng(fed)
    tokens = history(generator, 100, fed)
    settings = Settings(frequency_penalty=0.5, repetition_penalty=1.2)
    case = Case(generator.standard_normal(100), settings, tokens, fed - 1)
    theirs = mx.array(case.logits.astype(np.float32))[None]
    for processor in make_logits_processors(repetition_penalty=1.2, frequency_penalty=0.5):
        theirs = processor(mx.array(tokens), theirs)
    assert_close("adjusted", case.adjust(filtered=False)[0], to_numpy(theirs), 1e-6)


def test_slots_over_many_steps():
    """One token at a time through the slots, several times around."""
    generator = rng(5)
    settings = Settings(frequency_penalty=1.0, frequency_context_size=7)
    tokens, recent = generator.integers(0, 9, 50).tolist(), filled([], 8)
    for position, token in enumerate(tokens):
        case = Case(np.zeros(9, np.float32), settings, [token], position, 0, recent)
        adjusted, after, *_ = case.adjust(filtered=False)
        counts = np.bincount(tokens[max(0, position - 6) : position + 1], minlength=9)
        assert np.array(adjusted)[0].tolist() == (-counts).tolist()
        recent = np.array(after)


@VOCABULARIES
@pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["greedy", "sampled"])
def test_choice_of_each_part(vocabulary, temperature):
    generator = rng(vocabulary)
    settings = Settings(temperature=temperature, presence_penalty=2.0)
    case = Case(generator.standard_normal(vocabulary), settings, [5], 9, 3)
    _, _, values, indices, _ = case.adjust(filtered=False)
    _, _, want, _, _ = case.adjust_reference(filtered=False)
    chosen = np.array(indices)
    assert values.size == -(-vocabulary // policy.SLICE)
    assert chosen.tolist() == [
        start + int(want[start : start + policy.SLICE].argmax()) for start in range(0, vocabulary, policy.SLICE)
    ]
    assert_close("values", values, want[chosen], FLOAT32_TOLERANCE)
    token, position = sampling.select(values, indices, mx.array([9], mx.int32))
    assert (token.item(), position.item()) == (int(want.argmax()), 10)


@VOCABULARIES
def test_totals_of_parts(vocabulary):
    generator = rng(vocabulary)
    logits = generator.standard_normal(vocabulary).astype(np.float32) * 5
    logits[1:3] = np.nan, -np.inf
    _, _, largest, _, total = Case(logits, Settings(temperature=0.5, top_k=3)).adjust(filtered=True)
    parts = [logits[start : start + policy.SLICE] for start in range(0, vocabulary, policy.SLICE)]
    want = np.array([np.nanmax(part) for part in parts])
    sums = [np.nansum(np.exp(part.astype(np.float64) - best)) for part, best in zip(parts, want, strict=True)]
    assert np.array(largest).tolist() == want.tolist()
    assert_close("total", total, np.array(sums), 1e-6)


def test_nan_and_infinite_logits():
    logits = np.array([np.nan, -np.inf, -3.0, np.nan, -2.0, -np.inf, np.nan, -5.0])
    adjusted, _, values, indices, _ = Case(logits, Settings(repetition_penalty=2.0), [4]).adjust(filtered=False)
    assert indices.tolist() == [2]
    assert values.tolist() == [-3.0]
    assert np.array_equal(np.array(adjusted)[0], np.where(np.arange(8) == 4, -4.0, logits), equal_nan=True)
    _, _, values, indices, _ = Case(np.full(600, np.nan), Settings()).adjust(filtered=False)
    assert indices.tolist() == [0, 512]


def test_draws_follow_the_softmax():
    """100,000 draws: the parts of a launch are independent draws, the vocabulary repeats 32 tokens."""
    generator = rng(11)
    logits = generator.standard_normal(32).astype(np.float32) * 2
    settings = Settings(temperature=0.8, presence_penalty=0.5)
    parts, counts = 2048, np.zeros(32)
    repeated = np.tile(logits, parts * policy.SLICE // 32)
    positions = 49
    for position in range(positions):
        _, _, _, indices, _ = Case(repeated, settings, [0], position, 8).adjust(filtered=False)
        counts += np.bincount(np.array(indices) % 32, minlength=32)
    assert counts.sum() == parts * positions > 100_000
    probabilities = np.exp(logits.astype(np.float64) / 0.8)
    probabilities /= probabilities.sum()
    expected = probabilities * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    print(f"chi-square {statistic:.1f} with 31 degrees of freedom")
    assert statistic < 61.1  # exceeded by chance once in a thousand


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"recent": filled([], 24)}, "24 slots; expected a power of two from 8", id="slots"),
        pytest.param({"recent": filled([], 32)[:4]}, "4 slots", id="few slots"),
        pytest.param({"tokens": []}, r"tokens has shape \[0\]", id="no tokens"),
        pytest.param({"logits": np.zeros(7)}, "7 tokens; expected 8 to", id="vocabulary"),
    ],
)
def test_wrong_arguments_are_refused(change, words):
    case = Case(**({"logits": np.zeros(8), "settings": Settings()} | change))
    with pytest.raises(ValueError, match=words):
        case.adjust(filtered=False)


def test_no_token_is_no_token():
    assert NO_TOKEN > policy.MOST_PARTS * policy.SLICE
