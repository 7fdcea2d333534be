"""Sizes of the family's published models, as their config.json has them, where they differ from Qwen3.6-35B-A3B."""

from __future__ import annotations

from typing import Any

_HEADS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 248_320,
    "max_position_embeddings": 262_144,
}
_NO_EXPERTS = {
    "num_experts": None,
    "num_experts_per_tok": None,
    "moe_intermediate_size": None,
    "shared_expert_intermediate_size": None,
}


def _dense(hidden: int, intermediate: int, query_heads: int, value_heads: int, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5",
        **_HEADS,
        **_NO_EXPERTS,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": query_heads,
        "linear_num_value_heads": value_heads,
        **changes,
    }


def _experts(hidden: int, size: int, count: int, top_k: int, query_heads: int, value_heads: int) -> dict[str, Any]:
    return {
        **_HEADS,
        "num_key_value_heads": 2,
        "hidden_size": hidden,
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": size,
        "num_experts": count,
        "num_experts_per_tok": top_k,
        "num_attention_heads": query_heads,
        "linear_num_value_heads": value_heads,
    }


_SMALL = {"num_key_value_heads": 2, "tie_word_embeddings": True}
FAMILY: dict[str, dict[str, Any]] = {
    "Qwen3.5-397B-A17B": _experts(4096, 1024, 512, 10, 32, 64),
    "Qwen3.5-122B-A10B": _experts(3072, 1024, 256, 8, 32, 64),
    "Qwen3-Next-80B-A3B": {
        **_experts(2048, 512, 512, 10, 16, 32),
        "model_type": "qwen3_next",
        "vocab_size": 151_936,
        "intermediate_size": 5120,
    },
    "Qwen3.6-27B": _dense(5120, 17_408, 24, 48),
    "Qwen3.5-9B": _dense(4096, 12_288, 16, 32),
    "Qwen3.5-4B": _dense(2560, 9216, 16, 32, tie_word_embeddings=True),
    "Qwen3.5-2B": _dense(2048, 6144, 8, 16, **_SMALL),
    "Qwen3.5-0.8B": _dense(1024, 3584, 8, 16, **_SMALL),
}
