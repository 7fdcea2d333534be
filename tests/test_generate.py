"""The Python interface: texts, responses and errors, with a checkpoint whose output is scripted."""

from __future__ import annotations

import os
import shutil
from types import FunctionType

import mlx.core as mx
import pytest

import lily_mlx
import lily_mlx.generate
from lily_mlx import generate, load, stream_generate
from tests.model import synthetic
from tests.model.scripted import EOS, write_scripted
from tests.model.tokenizer import write_tokenizer
from tests.support import to_numpy

SCRIPT = ["alpha", " beta", " gam", "ma", "<|endoftext|>", " del", "ta \u00e9"]
TEXT = "alpha beta gamma<|endoftext|> delta \u00e9"
PROMPT = "question:\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("scripted")
    write_scripted(directory, SCRIPT)
    return directory


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return load(str(checkpoint))


@pytest.fixture(scope="module")
def random_checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("random")
    ids = write_tokenizer(directory)
    return synthetic.write_checkpoint(directory, synthetic.config(eos_token_id=ids[EOS]))


def test_names_are_functions_like_mlx_lms():
    for name in ("generate", "load", "stream_generate"):
        assert isinstance(getattr(lily_mlx, name), FunctionType)


def test_generates_the_script(loaded):
    assert generate(*loaded, PROMPT) == TEXT


def test_responses(loaded):
    responses = list(stream_generate(*loaded, PROMPT))
    assert "".join(r.text for r in responses) == TEXT
    assert [r.finish_reason for r in responses] == [None] * len(SCRIPT) + ["stop"]
    assert [r.generation_tokens for r in responses] == list(range(1, len(SCRIPT) + 2))
    last = responses[-1]
    assert last.token in loaded[1].eos_token_ids
    assert (last.prompt_tokens, last.from_draft) == (len(PROMPT), False)
    assert min(last.prompt_tps, last.generation_tps, last.peak_memory) > 0
    for response in responses:
        probabilities = to_numpy(mx.exp(response.logprobs))
        assert response.logprobs.shape == (320,)
        assert abs(probabilities.sum() - 1) < 1e-4
        assert probabilities.argmax() == response.token


@pytest.mark.parametrize("count", [1, 2, 4])
def test_max_tokens(loaded, count):
    responses = list(stream_generate(*loaded, PROMPT, max_tokens=count))
    assert "".join(r.text for r in responses) == "".join(SCRIPT[:count])
    assert [r.finish_reason for r in responses] == [None] * (count - 1) + ["length"]


def test_generation_ends_with_the_context(tmp_path, checkpoint):
    directory = tmp_path / "short"
    shutil.copytree(checkpoint, directory)
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace("4096", str(len(PROMPT) + 2)))
    responses = list(stream_generate(*load(directory), PROMPT, max_tokens=-1))
    assert [r.finish_reason for r in responses] == [None, None, "length"]


@pytest.mark.parametrize("form", [list, mx.array, str], ids=["list", "array", "text"])
def test_forms_of_a_prompt(loaded, form):
    prompt = PROMPT if form is str else form(loaded[1].encode(PROMPT))
    assert generate(*loaded, prompt) == TEXT


def test_verbose_prints_mlx_lms_lines(loaded, capsys):
    assert generate(*loaded, PROMPT, verbose=True) == TEXT
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["=" * 10, TEXT, "=" * 10]
    assert [line.split()[0] for line in lines[3:]] == ["Prompt:", "Generation:", "Peak"]
    assert lines[3].startswith(f"Prompt: {len(PROMPT)} tokens, ")
    assert lines[4].startswith(f"Generation: {len(SCRIPT) + 1} tokens, ")
    assert all(line.endswith(" tokens-per-sec") for line in lines[3:5])
    assert lines[5].endswith(" GB")


def test_verbose_without_text(tmp_path, capsys):
    write_scripted(tmp_path, [])
    capsys.readouterr()
    assert generate(*load(tmp_path), PROMPT, verbose=True) is None
    assert capsys.readouterr().out.splitlines() == [
        "=" * 10,
        "",
        "=" * 10,
        "No text generated for this prompt",
    ]


def test_sampler_of_mlx_lm(loaded):
    from mlx_lm.sample_utils import make_sampler

    assert generate(*loaded, PROMPT, sampler=make_sampler(0.0)) == TEXT
    assert generate(*loaded, PROMPT, sampler=make_sampler(0.7, top_k=1)) == TEXT


@pytest.mark.parametrize(
    "options",
    [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 10**6, "top_p": 1e-4, "min_p": 0.5}],
    ids=str,
)
def test_filters_that_keep_one_token(loaded, options):
    assert generate(*loaded, PROMPT, temp=3.0, seed=1, **options) == TEXT


def test_logit_bias(loaded):
    model, tokenizer = loaded
    bias = {
        tokenizer.convert_tokens_to_ids("\u0120gam"): -1e9,
        tokenizer.convert_tokens_to_ids(EOS): 50.0,
    }
    assert generate(model, tokenizer, PROMPT, logit_bias=bias) == "alpha beta"
    responses = list(stream_generate(model, tokenizer, PROMPT, logit_bias=bias))
    assert [int(mx.argmax(r.logprobs).item()) for r in responses] == [r.token for r in responses]


