"""The tokenizer of the bundled checkpoint loses nothing and knows Qwen's special tokens."""

from __future__ import annotations

import json
import random
import unicodedata

import pytest
import tokenizers

from lily_mlx.checkpoints import bundled_checkpoint, held_out_text

RANGES = ((0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x400, 0x530), (0x4E00, 0x9FFF), (0x1F300, 0x1FA00))


def random_text(seed: int) -> str:
    generator = random.Random(seed)
    characters = [chr(generator.randrange(*generator.choice(RANGES))) for _ in range(generator.randrange(1, 200))]
    for _ in range(len(characters) // 5):
        characters.insert(
            generator.randrange(len(characters)), generator.choice(["\n", "\r\n", "  ", "\t", " ", "\x00"])
        )
    return "".join(characters)


@pytest.mark.parametrize("seed", range(20))
def test_random_unicode_comes_back(tokenizer, seed):
    print(f"seed {seed}")
    text = unicodedata.normalize("NFC", random_text(seed))
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_text_is_brought_into_nfc(tokenizer):
    ids = tokenizer.encode("e\u0301", add_special_tokens=False)
    assert ids == tokenizer.encode("\u00e9", add_special_tokens=False)


@pytest.mark.parametrize("seed", range(5))
def test_the_file_alone_gives_the_same_tokens(tokenizer, seed):
    alone = tokenizers.Tokenizer.from_file(str(bundled_checkpoint() / "tokenizer.json"))
    text = random_text(seed) + held_out_text()[seed * 1000 :][:2000]
    assert alone.encode(text).ids == tokenizer.encode(text, add_special_tokens=False)


def test_held_out_text_comes_back(tokenizer):
    text = held_out_text()[:20000]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text) / 2


def test_detokenizer_streams_the_same_text(tokenizer):
    text = "O Romeo! 雪 \U0001f319 naïve\n\n  end "
    detokenizer = tokenizer.detokenizer
    for token in tokenizer.encode(text, add_special_tokens=False):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == text


def test_text_cut_after_a_line_break_keeps_its_tokens(tokenizer):
    head, tail = "ROMEO:\n\n", "\n  What light\n"
    joined = tokenizer.encode(head + tail, add_special_tokens=False)
    parts = tokenizer.encode(head, add_special_tokens=False) + tokenizer.encode(tail, add_special_tokens=False)
    assert joined == parts


@pytest.mark.parametrize(
    "token",
    [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<|fim_prefix|>",
        "<|vision_start|>",
    ],
)
def test_special_tokens_are_single_and_come_last(tokenizer, token):
    (number,) = tokenizer.encode(token, add_special_tokens=False)
    assert 2000 <= number < len(tokenizer)


def test_embedding_has_spare_rows(tokenizer):
    config = json.loads((bundled_checkpoint() / "config.json").read_text(encoding="utf-8"))["text_config"]
    assert config["vocab_size"] % 64 == 0
    assert 0 < config["vocab_size"] - len(tokenizer) < 64


def test_an_answer_ends_with_im_end(tokenizer):
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.has_thinking
    assert tokenizer.has_tool_calling
