"""Figures of the model card: `python -m tools.tiny.evaluate CORPUS HF_FOLDER MLX_FOLDER`.

Writes `evaluation.json` and `README.md` into the MLX folder and copies `heldout.txt` and `training.json` there.
Needs torch, transformers and mlx_lm.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import dequantize_model, load_model

from .corpus import split_corpus
from .model_card import write_model_card
from .perplexity import agreement, perplexities, with_mlx, with_transformers, with_transformers_quantized
from .samples import PROMPTS, Overlap, overlap_report, sample

AGREEMENT_TOKENS = 2048
SAMPLE_TOKENS = 160


def main(arguments: list[str] | None = None) -> None:
    """Evaluate both checkpoints and write the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("hf_folder", type=Path, help="bfloat16 checkpoint that train_tiny wrote")
    parser.add_argument("mlx_folder", type=Path, help="its conversion to 4 bits")
    options = parser.parse_args(arguments)
    training, held_out = split_corpus(options.corpus.read_text(encoding="utf-8"))
    for name in ("heldout.txt", "training.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"):
        shutil.copyfile(options.hf_folder / name, options.mlx_folder / name)

    tokenizer = load_tokenizer(options.mlx_folder)
    figures = {
        "bfloat16": with_transformers(options.hf_folder),
        "4 bits": with_transformers_quantized(options.hf_folder, options.mlx_folder),
    }
    result: dict[str, Any] = {name: perplexities(logits, tokenizer, held_out) for name, logits in figures.items()}
    print(json.dumps(result, indent=2), flush=True)
    ids = np.asarray(tokenizer.encode(held_out, add_special_tokens=False)[:AGREEMENT_TOKENS], np.int64)
    result["mlx_lm against transformers"] = {
        "4-bit weights, float32 activations": agreement(with_mlx(options.mlx_folder), figures["4 bits"], ids),
        "bfloat16 weights, float32 activations": agreement(with_mlx(options.hf_folder), figures["bfloat16"], ids),
    }
    print(json.dumps(result["mlx_lm against transformers"], indent=2), flush=True)

    quantized = dequantize_model(load_model(options.mlx_folder)[0])
    quantized.set_dtype(mx.float32)
    overlap = Overlap(tokenizer.encode(training, add_special_tokens=False))
    greedy = sample(quantized, tokenizer, 0.0, SAMPLE_TOKENS, seed=1)
    warm = [sample(quantized, tokenizer, 0.8, SAMPLE_TOKENS, seed=1)]
    # Shakespeare repeats himself too: the held-out text cut into pieces of the same length.
    own = [ids.tolist() for ids in np.array_split(tokenizer.encode(held_out, add_special_tokens=False), 300)]
    result["verbatim overlap"] = {
        "greedy": overlap_report(greedy, tokenizer, overlap),
        "temperature 0.8": overlap_report([ids for group in warm for ids in group], tokenizer, overlap),
        "held-out text itself": overlap_report(own, tokenizer, overlap),
    }
    result["samples"] = [
        {"prompt": prompt, "greedy": tokenizer.decode(g), "temperature 0.8": tokenizer.decode(w)}
        for prompt, g, w in zip(PROMPTS, greedy, warm[0], strict=True)
    ]
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    (options.mlx_folder / "evaluation.json").write_text(text, encoding="utf-8")
    print(json.dumps(result["verbatim overlap"], indent=2))
    write_model_card(options.mlx_folder)


if __name__ == "__main__":
    main()
