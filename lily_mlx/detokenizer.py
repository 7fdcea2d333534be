"""Text from tokens as they come, never a part of a character, and the same text as decoding all of them at once."""

from __future__ import annotations

import codecs
from typing import Any

_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable bytes stand for themselves, the others follow from U+0100 on."""
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    return {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(others)}


class ByteLevelDetokenizer:
    """mlx_lm's `StreamingDetokenizer` for byte-level tokenizers.

    Bytes wait until they are a whole character; bytes that cannot become one give U+FFFD, as in decoding. An id
    without a token gives no text. As in mlx_lm, a space at the very beginning is dropped.

    Attributes:
        text: all text so far.
        tokens: all tokens so far.
        offset: characters of `text` that `last_segment` has handed out.
    """

    _BYTES = _byte_of_character()

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._literal = {int(i): str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        self._pieces: dict[int, bytes] = {}
        self.reset()

    def reset(self) -> None:
        """Starts a new text."""
        self.text = ""
        self.tokens: list[int] = []
        self.offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add_token(self, token: int) -> None:
        """Adds a token."""
        self.tokens.append(token)
        if token not in self._pieces:
            self._pieces[token] = self._bytes(token)
        self._add(self._decoder.decode(self._pieces[token]))

    def finalize(self) -> None:
        """Ends the text: what still waits for the rest of a character becomes U+FFFD."""
        self._add(self._decoder.decode(b"", final=True))

    @property
    def last_segment(self) -> str:
        """The text since the last look at this property."""
        segment = self.text[self.offset :]
        self.offset = len(self.text)
        return segment

    def _add(self, text: str) -> None:
        self.text += text if self.text else text.removeprefix(" ")

    def _bytes(self, token: int) -> bytes:
        if token in self._literal:
            return self._literal[token].encode()
        try:
            piece = self._tokenizer.convert_ids_to_tokens(token)
        except (IndexError, KeyError, OverflowError):
            piece = None
        if piece is None:
            return b""
        if all(character in self._BYTES for character in piece):
            return bytes(self._BYTES[character] for character in piece)
        return str(piece).encode()


def make_detokenizer(tokenizer: Any) -> Any:
    """A streaming detokenizer for mlx_lm's `TokenizerWrapper`: ours for byte-level tokenizers, else mlx_lm's."""
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer

    detokenizer = tokenizer.detokenizer
    return ByteLevelDetokenizer(tokenizer._tokenizer) if type(detokenizer) is BPEStreamingDetokenizer else detokenizer
