"""Held-out perplexity, and agreement of mlx_lm with transformers on the same weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import dequantize_model, load_model
from transformers import Qwen3_5MoeForCausalLM

from .training import use_dense_experts

WINDOW = 512
PART_TOKENS = 8192
"""Tokens that are scored of each half of the held-out text."""
SLICE_TOKENS = 256
"""Tokens at the start of the held-out text that make the short figure, which the tests repeat with mlx_lm."""

Logits = Callable[[np.ndarray], np.ndarray]
"""Token ids int64 `[rows, tokens]` to logits float32 `[rows, tokens, vocabulary]`."""


def with_mlx(folder: Path, dtype: str = "float32") -> Logits:
    """mlx_lm's model; 4-bit weights are dequantised, since quantised products are slow on a CPU."""
    model = dequantize_model(load_model(folder)[0])
    model.set_dtype(getattr(mx, dtype))
    return lambda ids: np.array(model(mx.array(ids)).astype(mx.float32))


def with_transformers(folder: Path, dtype: str = "float32") -> Logits:
    """The model of transformers, for the checkpoint before the conversion."""
    model = Qwen3_5MoeForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    use_dense_experts(model)
    return lambda ids: _torch_logits(model, ids)


def with_transformers_quantized(folder: Path, converted: Path) -> Logits:
    """The model of transformers in float32 with the dequantised weights of the converted checkpoint."""
    model = Qwen3_5MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    use_dense_experts(model)
    quantized = dequantize_model(load_model(converted)[0])
    quantized.set_dtype(mx.float32)
    from mlx.utils import tree_flatten

    source = {
        name.removeprefix("language_model."): np.array(value) for name, value in tree_flatten(quantized.parameters())
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("experts.gate_up_proj"):
                stem = name.replace("experts.gate_up_proj", "switch_mlp.")
                gate, up = source.pop(stem + "gate_proj.weight"), source.pop(stem + "up_proj.weight")
                value = np.concatenate([gate, up], axis=1)
            elif name.endswith("experts.down_proj"):
                value = source.pop(name.replace("experts.down_proj", "switch_mlp.down_proj.weight"))
            else:
                value = source.pop(name)
            if "conv1d" in name:
                value = np.moveaxis(value, 2, 1)
            if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
                value = value - 1.0
            parameter.copy_(torch.from_numpy(value.reshape(parameter.shape)))
    assert not source, f"unused: {sorted(source)}"
    return lambda ids: _torch_logits(model, ids)


@torch.no_grad()
def _torch_logits(model: Qwen3_5MoeForCausalLM, ids: np.ndarray) -> np.ndarray:
    return model(torch.from_numpy(ids.astype(np.int64)), use_cache=False).logits.float().numpy()


def token_losses(logits_of: Logits, ids: np.ndarray) -> np.ndarray:
    """Nats of every token of `ids` but the first, float64 `[n * 512]`, in windows of 512 without overlap.

    Up to 511 tokens at the end are left out.
    """
    count = (len(ids) - 1) // WINDOW
    inputs = ids[: count * WINDOW].reshape(count, WINDOW)
    targets = ids[1 : count * WINDOW + 1].reshape(count, WINDOW, 1)
    losses = []
    for x, y in zip(inputs, targets, strict=True):
        logits = logits_of(x[None])[0].astype(np.float64)
        losses.append(np.logaddexp.reduce(logits, axis=-1) - np.take_along_axis(logits, y, axis=-1)[:, 0])
    return np.concatenate(losses)


def perplexities(logits_of: Logits, tokenizer: Any, text: str) -> dict[str, float]:
    """Perplexity over the first 8,192 tokens of each half of `text`.

    The second half has had no part in choosing the checkpoint. Characters are those of the scored tokens.
    """
    half = text.index("\n\n", len(text) // 2) + 2
    result: dict[str, float] = {}
    sums = []
    for name, part in (("first", text[:half]), ("second", text[half:])):
        ids = np.asarray(tokenizer.encode(part, add_special_tokens=False)[: PART_TOKENS + 1], np.int64)
        losses = token_losses(logits_of, ids)
        characters = len(tokenizer.decode(ids[1 : len(losses) + 1].tolist()))
        sums.append((losses.sum(), len(losses), characters))
        result |= _figures(name + "_half_", *sums[-1])
        if name == "first":
            result["slice_nats_per_token"] = float(losses[:SLICE_TOKENS].mean())
    return _figures("", *(sum(values) for values in zip(*sums, strict=True))) | result


def _figures(prefix: str, nats: float, tokens: int, characters: int) -> dict[str, float]:
    return {
        prefix + "tokens": int(tokens),
        prefix + "characters": int(characters),
        prefix + "nats_per_token": float(nats / tokens),
        prefix + "perplexity_per_token": math.exp(nats / tokens),
        prefix + "perplexity_per_character": math.exp(nats / characters),
        prefix + "bits_per_character": float(nats / characters / math.log(2)),
    }


def agreement(ours: Logits, theirs: Logits, ids: np.ndarray) -> dict[str, float]:
    """Compare two sets of logits over windows of 512 tokens without overlap."""
    rows = ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)
    a, b = ours(rows).astype(np.float64), theirs(rows).astype(np.float64)
    log_p, log_q = (x - np.logaddexp.reduce(x, -1, keepdims=True) for x in (b, a))
    top = np.sort(b, -1)
    same = a.argmax(-1) == b.argmax(-1)
    clear = top[..., -1] - top[..., -2] > 0.05
    return {
        "positions": rows.size,
        "top_1_agreement": float(same.mean()),
        "top_1_agreement_where_clear": float(same[clear].mean()),
        "share_clear": float(clear.mean()),
        "largest_logit_difference": float(np.abs(a - b).max()),
        "mean_logit_difference": float(np.abs(a - b).mean()),
        "range_of_logits": float(b.max() - b.min()),
        "mean_divergence_nats": float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean()),
    }
