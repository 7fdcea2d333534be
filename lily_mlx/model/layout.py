"""The tensors that a checkpoint of the family must hold, with their shapes, by canonical name."""

from __future__ import annotations

from .config import ModelConfig

Shape = tuple[int, ...]


def linear_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Path of every weight that may be quantised, and its dense shape [..., N, K].

    Each stands for three tensors: `<path>.weight`, `<path>.scales` and `<path>.biases`; or for the first alone.
    """
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"embed_tokens": (config.vocab_size, hidden)}
    for i in range(config.layers):
        mixer = _attention_linears(config) if config.is_attention(i) else _deltanet_linears(config)
        mlp = _mlp_linears(config) if i in config.dense_layers else _moe_linears(config)
        shapes |= {f"layers.{i}.{path}": shape for path, shape in {**mixer, **mlp}.items()}
    if not config.tied:
        shapes["lm_head"] = (config.vocab_size, hidden)
    return shapes


def plain_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every tensor that is never quantised: norms, convolutions and decay parameters."""
    hidden, attention, deltanet = config.hidden_size, config.attention, config.deltanet
    shapes: dict[str, Shape] = {"norm.weight": (hidden,)}
    for i in range(config.layers):
        layer = f"layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if config.is_attention(i):
            shapes[f"{layer}.self_attn.q_norm.weight"] = (attention.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (attention.head_dim,)
        else:
            shapes[f"{layer}.linear_attn.conv1d.weight"] = (deltanet.channels, deltanet.conv_kernel, 1)
            shapes[f"{layer}.linear_attn.A_log"] = (deltanet.value_heads,)
            shapes[f"{layer}.linear_attn.dt_bias"] = (deltanet.value_heads,)
            shapes[f"{layer}.linear_attn.norm.weight"] = (deltanet.value_dim,)
    return shapes


def _attention_linears(config: ModelConfig) -> dict[str, Shape]:
    hidden, shape = config.hidden_size, config.attention
    queries, keys = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "self_attn.q_proj": (2 * queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
    }


def _deltanet_linears(config: ModelConfig) -> dict[str, Shape]:
    hidden, shape = config.hidden_size, config.deltanet
    values = shape.value_heads * shape.value_dim
    if config.interleaves_heads:
        return {
            "linear_attn.in_proj_qkvz": (shape.channels + values, hidden),
            "linear_attn.in_proj_ba": (2 * shape.value_heads, hidden),
            "linear_attn.out_proj": (hidden, values),
        }
    return {
        "linear_attn.in_proj_qkv": (shape.channels, hidden),
        "linear_attn.in_proj_z": (values, hidden),
        "linear_attn.in_proj_b": (shape.value_heads, hidden),
        "linear_attn.in_proj_a": (shape.value_heads, hidden),
        "linear_attn.out_proj": (hidden, values),
    }


def _mlp_linears(config: ModelConfig) -> dict[str, Shape]:
    hidden, size = config.hidden_size, config.mlp_size
    return {"mlp.gate_proj": (size, hidden), "mlp.up_proj": (size, hidden), "mlp.down_proj": (hidden, size)}


def _moe_linears(config: ModelConfig) -> dict[str, Shape]:
    hidden, experts, size = config.hidden_size, config.experts, config.expert_size
    return {
        "mlp.gate": (experts, hidden),
        "mlp.shared_expert_gate": (1, hidden),
        "mlp.switch_mlp.gate_proj": (experts, size, hidden),
        "mlp.switch_mlp.up_proj": (experts, size, hidden),
        "mlp.switch_mlp.down_proj": (experts, hidden, size),
        "mlp.shared_expert.gate_proj": (size, hidden),
        "mlp.shared_expert.up_proj": (size, hidden),
        "mlp.shared_expert.down_proj": (hidden, size),
    }


def interleaved_rows(config: ModelConfig) -> tuple[list[int], list[int]]:
    """Where the rows q | k | v | z and b | a of a Qwen3-Next checkpoint's two joined projections stand in them.

    Each of the key heads has its q, k, v and z rows together, and its b and a rows (`fix_query_key_value_ordering`
    of mlx_lm's model).
    """
    shape = config.deltanet
    heads, group = shape.key_heads, shape.value_heads // shape.key_heads
    values = group * shape.value_dim
    wide = _gathered(heads, (shape.key_dim, shape.key_dim, values, values))
    return wide, _gathered(heads, (group, group))


def _gathered(heads: int, parts: tuple[int, ...]) -> list[int]:
    """Rows of `heads` blocks of some parts each, ordered by part and then by head."""
    block, rows, start = sum(parts), [], 0
    for part in parts:
        rows += [head * block + start + row for head in range(heads) for row in range(part)]
        start += part
    return rows
