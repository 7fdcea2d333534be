"""Logits and the choice of a token against their reference, ties, and the distribution of draws."""

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels import sampling
from lily_mlx.kernels.linear import QuantizedWeight
from lily_mlx.kernels.sampling import reference
from tests.support import FLOAT32_TOLERANCE, assert_close, bf16, quantized, rng, to_numpy

EPS = 1e-6


def settings(temperature):
    return mx.array([temperature] + [0.0] * 7, mx.float32)


def inputs(generator, vocabulary, columns, bits=4, group_size=64):
    weight, _ = quantized(generator, (vocabulary, columns), bits, group_size)
    return bf16(generator.standard_normal((1, columns))), bf16(generator.uniform(0.5, 1.5, columns)), weight


def run(arguments, temperature=0.0, seed=0, position=0):
    x, norm_weight, weight = arguments
    return sampling.head(
        x,
        norm_weight,
        weight,
        EPS,
        settings(temperature),
        mx.array([seed], mx.uint32),
        mx.array([position], mx.int32),
    )


def run_reference(arguments, temperature=0.0, seed=0, position=0):
    x, norm_weight, weight = arguments
    return reference.head(
        to_numpy(x),
        to_numpy(norm_weight),
        weight,
        EPS,
        np.array([temperature]),
        np.array([seed]),
        np.array([position]),
    )


def choose(arguments, temperature=0.0, seed=0, position=0):
    _, values, indices = run(arguments, temperature, seed, position)
    token, _ = sampling.select(values, indices, mx.array([position], mx.int32))
    return token.item()


