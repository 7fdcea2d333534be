"""The tokenizer of the bundled checkpoint: byte-level BPE, Qwen's special tokens, a chat template of our own."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

ORDINARY_TOKENS = 2000
"""Pieces that BPE learns, the 256 bytes included. The special tokens come after them."""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Added tokens that `skip_special_tokens` removes from decoded text, in the order of the Qwen vocabulary."""

VISIBLE_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Added tokens that stay in decoded text: a client must see them to find reasoning and tool calls."""

VOCABULARY_MULTIPLE = 64

PIECES = r" ?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|[\r\n]|[^\S\r\n]+(?=\s)|[^\S\r\n]+"
"""What BPE may merge within: a word or a run of punctuation with the space before it, one digit, one line break.

A line break is always a token of its own, so that text cut after any line break keeps its tokens when more text
follows. Every character belongs to one of the alternatives, so nothing is lost.
"""


def train_tokenizer(text: str, ordinary_tokens: int = ORDINARY_TOKENS) -> Tokenizer:
    """Learn the pieces from `text` (training part only) and append the special tokens.

    Text is brought into Unicode form NFC, as Qwen's tokenizers do (transformers does so for this model type whatever
    the file says); beyond that, decoding returns the very text that was encoded.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ordinary_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens([_visible(token) for token in VISIBLE_TOKENS])
    return tokenizer


def _visible(token: str) -> AddedToken:
    return AddedToken(token, normalized=False, special=False)


def padded_vocabulary(tokenizer: Tokenizer) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of 64 (the full-size model has spare rows too)."""
    size = tokenizer.get_vocab_size()
    return -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def save_tokenizer(tokenizer: Tokenizer, folder: Path, model_max_length: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` in Hugging Face's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": model_max_length,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
