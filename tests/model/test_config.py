"""`ModelConfig`: what it reads from config.json, and how it names what it does not support."""

from __future__ import annotations

import json

import pytest

from lily_mlx.model import ModelConfig, read_config

from . import synthetic


def test_reads_every_field():
    config = ModelConfig.from_dict(synthetic.config())
    assert (config.hidden_size, config.layers, config.vocab_size) == (128, 4, 320)
    assert (config.experts, config.top_k, config.expert_size) == (8, 2, 64)
    assert (config.attention.query_heads, config.attention.kv_heads, config.attention.head_dim) == (2, 1, 256)
    assert (config.attention.rotary_dim, config.attention.rope_theta) == (64, 1e7)
    assert config.deltanet.channels == 2 * 128 + 2 * 128
    assert [config.is_attention(i) for i in range(4)] == [False, False, False, True]


def test_text_config_reads_alike():
    flat = synthetic.config()
    quantization = flat.pop("quantization")
    text = {**flat, "model_type": "qwen3_5_moe_text"}
    nested = {
        "model_type": "qwen3_5_moe",
        "eos_token_id": 0,
        "quantization": quantization,
        "text_config": text,
    }
    assert ModelConfig.from_dict(nested) == ModelConfig.from_dict({**flat, "quantization": quantization})


@pytest.mark.parametrize(
    "spelling",
    [
        pytest.param({"rope_parameters": None, "rope_theta": 1e7, "partial_rotary_factor": 0.25}, id="top-level"),
        pytest.param({"rope_parameters": {"rope_theta": 1e7, "type": "default"}}, id="factor-by-default"),
        pytest.param({"rope_parameters": {"partial_rotary_factor": 0.25}, "rope_theta": 1e7}, id="mixed"),
    ],
)
def test_rope_spellings_read_alike(spelling):
    assert ModelConfig.from_dict(synthetic.config(**spelling)).attention == (
        ModelConfig.from_dict(synthetic.config()).attention
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"head_dim": 100}, "head_dim 100", id="head-size"),
        pytest.param({"linear_key_head_dim": 96}, "key_dim", id="deltanet-head-size"),
        pytest.param({"linear_conv_kernel_dim": 5}, "conv_kernel", id="convolution"),
        pytest.param({"num_attention_heads": 3, "num_key_value_heads": 2}, "query_heads 3", id="heads"),
        pytest.param({"hidden_size": 100}, "hidden_size is 100", id="hidden"),
        pytest.param({"hidden_size": None}, "hidden_size is null", id="missing"),
        pytest.param({"num_experts": 0}, "intermediate_size is null", id="dense-model"),
        pytest.param({"num_experts": -1}, "num_experts is -1", id="experts"),
        pytest.param({"num_experts_per_tok": 9}, "num_experts_per_tok is 9", id="top-k"),
        pytest.param({"shared_expert_intermediate_size": 128}, "shared_expert_intermediate_size", id="shared-expert"),
        pytest.param({"hidden_act": "gelu"}, 'hidden_act is "gelu"', id="activation"),
        pytest.param({"attention_bias": True}, "attention_bias is true", id="bias"),
        pytest.param({"attn_output_gate": False}, "attn_output_gate", id="output-gate"),
        pytest.param({"mlp_only_layers": [1]}, "mlp_only_layers", id="dense-layers"),
        pytest.param({"layer_types": ["full_attention"] * 4}, "layer_types", id="layer-types"),
        pytest.param({"rope_parameters": {"rope_theta": 1e7, "rope_type": "yarn"}}, "yarn", id="rope-scaling"),
        pytest.param({"rope_parameters": None}, "rope_theta is null", id="no-theta"),
        pytest.param(
            {"quantization": None, "quantization_config": {"quant_method": "fp8"}}, "fp8", id="foreign-quantisation"
        ),
        pytest.param(
            {"quantization": {"bits": 4, "group_size": 64, "lm_head": {"mode": "mxfp4"}}},
            "lm_head.mode",
            id="quantisation-mode-of-a-layer",
        ),
        pytest.param({"quantization": {"mode": "mxfp4", "bits": 4}}, "mxfp4", id="quantisation-mode"),
        pytest.param({"eos_token_id": "stop"}, "eos_token_id", id="eos"),
        pytest.param({"model_type": "llama"}, "'llama'", id="family"),
    ],
)
def test_names_what_is_not_supported(changes, words):
    with pytest.raises(ValueError, match=r"supported|must|is not") as error:
        ModelConfig.from_dict(synthetic.config(**changes))
    assert words in str(error.value)


def test_names_every_problem_at_once():
    with pytest.raises(ValueError, match="hidden_act") as error:
        ModelConfig.from_dict(synthetic.config(hidden_act="gelu", attention_bias=True, vocab_size=-1))
    assert "attention_bias" in str(error.value)
    assert "vocab_size is -1" in str(error.value)


@pytest.mark.parametrize(
    ("config_value", "generation", "want"),
    [
        pytest.param(260, None, (260,), id="int"),
        pytest.param([258, 260], None, (258, 260), id="list"),
        pytest.param(260, '{"eos_token_id": [258, 260]}', (258, 260), id="generation-list"),
        pytest.param(260, '{"eos_token_id": 258}', (258,), id="generation-int"),
        pytest.param(260, '{"eos_token_id": null}', (260,), id="generation-null"),
        pytest.param(260, "{broken", (260,), id="generation-broken"),
        pytest.param(None, None, (), id="absent"),
    ],
)
def test_eos_token_ids(tmp_path, config_value, generation, want):
    (tmp_path / "config.json").write_text(json.dumps(synthetic.config(eos_token_id=config_value)))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(generation)
    assert ModelConfig.from_dict(read_config(tmp_path)).eos_token_ids == want


@pytest.mark.parametrize(
    ("text", "kind"),
    [(None, FileNotFoundError), ("{", ValueError), ("[]", ValueError)],
    ids=["missing", "broken", "not-an-object"],
)
def test_unreadable_config(tmp_path, text, kind):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(kind, match=r"config\.json"):
        read_config(tmp_path)