@pytest.mark.parametrize(
    ("vocabulary", "columns", "bits", "group_size"),
    [
        pytest.param(2048, 256, 4, 64, id="tiny"),
        pytest.param(1003, 2048, 4, 64, id="full-size columns"),
        pytest.param(8, 64, 4, 64, id="fewest tokens"),
        pytest.param(77, 96, 4, 32, id="odd"),
        pytest.param(300, 320, 6, 32, id="6 bits"),
        pytest.param(300, 128, 8, 128, id="8 bits"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["greedy", "sampled"])
def test_head_and_select(vocabulary, columns, bits, group_size, temperature):
    arguments = inputs(rng(vocabulary), vocabulary, columns, bits, group_size)
    logits, values, indices = run(arguments, temperature, seed=3, position=41)
    want_logits, want_values, want_indices = run_reference(arguments, temperature, seed=3, position=41)
    assert logits.shape == (1, vocabulary)
    assert_close("logits", logits, want_logits, FLOAT32_TOLERANCE)
    # Every part's value is the reference's value of the token that it names.
    chosen = to_numpy(indices)
    assert len(set(chosen.tolist())) == values.size
    assert_close("values", values, want_values[chosen], FLOAT32_TOLERANCE)
    token, position = sampling.select(values, indices, mx.array([41], mx.int32))
    want_token, want_position = reference.select(want_values, want_indices, np.array([41]))
    assert (token.tolist(), position.tolist()) == (want_token.tolist(), want_position.tolist())
    assert (token.dtype, position.dtype) == (mx.uint32, mx.int32)


def test_temperature_zero_is_the_argmax_of_the_logits():
    for seed in range(5):
        arguments = inputs(rng(seed), 500, 64)
        logits, _, _ = run(arguments, seed=seed)
        assert choose(arguments, seed=seed) == int(np.argmax(to_numpy(logits)))


@pytest.mark.parametrize("copies", [(5, 6), (3, 499), (127, 128), (0, 250, 499)], ids=str)
def test_equal_logits_give_the_lower_token(copies):
    """The best row stands at several places: in one simdgroup, in two, in two parts."""
    x, norm_weight, weight = inputs(rng(20), 500, 64)
    best = choose((x, norm_weight, weight))
    rows = np.array(weight.weight)
    scales, biases = to_numpy(weight.scales), to_numpy(weight.biases)
    worst = int(np.argmin(run_reference((x, norm_weight, weight))[1]))
    for array in (rows, scales, biases):
        value = array[best].copy()
        array[best] = array[worst]
        for copy in copies:
            array[copy] = value
    changed = QuantizedWeight.pack(mx.array(rows), bf16(scales), bf16(biases), 4, 64)
    assert choose((x, norm_weight, changed)) == min(copies)


def test_nan_logits_still_give_a_token():
    x, norm_weight, weight = inputs(rng(21), 300, 64)
    assert choose((x * mx.array(float("nan"), mx.bfloat16), norm_weight, weight)) == 0


def test_philox_known_answers():
    """Vectors published with Random123 for philox4x32-10."""
    cases = [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for key, counter, want in cases:
        assert tuple(reference.philox(key, np.array(counter, np.uint32))) == want


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_draws_follow_the_softmax():
    """The parts of one launch are independent draws: the vocabulary repeats 16 tokens."""
    generator = rng(30)
    x, norm_weight, weight = inputs(generator, 16, 32, 4, 32)
    repeats = 512
    arrays = [mx.concatenate([array] * repeats) for array in (weight.weight, weight.scales, weight.biases)]
    repeated = QuantizedWeight.pack(*arrays, 4, 32)
    temperature = 0.9
    counts = np.zeros(16)
    for position in range(8):
        logits, _, indices = run((x, norm_weight, repeated), temperature, seed=1, position=position)
        counts += np.bincount(to_numpy(indices) % 16, minlength=16)
    weights = np.exp(to_numpy(logits)[0, :16] / temperature)
    statistic = chi_square(counts, weights / weights.sum())
    print(f"{counts.sum():.0f} draws, chi-square {statistic:.1f} with 15 degrees of freedom")
    assert counts.sum() >= 400
    assert statistic < 37.7  # exceeded by chance once in a thousand


def test_reference_noise_is_gumbel():
    """The definition's own noise, over many positions: the argmax of 8 equal logits is uniform."""
    counts = np.bincount([reference.noise(7, position, 8).argmax() for position in range(20_000)], minlength=8)
    assert chi_square(counts, np.full(8, 1 / 8)) < 24.3  # 7 degrees of freedom
    values = np.concatenate([reference.noise(9, position, 1000) for position in range(100)])
    assert abs(values.mean() - np.euler_gamma) < 0.02
    assert abs(values.std() - np.pi / 6**0.5) < 0.02


def test_a_draw_depends_on_seed_and_position_only():
    arguments = inputs(rng(31), 2000, 32, 4, 32)
    first = [choose(arguments, 3.0, seed, position) for seed, position in [(1, 1), (1, 2), (2, 1), (1, 1)]]
    assert first[0] == first[3]
    assert len(set(first)) == 3


def test_a_low_temperature_is_greedy():
    arguments = inputs(rng(32), 200, 64)
    assert choose(arguments, 1e-3, seed=5) == choose(arguments)


def test_wrong_arguments_are_refused():
    x, norm_weight, weight = inputs(rng(33), 16, 64)
    seed, position = mx.array([0], mx.uint32), mx.array([0], mx.int32)
    with pytest.raises(ValueError, match=r"sampling has shape \[1\]; expected \[8\]"):
        sampling.head(x, norm_weight, weight, EPS, mx.zeros((1,)), seed, position)
    with pytest.raises(ValueError, match=r"seed is mlx\.core\.int32"):
        sampling.head(x, norm_weight, weight, EPS, settings(0.0), position, position)
    with pytest.raises(ValueError, match=r"position is mlx\.core\.uint32"):
        sampling.head(x, norm_weight, weight, EPS, settings(0.0), seed, seed)
    small, _ = quantized(rng(34), (7, 64), 4, 64)
    with pytest.raises(ValueError, match="7 tokens; expected at least 8"):
        sampling.head(x, norm_weight, small, EPS, settings(0.0), seed, position)
