"""The full-size model, Qwen3.6-35B-A3B, by its published configuration."""

from __future__ import annotations

from typing import Any

QUANTIZATION = {"group_size": 64, "bits": 4, "mode": "affine"}
ROUTER_QUANTIZATION = {"group_size": 64, "bits": 8, "mode": "affine"}
LAYERS = 40


def configuration(layers: int = LAYERS) -> dict[str, Any]:
    """config.json of the 4-bit MLX checkpoint (text model), optionally with fewer layers."""
    routers = {
        f"language_model.model.layers.{i}.mlp.{name}": dict(ROUTER_QUANTIZATION)
        for i in range(layers)
        for name in ("gate", "shared_expert_gate")
    }
    quantization = {**QUANTIZATION, **routers}
    return {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "eos_token_id": [248046, 248044],
        "quantization": quantization,
        "quantization_config": quantization,
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 2048,
            "num_hidden_layers": layers,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "attn_output_gate": True,
            "attention_bias": False,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-6,
            "vocab_size": 248320,
            "tie_word_embeddings": False,
            "max_position_embeddings": 262144,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000_000,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
            },
        },
    }
