"""The bundled checkpoint is small, loads in mlx_lm and is as good as its card says."""

from __future__ import annotations

import json
import math

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import dequantize_model, load_model

from lily_mlx.checkpoints import bundled_checkpoint, held_out_text

SLICE_TOKENS = 256


@pytest.fixture(scope="module")
def model():
    return load_model(bundled_checkpoint())[0]


def test_size():
    size = sum(path.stat().st_size for path in bundled_checkpoint().iterdir())
    assert size <= 12_000_000, f"{size} bytes"


def test_shapes_are_those_of_the_family():
    config = json.loads((bundled_checkpoint() / "config.json").read_text(encoding="utf-8"))
    text = config["text_config"]
    assert config["model_type"] == "qwen3_5_moe"
    assert (text["head_dim"], text["linear_key_head_dim"], text["linear_value_head_dim"]) == (256, 128, 128)
    assert text["linear_conv_kernel_dim"] == 4
    assert text["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert text["rope_parameters"]["partial_rotary_factor"] == 0.25


def test_router_has_8_bits_and_the_rest_4(model):
    mixture = model.layers[0].mlp
    assert (mixture.gate.bits, mixture.shared_expert_gate.bits) == (8, 8)
    assert (mixture.switch_mlp.up_proj.bits, mixture.switch_mlp.up_proj.group_size) == (4, 64)


def test_perplexity_is_that_of_the_card(model, tokenizer, evaluation):
    plain = dequantize_model(load_model(bundled_checkpoint())[0])
    plain.set_dtype(mx.float32)
    ids = np.array(tokenizer.encode(held_out_text()[:4000], add_special_tokens=False)[: SLICE_TOKENS + 1])
    logits = plain(mx.array(ids[None, :-1]))[0]
    nats = mx.mean(mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, mx.array(ids[1:, None]), axis=-1)[:, 0])
    assert math.exp(nats.item()) == pytest.approx(math.exp(evaluation["4 bits"]["slice_nats_per_token"]), rel=0.02)


def test_card_has_the_figures(evaluation):
    card = (bundled_checkpoint() / "README.md").read_text(encoding="utf-8")
    for weights in ("4 bits", "bfloat16"):
        assert f"{evaluation[weights]['perplexity_per_token']:.2f}" in card
    # Four bits cost little, and both libraries compute the same function.
    assert evaluation["4 bits"]["nats_per_token"] < evaluation["bfloat16"]["nats_per_token"] + 0.1
    for comparison in evaluation["mlx_lm against transformers"].values():
        assert comparison["top_1_agreement"] > 0.98


def test_samples_do_not_quote(evaluation):
    assert evaluation["verbatim overlap"]["temperature 0.8"]["mean_longest_run"] <= 12
