"""The decode loop allocates nothing that grows, but for the cache, and that in buckets."""

from __future__ import annotations

import mlx.core as mx
import pytest

from lily_mlx.engine import Engine, generate_tokens, make_sampling
from lily_mlx.kernels.attention import capacity_for
from lily_mlx.model import Model
from tests.model import synthetic

PROMPT = list(range(20))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    settings = synthetic.config(num_experts_per_tok=8, num_hidden_layers=2, full_attention_interval=2)
    return Engine(Model.load(synthetic.write_checkpoint(tmp_path_factory.mktemp("model"), settings)))


@pytest.mark.parametrize(
    "options", [{}, {"temp": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}], ids=["greedy", "filters-and-penalties"]
)
def test_memory_stays_the_same_while_the_cache_has_room(engine, options):
    """A merge of the tail, and no more bytes."""
    first, last = 390, 520
    assert capacity_for(first // 128 * 128) == capacity_for(last // 128 * 128)
    used = {}
    tokens = generate_tokens(engine, PROMPT, make_sampling(seed=3, **options), max_tokens=last)
    for count, (_, logits) in enumerate(tokens, len(PROMPT)):
        mx.eval(logits)
        del logits
        if count in (first, last):
            used[count] = mx.get_active_memory()
    print(f"bytes in use by the number of tokens: {used}")
    assert used[last] == pytest.approx(used[first], rel=0.001)
