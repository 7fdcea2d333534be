"""`python -m compare.consistency`: the same text through both engines, teacher-forced.

Both engines get the same tokens and predict each next one. Identical tokens are the wrong measure: two right
implementations that round differently disagree at near ties, so each disagreement is shown with the gap
between the baseline's two best log-probabilities there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from . import results
from .arms import load_lily, load_mlx_lm, model_source, prompt

ARTICLE = {"perplexity_ratio": 1.0004, "top1_agreement": 0.9635, "positions": 192}

# The gate: our distance from mlx-lm computed in float32 is at most so many times the distance of mlx-lm's own
# bfloat16 from it. Rounding alone moves logits, and in a mixture of experts a near tie of the router moves them
# much, so a fixed limit would be loose for one model and tight for another.
MAX_ERROR_RATIO = 1.25


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def lily_logits(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """Float64 [n, V] logits of our engine at every position."""
    return np.array(model.logits(list(tokens))).astype(np.float64)


def mlx_lm_logits(model: Any, tokens: Sequence[int], chunk: int = 512) -> np.ndarray:
    """Float64 [n, V] logits of mlx-lm at every position, in chunks over one cache."""
    cache = model.make_cache()
    parts = []
    for start in range(0, len(tokens), chunk):
        logits = model(mx.array([list(tokens[start : start + chunk])]), cache=cache)[0].astype(mx.float32)
        parts.append(np.array(logits).astype(np.float64))
    return np.concatenate(parts)


def in_float32(model: Any) -> Any:
    """mlx-lm's model with its activations, scales and norms in float32; the codes stay as they are."""
    model.set_dtype(mx.float32)
    return model


def transformers_logits(directory: Path, tokens: Sequence[int]) -> np.ndarray:
    """Float64 [n, V] logits of transformers' torch model of a Hugging Face checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0].double().numpy()  # type: ignore[no-any-return]


def compare(ours: np.ndarray, theirs: np.ndarray, tokens: Sequence[int]) -> dict[str, float]:
    """Figures of two sets of logits over one text; `theirs` is the baseline."""
    a, b = log_softmax(ours), log_softmax(theirs)
    targets = np.asarray(tokens[1:])
    rows = np.arange(len(targets))
    perplexities = [float(np.exp(-x[rows, targets].mean())) for x in (a, b)]
    top2 = np.sort(b, axis=-1)[:, -2:]
    gaps = top2[:, 1] - top2[:, 0]
    differs = a.argmax(-1) != b.argmax(-1)
    at_disagreements = gaps[differs]
    spread = theirs.max() - theirs.min()
    return {
        "positions": len(tokens),
        "perplexity": perplexities[0],
        "baseline_perplexity": perplexities[1],
        "perplexity_ratio": perplexities[0] / perplexities[1],
        "top1_agreement": float(1 - differs.mean()),
        "gap_median": float(np.median(at_disagreements)) if differs.any() else 0.0,
        "gap_max": float(at_disagreements.max()) if differs.any() else 0.0,
        "gap_median_overall": float(np.median(gaps)),
        "logit_error": float(np.abs(ours - theirs).max() / spread),
    }


def root_mean_square(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def check(gate: results.Gate, ours: np.ndarray, theirs: np.ndarray, exact: np.ndarray) -> None:
    """Asks that our logits are as near to the float32 ones as the baseline's bfloat16 logits are."""
    own, baseline = root_mean_square(ours - exact), root_mean_square(theirs - exact)
    gate.at_most("root mean square error of logits / mlx-lm's own", own / baseline, MAX_ERROR_RATIO)
    gate.at_most("root mean square error of logits / their deviation", own / float(exact.std()), 0.5)


def text_tokens(model_name: str, positions: int, vocab_size: int) -> list[int]:
    """Held-out text of the bundled checkpoint; for random weights the contract's prompt."""
    directory = model_source(model_name)
    if directory is None:
        return prompt(positions, vocab_size)
    from mlx_lm.utils import load_tokenizer

    held_out = directory / "heldout.txt"
    if not held_out.exists():
        return prompt(positions, vocab_size)
    # A token stands for 2 or 3 characters; encoding all of a long text would warn about its length.
    tokens = load_tokenizer(directory).encode(held_out.read_text()[: 16 * positions])
    return list(tokens[:positions])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="compare.consistency", description=__doc__)
    parser.add_argument("--model", default="tiny", help="'tiny', 'synthetic' or a checkpoint directory")
    parser.add_argument("--positions", type=int, default=192)
    parser.add_argument("--transformers", type=Path, help="Hugging Face checkpoint of the same weights")
    parser.add_argument("--layers", type=int, help="fewer layers of the synthetic model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--no-write", action="store_true", help="do not write a result file")
    arguments = parser.parse_args(argv)
    model = load_lily(arguments.model, arguments.seed, arguments.layers)
    tokens = text_tokens(arguments.model, arguments.positions, model.config.vocab_size)
    ours = lily_logits(model, tokens)
    baseline = load_mlx_lm(arguments.model, arguments.seed, arguments.layers)
    theirs = mlx_lm_logits(baseline, tokens)
    exact = mlx_lm_logits(in_float32(baseline), tokens)
    rows = [
        {"engine": "lily_mlx", "baseline": "mlx_lm", **compare(ours, theirs, tokens)},
        {"engine": "lily_mlx", "baseline": "mlx_lm float32", **compare(ours, exact, tokens)},
        {"engine": "mlx_lm", "baseline": "mlx_lm float32", **compare(theirs, exact, tokens)},
    ]
    if arguments.transformers:
        torch_logits = transformers_logits(arguments.transformers, tokens)
        rows.append({"engine": "lily_mlx", "baseline": "transformers", **compare(ours, torch_logits, tokens)})
        rows.append({"engine": "mlx_lm", "baseline": "transformers", **compare(theirs, torch_logits, tokens)})
    gate = results.Gate()
    check(gate, ours, theirs, exact)
    if not arguments.no_write:
        path = results.write("consistency", rows, seed=arguments.seed, gate=gate, name=arguments.model, article=ARTICLE)
        print(f"wrote {path}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({key: rows[0][key] for key in rows[0] if key not in ("engine", "baseline")}))
    else:
        headings = ["engine", "baseline", "positions", "perplexity ratio", "top-1", "gap median", "gap max"]
        keys = [
            "engine",
            "baseline",
            "positions",
            "perplexity_ratio",
            "top1_agreement",
            "gap_median",
            "gap_max",
        ]
        print(results.table(headings, [[row[key] for key in keys] for row in rows]))
    gate.require_green()


if __name__ == "__main__":
    main()
