"""`lily_mlx.cache_prompt` and `--prompt-cache-file`, with mlx_lm's files in both directions."""

from __future__ import annotations

import importlib
import io
import json
import sys

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache

from lily_mlx import load
from lily_mlx.cache_prompt import main
from lily_mlx.generate import main as generate_main
from tests.model import synthetic
from tests.model.scripted import EOS, write_scripted
from tests.model.tokenizer import write_tokenizer
from tests.support import run_command

PREFIX, QUERY = "Once upon a time", " there was"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("random")
    ids = write_tokenizer(directory)
    # No ids beyond the tokenizer's, which mlx_lm shows as "!".
    settings = synthetic.config(eos_token_id=ids[EOS], num_experts_per_tok=8, vocab_size=259)
    return synthetic.write_checkpoint(directory, settings)


@pytest.fixture
def run(capsys):
    return lambda function, *arguments: run_command(function, arguments, capsys)


@pytest.fixture
def mlx_lm(capsys, monkeypatch):
    """Runs a command of mlx_lm in this process; returns stdout."""

    def call(command, *arguments):
        monkeypatch.setattr(sys, "argv", [f"mlx_lm.{command}", *map(str, arguments)])
        importlib.import_module(f"mlx_lm.{command}").main()
        return capsys.readouterr().out

    return call


def test_what_is_written(run, model, tmp_path):
    file = tmp_path / "prompt.safetensors"
    code, out, err = run(main, "--model", model, "--prompt", PREFIX, "--prompt-cache-file", file)
    tokenizer = load(model)[1]
    messages = [{"role": "user", "content": PREFIX}]
    count = len(tokenizer.apply_chat_template(messages, continue_final_message=True))
    assert (code, err) == (0, "")
    assert f"Processed {count:6d} tokens (" in out
    assert out.splitlines()[-1] == "Saving..."
    cache, metadata = load_prompt_cache(str(file), return_metadata=True)
    assert cache[3].offset == count
    assert metadata["model"] == str(model)
    assert json.loads(metadata["tokenizer_config"]) == {"trust_remote_code": False}


@pytest.mark.parametrize("writer", ["lily_mlx", "mlx_lm"])
@pytest.mark.parametrize("options", [[], ["--prefill-response", "Yes:"]], ids=["plain", "prefill"])
def test_a_prompt_continues_the_file(run, mlx_lm, model, tmp_path, writer, options):
    file = tmp_path / "prompt.safetensors"
    arguments = ["--model", model, "--prompt", PREFIX, "--prompt-cache-file", file]
    if writer == "lily_mlx":
        assert run(main, *arguments)[0] == 0
    else:
        mlx_lm("cache_prompt", *arguments)
    common = ["-m", 8, "--verbose", "f", *options]
    continued = run(generate_main, "--prompt-cache-file", file, "--prompt", QUERY, *common)
    assert continued[0] == 0
    assert continued == run(generate_main, "--model", model, "--prompt", PREFIX + QUERY, *common)


def test_mlx_lm_continues_our_file(run, mlx_lm, tmp_path):
    write_scripted(tmp_path / "model", ["alpha", " beta"])  # logits are compared in tests/accelerate/test_cache.py
    file = tmp_path / "prompt.safetensors"
    run(main, "--model", tmp_path / "model", "--prompt", PREFIX, "--prompt-cache-file", file)
    out = mlx_lm("generate", "--prompt-cache-file", file, "--prompt", QUERY)
    ours = run(generate_main, "--prompt-cache-file", file, "--prompt", QUERY)[1]
    assert [line.split(" tokens")[0] for line in out.splitlines()[:5]] == [
        line.split(" tokens")[0] for line in ours.splitlines()[:5]
    ]
    assert out.splitlines()[1] == "alpha beta"


def test_a_file_can_be_used_again(run, model, tmp_path):
    file = tmp_path / "prompt.safetensors"
    run(main, "--model", model, "--prompt", PREFIX, "--prompt-cache-file", file)
    before = file.read_bytes()
    outputs = {run(generate_main, "--prompt-cache-file", file, "-p", QUERY, "-m", 4, "--verbose", "f") for _ in "ab"}
    assert len(outputs) == 1
    assert file.read_bytes() == before


def test_stdin_and_kv_bits(run, model, tmp_path, monkeypatch, caplog):
    file = tmp_path / "prompt.safetensors"
    arguments = ["--model", model, "--prompt", "-", "--prompt-cache-file", file]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PREFIX.encode()), encoding="utf-8"))
    assert run(main, *arguments)[0] == 0
    plain = load_prompt_cache(str(file))
    mx.eval([layer.state for layer in plain])  # before the file is written again
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PREFIX.encode()), encoding="utf-8"))
    assert run(main, *arguments, "--kv-bits", 8, "--quantized-kv-start", 0)[0] == 0
    assert "mlx_lm's own path: --kv-bits" in caplog.text
    quantised = load_prompt_cache(str(file))
    assert type(quantised[3]).__name__ == "QuantizedKVCache"
    assert plain[3].offset == quantised[3].offset
    assert mx.allclose(plain[0].cache[1], quantised[0].cache[1], atol=0.1)
    assert run(generate_main, "--prompt-cache-file", file, "-p", QUERY, "-m", 4)[0] == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(["--model", "other"], "was made with model", id="other-model"),
        pytest.param(["--prompt-cache-file", "missing"], "does not exist", id="missing"),
    ],
)
def test_refuses_to_read(run, model, tmp_path, change, words):
    file = tmp_path / "prompt.safetensors"
    run(main, "--model", model, "--prompt", PREFIX, "--prompt-cache-file", file)
    code, _, err = run(generate_main, "--prompt-cache-file", file, *change)
    assert code == 1
    assert words in err


@pytest.mark.parametrize("content", [b"", b"not a cache", None], ids=["empty", "text", "other-tensors"])
def test_refuses_files_that_are_no_caches(run, tmp_path, content):
    file = tmp_path / "x.safetensors"
    if content is None:
        mx.save_safetensors(str(file), {"a": mx.zeros(1)})
    else:
        file.write_bytes(content)
    code, _, err = run(generate_main, "--prompt-cache-file", file)
    assert code == 1
    assert "is not a prompt cache" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt-cache-file", "/no/such/directory/x"], "there is no directory for it"),
        (["--prompt-cache-file", "x", "--max-kv-size", "3"], "--max-kv-size is not supported"),
    ],
    ids=["directory", "max-kv-size"],
)
def test_refuses_to_write(run, model, arguments, words):
    code, _, err = run(main, "--model", model, "--prompt", "x", *arguments)
    assert code == 1
    assert words in err
