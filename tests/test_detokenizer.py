"""Text comes in whole characters, and is the same as decoding all tokens at once."""

from __future__ import annotations

import itertools

import pytest
from mlx_lm.tokenizer_utils import load

from lily_mlx.detokenizer import ByteLevelDetokenizer, make_detokenizer
from tests.model.tokenizer import write_tokenizer
from tests.support import rng

PIECES = ["\u6f22\u5b57", " caf\u00e9", "ne", "\u0301", "\U0001f469\u200d\U0001f4bb", " \n\n"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, PIECES)
    return load(directory)


def stream(tokenizer, ids):
    detokenizer = make_detokenizer(tokenizer)
    deltas = []
    for token in ids:
        detokenizer.add_token(token)
        deltas.append(detokenizer.last_segment)
    detokenizer.finalize()
    deltas.append(detokenizer.last_segment)
    assert detokenizer.text == "".join(deltas)
    assert detokenizer.tokens == list(ids)
    return deltas


def byte_ids(tokenizer, data: bytes) -> list[int]:
    """Ids of single bytes, also of bytes that are no text."""
    characters = {byte: character for character, byte in ByteLevelDetokenizer._BYTES.items()}
    return [tokenizer.convert_tokens_to_ids(characters[byte]) for byte in data]


def test_the_byte_level_alphabet_is_that_of_tokenizers():
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(ByteLevelDetokenizer._BYTES) == set(ByteLevel.alphabet())
    assert sorted(ByteLevelDetokenizer._BYTES.values()) == list(range(256))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("\u6f22\u5b57 \ud55c\uae00 \u304b\u306a", id="C36-cjk"),
        pytest.param("\U0001f600\U0001f3f3\ufe0f\u200d\U0001f308!", id="C37-emoji-of-several-scalars"),
        pytest.param("e\u0301 n\u0303o\u0308", id="C37-combining-marks"),
        pytest.param("\u0928\u092e\u0938\u094d\u0924\u0947 \u0633\u0644\u0627\u0645", id="scripts"),
        pytest.param("a\x00b\x7f\n\t ", id="control-characters"),
        pytest.param("\ufffd replaced", id="replacement-character"),
    ],
)
@pytest.mark.parametrize("cut", ["bytes", "tokens"])
def test_no_delta_splits_a_character(tokenizer, text, cut):
    ids = byte_ids(tokenizer, text.encode()) if cut == "bytes" else tokenizer.encode(text)
    deltas = stream(tokenizer, ids)
    assert "".join(deltas) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


def test_pieces_are_single_tokens(tokenizer):
    ids = [tokenizer.vocab["".join(_alphabet(piece))] for piece in PIECES]
    deltas = stream(tokenizer, ids)
    assert deltas[:-1] == PIECES
    assert "".join(deltas) == tokenizer.decode(ids)


def _alphabet(piece):
    characters = {byte: character for character, byte in ByteLevelDetokenizer._BYTES.items()}
    return [characters[byte] for byte in piece.encode()]


@pytest.mark.parametrize(
    ("data", "want"),
    [
        pytest.param(b"\xc4 x", "\ufffd x", id="C39-lone-byte-then-space"),
        pytest.param(b"\xf0\x9f\x98", "\ufffd", id="C39-prefix-then-end"),
        pytest.param(b"ok\xff\xfeok", "ok\ufffd\ufffdok", id="never-valid"),
    ],
)
def test_bytes_that_are_no_text(tokenizer, data, want):
    ids = byte_ids(tokenizer, data)
    assert "".join(stream(tokenizer, ids)) == want == tokenizer.decode(ids)


def test_random_ids_equal_decoding(tokenizer):
    generator = rng(3)
    for _ in range(50):
        ids = generator.integers(0, len(tokenizer), 40).tolist()
        text = tokenizer.decode(ids)
        assert "".join(stream(tokenizer, ids)) == text.removeprefix(" ")


def test_whitespace_is_kept(tokenizer):  # C43
    assert "".join(stream(tokenizer, tokenizer.encode("A \n\n\nB  C"))) == "A \n\n\nB  C"


@pytest.mark.parametrize("beyond", [0, 5, 10**6])
def test_ids_beyond_the_vocabulary_give_no_text(tokenizer, beyond):  # C41
    ids = [*tokenizer.encode("a"), len(tokenizer) + beyond, *tokenizer.encode("b")]
    assert "".join(stream(tokenizer, ids)) == "ab"


def test_special_tokens_are_literal(tokenizer):
    (token,) = tokenizer.encode("<|im_end|>")
    assert stream(tokenizer, [*byte_ids(tokenizer, b"\xc4"), token]) == ["", "\ufffd<|im_end|>", ""]


def test_each_stream_is_its_own(tokenizer):
    first, second = make_detokenizer(tokenizer), make_detokenizer(tokenizer)
    for a, b in itertools.zip_longest(tokenizer.encode("abc"), tokenizer.encode("xyz")):
        first.add_token(a)
        second.add_token(b)
    assert (first.text, second.text) == ("abc", "xyz")


def test_other_tokenizers_keep_mlx_lms_detokenizer(tokenizer):
    from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper

    wrapper = TokenizerWrapper(tokenizer._tokenizer)
    assert isinstance(make_detokenizer(wrapper), NaiveStreamingDetokenizer)