def test_logits_processors(loaded):
    model, tokenizer = loaded
    seen = []

    def forbid_gamma(tokens, logits):
        seen.append(tokens.tolist())
        logits[:, tokenizer.convert_tokens_to_ids("\u0120gam")] = -1e9
        logits[:, tokenizer.convert_tokens_to_ids(EOS)] += 50.0
        return logits

    assert generate(model, tokenizer, PROMPT, logits_processors=[forbid_gamma]) == "alpha beta"
    prompt = tokenizer.encode(PROMPT)
    assert [len(tokens) - len(prompt) for tokens in seen] == [0, 1, 2]
    assert seen[0] == prompt


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        pytest.param({"max_tokens": 0}, ValueError, "max_tokens is 0", id="no-tokens"),
        pytest.param({"max_tokens": -2}, ValueError, "max_tokens is -2", id="negative-tokens"),
        pytest.param({"kv_bits": 8}, ValueError, "kv_bits", id="kv-bits"),
        pytest.param({"max_kv_size": 100}, ValueError, "max_kv_size", id="kv-size"),
        pytest.param({"input_embeddings": object()}, ValueError, "input_embeddings", id="embeddings"),
        pytest.param({"draft_model": object()}, ValueError, "draft_model", id="draft"),
        pytest.param({"tempo": 1}, TypeError, "'tempo'", id="unknown"),
        pytest.param({"sampler": lambda x: x, "temp": 0.5}, ValueError, "make_sampler", id="two-samplers"),
        pytest.param({"sampler": lambda x: x, "top_p": 0.5}, ValueError, "temp, seed, top_p", id="sampler-and-filter"),
        pytest.param({"temp": 0.5, "top_p": 1.5}, ValueError, "top_p 1.5", id="top-p"),
        pytest.param({"temp": 0.5, "top_k": -1}, ValueError, "top_k -1", id="top-k"),
        pytest.param({"repetition_penalty": -1.0}, ValueError, "repetition_penalty -1.0", id="repetition"),
        pytest.param({"logit_bias": {999999: 1.0}}, ValueError, "token id 999999", id="bias"),
        pytest.param({"prefill_step_size": 0}, ValueError, "chunk size is 0", id="step-size"),
        pytest.param({"temp": -1.0}, ValueError, "temperature -1.0", id="temperature"),
    ],
)
def test_refuses_keywords(loaded, options, error, words):
    with pytest.raises(error, match=r"not supported|give|unexpected") as caught:
        generate(*loaded, PROMPT, **options)
    assert words in str(caught.value)


def test_accepts_mlx_lms_defaults(loaded):
    options = {
        "max_kv_size": None,
        "prompt_cache": None,
        "kv_bits": None,
        "kv_group_size": 64,
        "num_draft_tokens": 3,
    }
    assert generate(*loaded, PROMPT, **options) == TEXT


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        pytest.param("", "empty", id="empty-text"),
        pytest.param([], "empty", id="empty-list"),
        pytest.param(mx.array([]), "empty", id="empty-array"),
        pytest.param("a\udcff", "not valid UTF-8", id="not-utf-8"),
        pytest.param([1, 999], "token id 999", id="unknown-id"),
        pytest.param(mx.zeros((1, 3), mx.int32), "one row", id="two-dimensions"),
        pytest.param("x" * 4097, "context is 4096", id="too-long"),
    ],
)
def test_refuses_prompts(loaded, prompt, words):
    with pytest.raises(ValueError, match=words):
        generate(*loaded, prompt)


@pytest.mark.parametrize("way", ["space", "slash", "relative", "link", "linked-files"])
def test_ways_to_name_a_directory(tmp_path, checkpoint, monkeypatch, way):
    directory = tmp_path / "a model"
    if way == "link":
        directory.symlink_to(checkpoint)
    elif way == "linked-files":
        directory.mkdir()
        for i, file in enumerate(checkpoint.iterdir()):
            blob = tmp_path / f"blob{i}"
            shutil.copy(file, blob)
            (directory / file.name).symlink_to(blob)
    else:
        shutil.copytree(checkpoint, directory)
    name = str(directory)
    if way == "slash":
        name += os.sep
    elif way == "relative":
        monkeypatch.chdir(tmp_path)
        name = "a model"
    assert generate(*load(name), PROMPT) == TEXT


@pytest.mark.parametrize("name", ["./missing", "/missing/model", "a/b/c", "no such model"])
def test_missing_directory(name):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load(name)


def test_a_file_is_no_model(checkpoint):
    with pytest.raises(FileNotFoundError, match="give the model's directory"):
        load(checkpoint / "config.json")


def test_load_returns_the_config(checkpoint):
    model, tokenizer, config = load(checkpoint, return_config=True)
    assert config["model_type"] == model.config.model_type
    assert tokenizer.eos_token_ids == {config["eos_token_id"]}


@pytest.mark.parametrize(
    ("config_value", "generation", "want"),
    [
        pytest.param(260, None, {258, 260}, id="int"),
        pytest.param([257, 260], None, {257, 258, 260}, id="list"),
        pytest.param(260, "[257]", {257, 258}, id="generation-list"),
        pytest.param(260, "257", {257, 258}, id="generation-int"),
        pytest.param(None, None, {258}, id="absent"),
    ],
)
def test_eos_ids_are_joined_with_the_tokenizers(tmp_path, config_value, generation, want):
    write_tokenizer(tmp_path)  # its end-of-sequence token is 258
    synthetic.write_checkpoint(tmp_path, synthetic.config(eos_token_id=config_value))
    if generation:
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {generation}}}')
    tokenizer = load(tmp_path)[1]
    assert tokenizer.eos_token_ids == want

    from mlx_lm import load as mlx_lm_load

    assert tokenizer.eos_token_ids == mlx_lm_load(str(tmp_path), lazy=True)[1].eos_token_ids


def test_temperature_repeats_by_seed(random_checkpoint):
    model, tokenizer = load(random_checkpoint)
    options = {"max_tokens": 16, "temp": 1.0}
    first = generate(model, tokenizer, PROMPT, seed=1, **options)
    assert generate(model, tokenizer, PROMPT, seed=1, **options) == first
    assert generate(model, tokenizer, PROMPT, seed=2, **options) != first
