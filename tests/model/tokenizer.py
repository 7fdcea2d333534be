"""A byte-level tokenizer without merges, for checkpoints made in tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% if not (loop.last and continue_final_message) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(directory: Path, pieces: Sequence[str] = (), template: bool = True) -> dict[str, int]:
    """Writes a tokenizer of 256 bytes, then `pieces` (which encoding never produces), then SPECIAL.

    Returns:
        Ids of the pieces and the special tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    written = ["".join(text for text, _ in byte_level.pre_tokenize_str(piece)) for piece in pieces]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *written])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    if template:
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    ids = {piece: vocabulary[token] for piece, token in zip(pieces, written, strict=True)}
    return ids | {token: tokenizer.token_to_id(token) for token in SPECIAL}
