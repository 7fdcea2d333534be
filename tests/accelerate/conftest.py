"""A small model as mlx_lm loads it, accelerated, and in float32 for comparison."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx import accelerate
from tests.model import synthetic
from tests.support import rng, to_numpy


def random_model():
    # All experts are chosen, so that rounding cannot change the routing.
    return synthetic.random_model(synthetic.config(num_experts_per_tok=8))[0]


@pytest.fixture(scope="session")
def original():
    return random_model()


@pytest.fixture(scope="session")
def fast(original):
    return accelerate(original)


@pytest.fixture(scope="session")
def exact():
    model = random_model()
    model.set_dtype(mx.float32)
    return model


@pytest.fixture
def close():
    """Asserts that logits are alike: the largest difference is at most 3 % of the range of the expected ones."""

    def check(got: mx.array, want: mx.array) -> None:
        got, want = to_numpy(got), to_numpy(want)
        assert got.shape == want.shape
        error = np.abs(got - want).max() / (want.max() - want.min())
        print(f"logits differ by {error:.1e} of their range")
        assert error < 3e-2

    return check


def tokens(count: int, seed: int = 0) -> list[int]:
    return rng(seed).integers(0, 320, count).tolist()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    from mlx_lm.tokenizer_utils import load

    from tests.model.tokenizer import write_tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return load(directory)
