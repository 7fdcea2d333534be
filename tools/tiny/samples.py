"""Sample texts and the longest passage that they share with the training text."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import batch_generate
from mlx_lm.sample_utils import make_sampler

PROMPTS = (
    "ROMEO:",
    "JULIET:\nO ",
    "KING RICHARD III:",
    "First Citizen:",
    "Tell me a story.",
    "GLOUCESTER:\nNow",
    "Hello! Who are you?",
    "DUKE VINCENTIO:",
    "The king is dead.",
    "ISABELLA:\nI would to heaven",
    "Write a scene.",
    "PETRUCHIO:",
    "What news from Rome?",
    "MENENIUS:",
    "Speak of love.",
    "LADY ANNE:",
    "QUEEN MARGARET:\nWhat",
    "CORIOLANUS:",
    "A storm at sea.",
    "PROSPERO:",
)


class Overlap:
    """Longest runs of tokens that also occur, unbroken, in the training text."""

    def __init__(self, training_ids: list[int]) -> None:
        # One character a token, so that a substring search finds runs of tokens.
        self.text = "".join(chr(0x4000 + token) for token in training_ids)

    def longest(self, ids: list[int]) -> tuple[int, int]:
        """Length and start of the longest run of `ids` that the training text contains."""
        text = "".join(chr(0x4000 + token) for token in ids)
        best, at, start = 0, 0, 0
        for start in range(len(text)):
            while start + best < len(text) and text[start : start + best + 1] in self.text:
                best, at = best + 1, start
        return best, at


def sample(model: Any, tokenizer: Any, temperature: float, max_tokens: int, seed: int) -> list[list[int]]:
    """Token ids of one answer to each prompt in the chat format with thinking off."""
    mx.random.seed(seed)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, enable_thinking=False
        )
        for prompt in PROMPTS
    ]
    sampler = make_sampler(temp=temperature)
    texts = batch_generate(model, tokenizer, prompts, max_tokens=max_tokens, sampler=sampler).texts
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def overlap_report(samples: list[list[int]], tokenizer: Any, overlap: Overlap) -> dict[str, Any]:
    """Longest shared run of each sample, in tokens: mean, largest, and the text of the largest."""
    runs = [overlap.longest(ids) for ids in samples]
    lengths = [length for length, _ in runs]
    worst = int(np.argmax(lengths))
    length, at = runs[worst]
    return {
        "samples": len(samples),
        "tokens": sum(len(ids) for ids in samples),
        "mean_longest_run": float(np.mean(lengths)),
        "longest_run": length,
        "longest_run_text": tokenizer.decode(samples[worst][at : at + length]),
    }
