"""The command `lily_mlx.generate`."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys

import pytest

from lily_mlx.generate import main
from tests.model import synthetic
from tests.model.scripted import EOS, write_scripted
from tests.model.tokenizer import write_tokenizer
from tests.support import run_command

SCRIPT = ["alpha", " beta", "<|endoftext|>", " delta"]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("scripted")
    write_scripted(directory, SCRIPT)
    return directory


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("random")
    ids = write_tokenizer(directory)
    return synthetic.write_checkpoint(directory, synthetic.config(eos_token_id=ids[EOS]))


@pytest.fixture
def command(capsys):
    """Runs the command in this process; returns exit code, stdout and stderr."""

    def run(*arguments):
        return run_command(main, arguments, capsys)

    return run


@pytest.fixture
def stdin(monkeypatch):
    def give(data: bytes):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return give


def test_prints_text_and_statistics(command, scripted):
    code, out, _ = command("--model", scripted, "--prompt", "hi")
    lines = out.splitlines()
    assert code == 0
    assert lines[:3] == ["=" * 10, "alpha beta<|endoftext|> delta", "=" * 10]
    assert [line.split(":")[0] for line in lines[3:]] == ["Prompt", "Generation", "Peak memory"]


@pytest.mark.parametrize("value", ["False", "f", "F"])
def test_not_verbose_prints_only_the_text(command, scripted, value):
    assert command("--model", scripted, "--verbose", value)[1] == "alpha beta<|endoftext|> delta\n"


@pytest.mark.parametrize("template", [True, False], ids=["template", "raw"])
@pytest.mark.parametrize(
    ("argument", "data", "text"),
    [
        pytest.param("-", b"one\ntwo", "one\ntwo", id="stdin"),
        pytest.param("-", rb"one\ntwo", r"one\ntwo", id="stdin-keeps-escapes"),
        pytest.param(r"one\n\ttwo", b"", "one\n\ttwo", id="escapes"),
    ],
)
def test_prompt_is_what_the_python_interface_gets(command, stdin, random_model, argument, data, text, template):
    from lily_mlx import generate, load

    stdin(data)
    raw = [] if template else ["--ignore-chat-template"]
    got = command("--model", random_model, "--prompt", argument, "-m", 8, "--verbose", "f", *raw)
    model, tokenizer = load(random_model)
    prompt = text
    if template:
        messages = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert got[:2] == (0, generate(model, tokenizer, prompt, max_tokens=8) + "\n")


def test_system_prompt_and_prefilled_answer_reach_the_template(command, random_model):
    from lily_mlx import load

    tokenizer = load(random_model)[1]
    rendered = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA"
    count = len(tokenizer.encode(rendered))
    arguments = ["--system-prompt", "S", "--prompt", "U", "--prefill-response", "A", "-m", 2]
    assert f"Prompt: {count} tokens, " in command("--model", random_model, *arguments)[1]


def test_empty_prompt(command, scripted):
    code, _, err = command("--model", scripted, "--ignore-chat-template", "--prompt", "")
    assert (code, err) == (1, "lily_mlx.generate: error: the prompt is empty: give at least one token\n")
    assert command("--model", scripted, "--prompt", "")[0] == 0  # the template is not empty


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        pytest.param([], "alpha beta<|endoftext|> delta", id="unset"),
        pytest.param(["--extra-eos-token", "<|endoftext|>"], "alpha beta", id="text"),
        pytest.param(["--extra-eos-token", "259"], "alpha beta", id="id"),
    ],
)
def test_extra_eos_token_is_added(command, scripted, arguments, text):
    assert command("--model", scripted, "--verbose", "f", *arguments)[1] == text + "\n"


@pytest.mark.parametrize("token", ["nosuchtoken", "99999"])
def test_extra_eos_token_must_exist(command, scripted, token):
    code, _, err = command("--model", scripted, "--extra-eos-token", token)
    assert code == 1
    assert f"{token!r} is not a token" in err


def test_seed_repeats(command, random_model):
    def run(*arguments):
        return command("--model", random_model, "-m", 12, "--temp", 1, "--verbose", "f", *arguments)[1]

    assert run("--seed", 1) == run("--seed", 1) != run("--seed", 2)
    assert run("--seed", 1, "--top-k", 400) == run("--seed", 1)
    filters = ["--top-p", 0.9, "--min-p", 0.001, "--top-k", 100, "--xtc-probability", 0.5, "--xtc-threshold", 0.01]
    assert run("--seed", 5, *filters) == run("--seed", 5, *filters) != run("--seed", 6, *filters)


@pytest.mark.parametrize("flags", [["--top-k", 1], ["--top-p", 1e-9], ["--min-p", 1]], ids=lambda flags: flags[0])
def test_filters_that_keep_one_token(command, scripted, flags):
    arguments = ["--model", scripted, "--verbose", "f"]
    assert command(*arguments, "--temp", 3, *flags) == command(*arguments)


@pytest.mark.parametrize(
    ("flag", "value", "name"),
    [("--top-p", 1.5, "top_p"), ("--min-p", -1, "min_p"), ("--top-k", -5, "top_k"), ("--xtc-threshold", 0.7, "xtc")],
)
def test_filters_out_of_range(command, scripted, flag, value, name):
    code, _, err = command("--model", scripted, "--temp", 1, flag, value)
    assert code == 1
    assert f"{name}" in err
    assert "is not supported: give" in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        pytest.param(["--max-kv-size", "100"], "--max-kv-size is not supported .* keep every token", id="max-kv-size"),
        pytest.param(["--draft-model", "x"], "--draft-model is not supported .* cannot go back", id="draft-model"),
        pytest.param(["--image", "x"], "--image is not supported .* text only", id="image"),
        pytest.param(["-qa"], "Mode .* does not support activation quantization", id="quantize-activations"),
        pytest.param(["--adapter-path", "./x"], "adapter path does not exist: x", id="adapter-path"),
        pytest.param(["--prompt-cache-file", "x"], "--prompt-cache-file 'x' does not exist", id="prompt-cache-file"),
    ],
)
def test_refuses_what_it_cannot_do(command, scripted, arguments, reason):
    code, out, err = command("--model", scripted, *arguments)
    assert (code, out) == (1, "")
    assert re.search(f"lily_mlx.generate: error: .*{reason}", err), err


def test_default_chat_template(command, scripted, tmp_path):
    text = "alpha beta<|endoftext|> delta\n"
    arguments = ["--verbose", "f", "--use-default-chat-template"]
    assert command("--model", scripted, *arguments)[:2] == (0, text)
    write_scripted(tmp_path, SCRIPT, after="x", template=False)
    code, _, err = command("--model", tmp_path, *arguments, "--prompt", "x")
    assert code == 1
    assert "no chat template" in err


def test_kv_bits_runs_on_mlx_lms_path_with_one_notice(command, scripted, caplog):
    code, out, _ = command("--model", scripted, "--verbose", "f", "--kv-bits", "8", "--quantized-kv-start", "0")
    assert (code, out) == (0, "alpha beta<|endoftext|> delta\n")
    (notice,) = [record.message for record in caplog.records if record.name == "lily_mlx"]
    assert "mlx_lm's own path: --kv-bits" in notice


@pytest.mark.parametrize(
    ("data", "where"), [(b"\xff", "byte 0"), (b"caf\xe9", "byte 3"), ("a\u00e9".encode()[:-1], "byte 1")]
)
def test_stdin_must_be_utf_8(command, stdin, scripted, data, where):
    stdin(data)
    code, _, err = command("--model", scripted, "--prompt", "-")
    assert code == 1
    assert f"not valid UTF-8 at {where}" in err


@pytest.mark.parametrize("flag", ["--system-prompt", "--prefill-response"])
def test_other_texts_must_be_utf_8(command, random_model, flag):
    code, _, err = command("--model", random_model, "--prompt", "alpha", flag, "caf\udce9")
    assert code == 1
    assert "not valid UTF-8 at character 3" in err


@pytest.mark.parametrize("seed", ["-1", str(2**64)])
def test_seed_out_of_range(command, scripted, seed):
    code, _, err = command("--model", scripted, "--prompt", "a", "--seed", seed)
    assert code == 1
    assert f"--seed {seed}: give an integer from 0 to 2^64 - 1" in err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": None}, "model_type is None"),
        ({"text_config": None}, "text_config is None, expected an object"),
        ({"quantization": [4]}, r"quantization is [4], expected an object"),
    ],
    ids=["no-family", "null-text", "list"],
)
def test_config_of_the_wrong_kind(command, scripted, tmp_path, change, words):
    copy = shutil.copytree(scripted, tmp_path / "copy")
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    code, _, err = command("--model", copy, "--prompt", "a")
    assert code == 1
    assert words in err


def test_missing_tokenizer(command, scripted, tmp_path):
    copy = shutil.copytree(scripted, tmp_path / "copy")
    (copy / "tokenizer.json").unlink()
    code, _, err = command("--model", copy, "--prompt", "a")
    assert code == 1
    assert "has no tokenizer" in err


@pytest.mark.parametrize(
    ("value", "words"), [("{", "is not valid JSON"), ("[1]", "is not a JSON object")], ids=["broken", "list"]
)
def test_chat_template_config_must_be_an_object(command, scripted, value, words):
    code, _, err = command("--model", scripted, "--chat-template-config", value)
    assert code == 1
    assert words in err


def test_unknown_backend(command, scripted):
    code, _, err = command("--model", scripted, "--backend", "tpu")
    assert code == 2
    assert "invalid choice: 'tpu'" in err


def test_unknown_backend_in_the_environment(scripted):
    done = subprocess.run(
        [sys.executable, "-m", "lily_mlx", "generate", "--model", str(scripted)],
        capture_output=True,
        text=True,
        env={"LILY_MLX_BACKEND": "tpu", "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert done.returncode == 1
    assert "unknown backend 'tpu'; choose one of metal, cuda, cpu" in done.stderr


def test_missing_model(command):
    code, _, err = command("--model", "./missing")
    assert (code, err.count("\n")) == (1, 1)
    assert "'./missing' does not exist" in err


@pytest.mark.parametrize("module", [["lily_mlx", "generate"], ["lily_mlx.generate"]], ids=["lily_mlx", "generate"])
def test_runs_as_a_module_without_warnings(module):
    done = subprocess.run([sys.executable, "-m", *module, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--max-tokens" in done.stdout


def test_no_model_means_the_bundled_checkpoint(command):
    code, out, err = command("--prompt", "ROMEO:", "-m", 4)
    assert code == 0
    assert "bundled checkpoint on the cpu backend" in err
    assert "Generation: " in out
