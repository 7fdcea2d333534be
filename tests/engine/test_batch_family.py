"""Every kind of the family decodes in a batch: the logits of a step alone."""

from __future__ import annotations

import numpy as np
import pytest

from lily_mlx.engine import DecodeBatch, Engine, make_sampling
from lily_mlx.model import Model
from tests.model.families import KINDS
from tests.support import rng, to_numpy

from .test_batch import prefilled

KEPT = ("dense", "dense, mixed", "next, mixed", "experts, bfloat16", "experts, mixed")
MAX_LOGIT_ERROR = 0.03  # of the range of the logits


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "experts, mixed" else [pytest.mark.slow]) for kind in KEPT],
)
def test_logits_are_those_of_steps_alone(kind, tmp_path):
    """Of as many steps as choose the same tokens: a choice between two logits that are close is a matter of rounding."""
    engine, sampling = Engine(Model.load(KINDS[kind].write(tmp_path))), make_sampling()
    batch, states = DecodeBatch(engine), {}
    for seed, count in enumerate((3, 9)):
        state = prefilled(engine, rng(seed).integers(0, 320, count).tolist())
        states[batch.add(state, sampling)] = state
    compared = 0
    for _ in range(5):
        for handle, chosen in batch.step().items():
            if handle not in states or chosen.token != int(states[handle].token.item()):
                states.pop(handle, None)
                continue
            got, want = to_numpy(chosen.logits), to_numpy(states[handle].logits)
            error = np.abs(got - want).max() / np.ptp(want)
            print(f"sequence {handle}: logits differ by {error:.1e} of their range")
            assert error < MAX_LOGIT_ERROR
            states[handle] = engine.step(states[handle], sampling)
            compared += 1
    assert compared >= 4
