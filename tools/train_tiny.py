"""Train the bundled checkpoint: `python -m tools.train_tiny CORPUS OUTPUT`.

The corpus is the well-known tiny Shakespeare text (1,115,394 characters of the plays, public domain), widely
mirrored as `tinyshakespeare/input.txt`. Its last tenth is held out: neither the tokenizer nor the model sees it.
Needs torch and transformers; a CUDA device trains in a few minutes, a CPU is enough for a trial (`--steps 5`).

The shipped checkpoint was made with the commands in its model card, `lily_mlx/checkpoints/tiny/README.md`:
train, convert (`mlx_lm.convert`, 4 bits), then `tools.evaluate_tiny` for the figures.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from tools.tiny.architecture import MAX_LENGTH, save_checkpoint, text_config
from tools.tiny.corpus import Corpus, split_corpus
from tools.tiny.tokenizer import padded_vocabulary, save_tokenizer, train_tokenizer
from tools.tiny.training import Recipe, build_model, train


def main(arguments: list[str] | None = None) -> None:
    """Write a Hugging Face checkpoint in bfloat16, `heldout.txt` and `training.json` into the output folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="path of the tiny Shakespeare text")
    parser.add_argument("output", type=Path, help="folder for the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=60.0, help="shorten the schedule to fit this time")
    for field in fields(Recipe):
        kind = type(field.default)
        parser.add_argument("--" + field.name.replace("_", "-"), type=kind, default=field.default)
    options = parser.parse_args(arguments)
    recipe = Recipe(**{field.name: getattr(options, field.name) for field in fields(Recipe)})
    device = torch.device(options.device).type

    text = options.corpus.read_text(encoding="utf-8")
    training, held_out = split_corpus(text)
    tokenizer = train_tokenizer(training)
    config = text_config(
        padded_vocabulary(tokenizer),
        {token: tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")},
        recipe.layers,
    )
    # The first half of the held-out text chooses the checkpoint; the second half decides nothing.
    validation = np.asarray(tokenizer.encode(split_corpus(held_out, 0.5)[0]).ids, np.int64)
    corpus = Corpus(training, tokenizer)
    model = build_model(config, recipe, device)
    weights, curve, summary = train(model, corpus, validation, recipe, device, options.minutes)
    model.load_state_dict(weights, strict=False)
    model.config.attention_dropout = 0.0

    save_checkpoint(model, options.output)
    save_tokenizer(tokenizer, options.output, MAX_LENGTH)
    (options.output / "heldout.txt").write_text(held_out, encoding="utf-8")
    summary["device"] = torch.cuda.get_device_name() if device == "cuda" else device
    summary["torch"] = torch.__version__
    summary["parameters"] = sum(p.numel() for p in model.parameters())
    summary["curve"] = curve
    (options.output / "training.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print({key: value for key, value in summary.items() if key != "curve"}, flush=True)


if __name__ == "__main__":
    main()
