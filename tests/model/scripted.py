"""A checkpoint whose greedy output is a chosen text, cut at chosen token borders.

All output projections are zero, so the hidden vector is the last token's embedding, random +-1, which four
bits hold exactly. The head's row of each token is the embedding of the token before it in the script.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from . import synthetic
from .tokenizer import SPECIAL, write_tokenizer

EOS = "<|im_end|>"


def write_scripted(directory: Path, script: Sequence[str], after: str = "\n", template: bool = True) -> dict[str, int]:
    """Writes a checkpoint with its tokenizer.

    Args:
        script: pieces of text and special tokens, each at most once; the end-of-sequence token follows them.
        after: the one-byte token that the prompt ends with; the chat template's ends with a newline.
        template: whether the tokenizer has a chat template.

    Returns:
        Ids of the pieces and special tokens.
    """
    directory.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(directory, [piece for piece in script if piece not in SPECIAL], template)
    start = _byte_id(directory, after)
    order = [start, *(ids[piece] for piece in script), ids[EOS]]
    assert len(set(order)) == len(order), "each token may occur once in a script"

    settings = synthetic.config(eos_token_id=ids[EOS])
    model, complete = synthetic.random_model(settings)
    (directory / "config.json").write_text(json.dumps(complete))
    tensors = dict(tree_flatten(model.parameters()))
    for name, array in tensors.items():
        if any(f".{part}." in name for part in ("o_proj", "out_proj", "down_proj")):
            tensors[name] = mx.zeros_like(array)
    tensors["language_model.model.norm.weight"] = mx.ones(settings["hidden_size"], mx.bfloat16)
    shape = (settings["vocab_size"], settings["hidden_size"])
    embedding = 2.0 * mx.random.bernoulli(0.5, shape).astype(mx.float32) - 1.0
    head = mx.zeros(shape)
    for previous, following in itertools.pairwise(order):
        head[following] = embedding[previous]
    for path, dense in (("language_model.model.embed_tokens", embedding), ("language_model.lm_head", head)):
        for part, array in zip(("weight", "scales", "biases"), _quantize(dense), strict=True):
            tensors[f"{path}.{part}"] = array
    synthetic.write_tensors(directory, tensors)
    return ids


def _quantize(dense: mx.array) -> tuple[mx.array, ...]:
    codes = mx.quantize(dense.astype(mx.bfloat16), group_size=64, bits=4)
    assert mx.array_equal(mx.dequantize(*codes, group_size=64, bits=4), dense.astype(mx.bfloat16))
    return codes


def _byte_id(directory: Path, text: str) -> int:
    from transformers import PreTrainedTokenizerFast

    (token,) = PreTrainedTokenizerFast.from_pretrained(directory).encode(text)
    return token
