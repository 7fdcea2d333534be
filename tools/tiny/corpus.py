"""Rows of token ids for training: windows of plain text, and scenes rewritten as chats."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import numpy as np
from tokenizers import Tokenizer

INSTRUCTIONS = (
    "Continue the play.",
    "Write a scene.",
    "Tell me a story.",
    "Let {speaker} speak.",
    "What does {speaker} say?",
    "Write a speech for {speaker}.",
    "Hello! Who speaks first?",
)
"""User turns without text of a play; `{speaker}` becomes the name of the next speaker."""

SYSTEM = ("You are an actor.", "Continue the play.", "You are a helpful assistant.")


def split_corpus(text: str, held_out: float = 0.1) -> tuple[str, str]:
    """Cut off the last part of the text, at the first empty line after `1 - held_out` of its characters."""
    cut = text.index("\n\n", int(len(text) * (1.0 - held_out))) + 2
    return text[:cut], text[cut:]


class Corpus:
    """Speeches (blocks between empty lines), each a list of lines, each line a list of token ids with its line break.

    No token spans a line break, so joining the lines gives the tokens of the joined text.
    """

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self.texts = [block.split("\n") for block in text.strip("\n").split("\n\n") if block.strip()]
        self.tokenizer = tokenizer
        self.line_break = tokenizer.encode("\n").ids
        self.speeches: list[list[list[int]]] = []
        self.stream = np.zeros(0, np.int64)

    def encode(self, dropout: float) -> None:
        """Tokenise everything anew. With BPE dropout each call splits the words in another way."""
        self.tokenizer.model.dropout = dropout if dropout > 0 else None
        lines = [line for speech in self.texts for line in speech]
        encoded = iter([encoding.ids for encoding in self.tokenizer.encode_batch(lines)])
        self.tokenizer.model.dropout = None
        self.speeches = [[next(encoded) + self.line_break for _ in speech] for speech in self.texts]
        stream: list[int] = []
        for speech in self.speeches:
            for line in speech:
                stream += line
            stream += self.line_break
        self.stream = np.asarray(stream, np.int64)


class RowSampler:
    """Draws rows of a fixed length: with probability `chat_share` packed chats, else a window at a random offset."""

    def __init__(self, corpus: Corpus, seed: int, chat_share: float) -> None:
        self.corpus = corpus
        self.rng = np.random.default_rng(seed)
        self.chat_share = chat_share
        self.special = {
            token: corpus.tokenizer.token_to_id(token)
            for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>")
        }

    def rows(self, count: int, length: int) -> np.ndarray:
        """int64 `[count, length]`."""
        return np.stack(
            [self._chats(length) if self.rng.random() < self.chat_share else self._window(length) for _ in range(count)]
        )

    def _window(self, length: int) -> np.ndarray:
        start = self.rng.integers(len(self.corpus.stream) - length)
        return self.corpus.stream[start : start + length]

    def _chats(self, length: int) -> np.ndarray:
        ids: list[int] = []
        while len(ids) < length:
            for turn in self._dialogue():
                ids += turn
            ids.append(self.special["<|endoftext|>"])
        return np.asarray(ids[:length], np.int64)

    def _words(self, text: str) -> list[int]:
        return self.corpus.tokenizer.encode(text).ids

    def _turn(self, role: str, content: list[int]) -> list[int]:
        start, end = self.special["<|im_start|>"], self.special["<|im_end|>"]
        return [start, *self._words(role + "\n"), *content, end, *self.corpus.line_break]

    def _answer(self, content: list[int], thinking: bool) -> list[int]:
        if not thinking:
            return self._turn("assistant", content)
        line_break = self.corpus.line_break
        block = [self.special["<think>"], *line_break, *line_break, self.special["</think>"], *line_break, *line_break]
        return self._turn("assistant", block + content)

    def _dialogue(self) -> Iterator[list[int]]:
        """One to three question-answer pairs over consecutive speeches; only the last answer has a thinking block."""
        speeches = self.corpus.speeches
        at = int(self.rng.integers(len(speeches) - 32))
        if self.rng.random() < 0.15:
            yield self._turn("system", self._words(str(self.rng.choice(SYSTEM))))
        pairs = int(self.rng.choice([1, 1, 1, 1, 2, 3]))
        for pair in range(pairs):
            lines = speeches[at]
            kind = self.rng.random()
            if kind < 0.3:  # An instruction; the answer is the whole speech.
                speaker = self.corpus.texts[at][0].rstrip(":")
                user = self._words(str(self.rng.choice(INSTRUCTIONS)).format(speaker=speaker))
                answer = [token for line in lines for token in line]
            elif kind < 0.8:  # The first lines of a speech (often only the speaker's name); the answer goes on.
                cut = min(int(self.rng.choice([1, 2, 3])), len(lines) - 1)
                user = [token for line in lines[:cut] for token in line][:-1]
                answer = [token for line in lines[cut:] for token in line]
            else:  # A whole speech; the answer is the next one.
                user = [token for line in lines for token in line][:-1]
                at += 1
                answer = [token for line in speeches[at] for token in line]
            if not user:
                user = self._words("Continue the play.")
            at += 1
            for _ in range(int(self.rng.choice([1, 2, 4, 6, 9])) if pairs == 1 else 0):
                answer = answer + self.corpus.line_break + [token for line in speeches[at] for token in line]
                at += 1
            yield self._turn("user", user)
            yield self._answer(answer[:-1], thinking=pair == pairs - 1)


ROW_SHAPES = ((64, 257), (32, 513), (8, 2049))
"""Batches (rows, tokens + 1), each of 16,384 predicted tokens."""
ROW_SHARES = (0.55, 0.35, 0.1)


class Batches:
    """Batches made by a process of its own, so that the training loop only launches kernels.

    Every pass over the corpus is tokenised anew: with BPE dropout at first, without it for the last `settle` share of
    the steps. The sequence depends on the seed only, unless the caller moves `progress` ahead of the step count.
    """

    def __init__(
        self, corpus: Corpus, seed: int, steps: int, bpe_dropout: float, settle: float, chat_share: float, divisor: int
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.progress = context.Value("d", 0.0)
        self.queue: Any = context.Queue(maxsize=8)
        arguments = (self.queue, self.progress, corpus, seed, steps, bpe_dropout, settle, chat_share, divisor)
        self.process = context.Process(target=_produce, args=arguments, daemon=True)
        self.process.start()

    def next(self) -> np.ndarray:
        """int64 `[rows, tokens + 1]`."""
        return self.queue.get(timeout=120)

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.join()


def _produce(
    queue: Any,
    progress: Any,
    corpus: Corpus,
    seed: int,
    steps: int,
    bpe_dropout: float,
    settle: float,
    chat_share: float,
    divisor: int,
) -> None:
    sampler = RowSampler(corpus, seed, chat_share)
    shapes = np.random.default_rng(seed + 1)
    step = left = 0
    while True:
        if left <= 0:
            done = max(step / steps, progress.value)
            corpus.encode(bpe_dropout if done < 1.0 - settle else 0.0)
            left = len(corpus.stream)
        rows, length = ROW_SHAPES[shapes.choice(len(ROW_SHAPES), p=ROW_SHARES)]
        batch = sampler.rows(max(1, rows // divisor), length)
        left -= batch.size
        step += 1
        queue.put(batch)
