"""Configuration of the bundled model: Qwen3.5/3.6-MoE with its real head sizes and everything else small."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet, Qwen3_5MoeRMSNorm

MAX_LENGTH = 32768
"""Context length that the configuration declares. Training used up to 2,048 tokens."""


def text_config(vocabulary: int, token_ids: dict[str, int], layers: int = 4) -> Qwen3_5MoeTextConfig:
    """Head sizes, head ratios, convolution, layer pattern and gates are those of Qwen3.6-35B-A3B.

    `token_ids` maps `<|endoftext|>` and `<|im_end|>` to their ids.
    """
    return Qwen3_5MoeTextConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        tie_word_embeddings=False,
        attn_output_gate=True,
        full_attention_interval=4,
        dtype="bfloat16",
        eos_token_id=[token_ids["<|im_end|>"], token_ids["<|endoftext|>"]],
        pad_token_id=token_ids["<|endoftext|>"],
        bos_token_id=None,
    )


def save_checkpoint(model: Qwen3_5MoeForCausalLM, folder: Path) -> None:
    """Write bfloat16 weights and a `config.json` with the text part under `text_config`, as Qwen's own checkpoints do.

    RMSNorm weights are stored as `w` and used as `1 + w`; converters store the sum in bfloat16. They are snapped
    to values for which that sum is exact, so the conversion loses nothing. `A_log` is a float32 array (as in
    Qwen's files) of bfloat16 values, so that a bfloat16 model reads the same numbers.
    """
    model = copy.deepcopy(model).to("cpu", torch.bfloat16)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Qwen3_5MoeGatedDeltaNet):
                module.A_log.data = module.A_log.data.float()
            if isinstance(module, Qwen3_5MoeRMSNorm):
                module.weight.copy_((1.0 + module.weight.float()).bfloat16().float() - 1.0)
    # Qwen's files hold the experts of a layer in joined arrays, as the class does in memory.
    model.save_pretrained(folder, save_original_format=False)
    (folder / "model.safetensors").chmod(0o644)
    path = folder / "config.json"
    text = json.loads(path.read_text(encoding="utf-8"))
    nested = {
        "architectures": text.pop("architectures"),
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "eos_token_id": text["eos_token_id"],
        "pad_token_id": text["pad_token_id"],
        "transformers_version": text.pop("transformers_version"),
        "text_config": text,
    }
    path.write_text(json.dumps(nested, indent=2) + "\n", encoding="utf-8")
