"""The choice for several sequences: each has what `adjust` and `draw` or `select` choose for it alone."""

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels import sampling
from lily_mlx.kernels.sampling import RowControls, Settings, reference
from lily_mlx.kernels.sampling.settings import SIZE, UNFILTERED
from tests.support import rng

from .inputs import filled

PLAIN = {
    "greedy": Settings(),
    "warm": Settings(temperature=0.8),
    "penalised": Settings(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    "penalised greedy": Settings(repetition_penalty=1.5, repetition_context_size=3),
}
FILTERED = {
    "top-p": Settings(temperature=1.0, top_p=0.8),
    "top-k": Settings(temperature=0.7, top_k=5, presence_penalty=0.5),
    "min-p": Settings(temperature=1.2, min_p=0.1, min_tokens_to_keep=2),
    "xtc": Settings(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.05),
}


class Rows:
    """Sequences with settings of their own, at positions of their own."""

    def __init__(self, settings, vocabulary, seed):
        generator = rng(seed)
        count = len(settings)
        self.settings = list(settings)
        self.logits = (generator.normal(size=(count, vocabulary)) * 3).astype(np.float32)
        self.tokens = generator.integers(0, vocabulary, count).astype(np.uint32)
        self.position = (40 + 17 * np.arange(count)).astype(np.int32)
        self.recent = generator.integers(0, vocabulary, (count, 32)).astype(np.uint32)
        self.seed = generator.integers(0, 2**32, count).astype(np.uint32)
        ids = [list(generator.choice(vocabulary, 4, replace=False)) for _ in range(count)]
        self.bias_ids = np.stack([filled(own) for own in ids])
        self.bias_values = np.zeros((count, 8), np.float32)
        self.bias_values[:, :4] = generator.normal(size=(count, 4)) * 2
        self.special = np.stack([filled([int(logits.argmax())]) for logits in self.logits])

    def controls(self, rows=None):
        rows = np.arange(len(self.settings)) if rows is None else np.asarray(rows)
        values = np.stack([self.settings[row].values() for row in rows])
        filtered = any(self.settings[row].filters for row in rows)
        for place, row in enumerate(rows):
            values[place, UNFILTERED] = filtered and not self.settings[row].filters
        arrays = (values, *(a[rows] for a in (self.seed, self.bias_ids, self.bias_values, self.special)))
        return RowControls(*map(mx.array, arrays), filtered)

    def choose(self, rows=None):
        rows = np.arange(len(self.settings)) if rows is None else np.asarray(rows)
        arrays = (mx.array(a[rows]) for a in (self.logits, self.tokens, self.position, self.recent))
        return [np.array(out) for out in sampling.choose_rows(*arrays, self.controls(rows))]

    def alone(self, row):
        """The single route's token, logits and memory."""
        own, one = self.settings[row], slice(row, row + 1)
        position, seed = mx.array(self.position[one]), mx.array(self.seed[one])
        adjusted, after, best, index, total = sampling.adjust(
            mx.array(self.logits[one]), mx.array(self.tokens[one]), position, mx.array(self.recent[row]),
            mx.array(self.bias_ids[row]), mx.array(self.bias_values[row]), own.array(), seed, own.filters,
        )  # fmt: skip
        if own.filters:
            token, _, _ = sampling.draw(adjusted, best, total, mx.array(self.special[row]), own.array(), seed, position)
        else:
            token, _ = sampling.select(best, index, position)
        return token.item(), np.array(adjusted)[0], np.array(after)


GROUPS = {
    "unfiltered": [*PLAIN.values()],
    "filtered": [*FILTERED.values()],
    "mixed": [*PLAIN.values(), *FILTERED.values()],
    "two": [PLAIN["greedy"], FILTERED["top-k"]],
}


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("vocabulary", [8, 37, 512, 1291])
def test_a_sequence_gets_what_it_gets_alone(group, vocabulary):
    rows = Rows(group, vocabulary, seed=vocabulary)
    tokens, adjusted, recent = rows.choose()
    for row in range(len(group)):
        token, logits, memory = rows.alone(row)
        assert tokens[row] == token
        np.testing.assert_array_equal(adjusted[row], logits)
        np.testing.assert_array_equal(recent[row], memory)


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_matches_the_definition(group):
    rows = Rows(group, 700, seed=5)
    tokens, adjusted, recent = rows.choose()
    want = reference.choose_rows(
        rows.logits, rows.tokens, rows.position, rows.recent, group, rows.seed, rows.bias_ids, rows.bias_values,
        rows.special,
    )  # fmt: skip
    np.testing.assert_array_equal(tokens, want[0])
    np.testing.assert_allclose(adjusted, want[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(recent, want[2])


def test_the_other_sequences_do_not_matter():
    rows = Rows(GROUPS["mixed"], 1291, seed=7)
    tokens, adjusted, _ = rows.choose()
    for pair in ([0, 1], [4, 0], [7, 5], [2, 6]):
        chosen, logits, _ = rows.choose(pair)
        np.testing.assert_array_equal(chosen, tokens[pair])
        np.testing.assert_array_equal(logits, adjusted[pair])


def test_nan_logits_of_one_sequence_stay_its_own():
    rows = Rows(GROUPS["two"], 300, seed=8)
    want = rows.choose()[0]
    rows.logits[0] = np.nan
    assert rows.choose()[0][1] == want[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": mx.zeros(3, mx.uint32)}, "tokens has shape"),
        ({"position": mx.zeros(2, mx.uint32)}, "position is"),
        ({"recent": mx.zeros((2, 48), mx.uint32)}, "recent has 48 slots"),
        ({"logits": mx.zeros((1, 300))}, "1 sequence"),
    ],
    ids=["tokens", "position-dtype", "recent", "one-sequence"],
)
def test_wrong_arguments_are_refused(change, message):
    rows = Rows(GROUPS["two"], 300, seed=9)
    good = {
        "logits": mx.array(rows.logits),
        "tokens": mx.array(rows.tokens),
        "position": mx.array(rows.position),
        "recent": mx.array(rows.recent),
    }
    assert rows.controls().settings.shape == (2, SIZE)
    with pytest.raises(ValueError, match=message):
        sampling.choose_rows(**(good | change), controls=rows.controls())
