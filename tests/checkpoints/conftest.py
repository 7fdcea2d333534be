"""The bundled checkpoint, its tokenizer and its card, loaded once."""

from __future__ import annotations

import json

import pytest
from mlx_lm.tokenizer_utils import load

from lily_mlx.checkpoints import bundled_checkpoint


@pytest.fixture(scope="session")
def tokenizer():
    return load(bundled_checkpoint())


@pytest.fixture(scope="session")
def evaluation():
    return json.loads((bundled_checkpoint() / "evaluation.json").read_text(encoding="utf-8"))
