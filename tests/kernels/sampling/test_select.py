"""The last argmax of a step."""

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.kernels import sampling
from lily_mlx.kernels.sampling import policy, reference
from tests.support import rng


def check(values, indices, position=0):
    values, indices = np.array(values, np.float32), np.array(indices, np.uint32)
    token, following = sampling.select(mx.array(values), mx.array(indices), mx.array([position], mx.int32))
    want_token, want_position = reference.select(values, indices, np.array([position]))
    assert (token.tolist(), following.tolist()) == (want_token.tolist(), want_position.tolist())
    return token.item()


@pytest.mark.parametrize("parts", [1, 2, 7, 8, 33, 255, 256, 257, 1024, 4096])
def test_part_counts(parts):
    generator = rng(parts)
    check(generator.standard_normal(parts), generator.permutation(10 * parts)[:parts], position=parts)


def test_equal_values_give_the_lower_index():
    generator = rng(1)
    for _ in range(5):
        values = generator.integers(0, 3, 300)
        indices = generator.permutation(300)
        assert check(values, indices) == min(indices[values == 2])


def test_nan_and_infinities():
    nan, infinity = float("nan"), float("inf")
    assert check([nan, -infinity, nan, -5.0], [0, 1, 2, 3]) == 3
    assert check([nan, -infinity, nan], [4, 9, 6]) == 4
    assert check([1.0, infinity, nan], [0, 1, 2]) == 1


def test_too_many_parts_are_refused():
    with pytest.raises(ValueError, match="4097 parts"):
        sampling.select(mx.zeros((4097,)), mx.zeros((4097,), mx.uint32), mx.array([0], mx.int32))


def test_parts_of_the_head_stay_within_one_threadgroup(kernel_backend):
    for blocks in (1, 2, 63, 64, 65, 7760, 10**6):
        parts = policy.head_parts(blocks)
        assert 1 <= parts <= min(blocks, policy.MOST_PARTS)
        assert -(-blocks // parts) == -(-blocks // min(blocks, policy.PARTS[kernel_backend]))
