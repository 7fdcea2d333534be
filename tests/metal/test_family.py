"""The published models of the family: their configurations are accepted, and their kernels pass the front end."""

from __future__ import annotations

import pytest

from lily_mlx.metal import use_backend
from lily_mlx.metal.check import check_texts, texts
from lily_mlx.metal.check.family import FAMILY
from lily_mlx.metal.check.texts import Workload, exact_text, sources
from lily_mlx.model import ModelConfig


def config_of(label: str, **changes) -> ModelConfig:
    return ModelConfig.from_dict(texts._settings(**texts._FULL_SIZE | FAMILY[label] | changes))


@pytest.mark.slow
def test_a_step_and_a_chunk_of_each_pass():
    recorded: dict[str, str] = {}
    with use_backend("metal", tracing=True):
        for label in FAMILY:
            config = config_of(label)
            names = dict(texts._texts_of(Workload(label, config, (300,), (20,))))
            mlp = ("moe_experts_gate_up", "moe_short_gate_up") if config.experts else ("mlp_gate_up_step",)
            for kernel in ("attention_step_parts", "deltanet_step", "matmul", "head", *mlp):
                assert any(kernel in name for name in names.values()), (label, kernel)
            recorded |= names
    found = [exact_text(name, text, sources()) for text, name in recorded.items()]
    for result in check_texts(found):
        assert result.passed, [str(finding) for finding in result.findings]


@pytest.mark.parametrize(
    ("label", "experts", "mlp_size"),
    [
        ("Qwen3.5-397B-A17B", 512, 0),
        ("Qwen3.5-122B-A10B", 256, 0),
        ("Qwen3-Next-80B-A3B", 512, 0),
        ("Qwen3.6-27B", 0, 17_408),
        ("Qwen3.5-0.8B", 0, 3584),
    ],
)
def test_kinds_of_layers(label, experts, mlp_size):
    config = config_of(label, num_hidden_layers=8, full_attention_interval=4)
    assert (config.experts, config.mlp_size) == (experts, mlp_size)
    assert len(config.dense_layers) == (0 if experts else 8)
    assert [i for i in range(8) if config.is_attention(i)] == [3, 7]
    assert config.interleaves_heads == (label == "Qwen3-Next-80B-A3B")
