"""Cases from the field that concern the commands and the Python interface, by their numbers.

The table of docs/drop_in.md says which cases are tested elsewhere and which are left out, and why.
"""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import lily_mlx
from lily_mlx import batch_generate, generate, generate_step, load, stream_generate
from lily_mlx.generate import main
from tests.model import synthetic
from tests.model.scripted import EOS, write_scripted
from tests.model.tokenizer import write_tokenizer
from tests.support import run_command

PROMPT = "question:\n"
SCRIPT = ["alpha", " \u6f22", "\u5b57 e", "\u0301", " \U0001f3f3", "\ufe0f", "\u200d", "\U0001f308"]


@pytest.fixture(scope="module")
def random_checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("random")
    ids = write_tokenizer(directory)
    return synthetic.write_checkpoint(directory, synthetic.config(eos_token_id=ids[EOS], num_experts_per_tok=8))


@pytest.fixture(scope="module")
def loaded(random_checkpoint):
    return load(random_checkpoint)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("scripted")
    write_scripted(directory, SCRIPT)
    return directory


@pytest.fixture
def command(capsys):
    def run(*arguments):
        return run_command(main, arguments, capsys)

    return run


def solo(model, tokenizer, prompt, count, **options):
    """Tokens of one sequence, without the one that ends it."""
    ids = [response.token for response in stream_generate(model, tokenizer, prompt, max_tokens=count, **options)]
    return [token for token in ids if token not in tokenizer.eos_token_ids]


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda m, t: list(generate_step(mx.array([]), m)), id="C03-generate-step"),
        pytest.param(lambda m, t: list(stream_generate(m, t, [])), id="C03-stream-generate"),
        pytest.param(lambda m, t: batch_generate(m, t, [[1, 2], []]), id="C03-batch"),
        pytest.param(lambda m, t: batch_generate(m, t, [[1], [2]], max_tokens=[4]), id="C05-too-few-limits"),
    ],
)
def test_raises_value_error(loaded, call):
    with pytest.raises(ValueError, match=r"empty|expected 2, got 1"):
        call(*loaded)


def test_c05_each_prompt_has_its_limit(loaded):
    got = batch_generate(*loaded, [[1], [2], [3]], max_tokens=[1, 2, 5], return_token_ids=True)
    assert [len(ids) for ids in got.token_ids] == [1, 2, 5]
    assert batch_generate(*loaded, []).texts == []


def test_batch_generate_returns_what_mlx_lm_returns(loaded, capsys):
    model, tokenizer = loaded
    options = {"return_prompt_caches": True, "return_token_ids": True, "return_logprobs": True, "verbose": True}
    first = batch_generate(model, tokenizer, [[1, 2, 3], [4]], max_tokens=3, **options)
    assert "[batch_generate] Generation: 6 tokens" in capsys.readouterr().out
    assert [tokenizer.decode(ids) for ids in first.token_ids] == first.texts
    assert all(-20 < value <= 0 for row in first.logprobs for value in row)
    rest = batch_generate(model, tokenizer, [[5], [6]], prompt_caches=first.caches, max_tokens=4, return_token_ids=True)
    for prompt, ids, more, last in zip([[1, 2, 3], [4]], first.token_ids, rest.token_ids, [5, 6], strict=True):
        assert more == solo(model, tokenizer, [*prompt, *ids, last], 4)


@pytest.mark.parametrize("max_kv_size", [8])
def test_batch_generate_refuses_a_cache_size(loaded, max_kv_size):
    with pytest.raises(ValueError, match="max_kv_size is not supported"):
        batch_generate(*loaded, [[1]], max_kv_size=max_kv_size)


@pytest.mark.parametrize("way", ["command", "sampler"])
def test_c11_one_token_left_is_the_most_likely(command, random_checkpoint, loaded, way):
    greedy = generate(*loaded, PROMPT, max_tokens=12)
    if way == "sampler":
        sampler = make_sampler(0.01, top_p=0.8, top_k=1)
        assert generate(*loaded, PROMPT, max_tokens=12, sampler=sampler) == greedy
    else:
        arguments = ["--temp", 0.01, "--top-p", 0.8, "--top-k", 1, "-m", 12, "--verbose", "f", "--ignore-chat-template"]
        assert command("--model", random_checkpoint, "--prompt", PROMPT, *arguments)[1] == greedy + "\n"


@pytest.mark.parametrize("temp", ["0", "1e-6", "1e-40"])
def test_c19_extreme_temperatures_are_greedy(command, random_checkpoint, loaded, temp):
    arguments = ["--temp", temp, "-m", 12, "--verbose", "f", "--ignore-chat-template"]
    want = generate(*loaded, PROMPT, max_tokens=12)
    assert command("--model", random_checkpoint, "--prompt", PROMPT, *arguments)[1] == want + "\n"


@pytest.mark.parametrize("temp", ["-1", "nan", "inf", "-inf"])
def test_c19_temperatures_that_mean_nothing(command, scripted, temp):
    code, out, err = command("--model", scripted, f"--temp={temp}", "--verbose", "f")
    assert (code, out) == (1, "")
    assert f"temperature {float(temp)} is not supported" in err


def test_c21_seeds_alone_and_beside_others(loaded):
    def run(seed):
        return solo(*loaded, PROMPT, 12, temp=1.0, seed=seed)

    one, two = run(1), run(2)
    assert one == run(1) != two
    free = [tuple(solo(*loaded, PROMPT, 12, temp=1.0)) for _ in range(3)]
    assert len(set(free)) > 1
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, [1, 2, 1])) == [one, two, one]


def test_c23_each_row_has_its_own_sampler_and_processors(loaded):
    model, tokenizer = loaded
    prompt = tokenizer.encode(PROMPT)
    bias = {tokenizer.encode("x")[0]: 30.0}
    rows = [
        (None, None, 14),
        (None, make_logits_processors(repetition_penalty=1.3), 12),
        (None, make_logits_processors(bias), 6),
        (make_sampler(1.0, top_k=1), None, 9),
    ]
    generator = BatchGenerator(model, stop_tokens=[[t] for t in tokenizer.eos_token_ids])
    uids = generator.insert(
        [list(prompt) for _ in rows],
        [count for _, _, count in rows],
        samplers=[sampler for sampler, _, _ in rows],
        logits_processors=[processors for _, processors, _ in rows],
    )
    got = collect(generator)
    for uid, (sampler, processors, count) in zip(uids, rows, strict=True):
        options = {"sampler": sampler or make_sampler(), "logits_processors": processors}
        assert got[uid] == solo(model, tokenizer, prompt, count, **options)
    assert set(got[uids[2]]) == set(bias)


def collect(generator, arrivals=None):
    """Tokens by sequence; `arrivals` inserts sequences while others run."""
    got, arrivals = {}, iter(arrivals or ())
    while True:
        next(arrivals, None)
        responses = generator.next_generated()
        if not responses:
            return got
        for response in responses:
            got.setdefault(response.uid, [])
            if response.finish_reason != "stop":
                got[response.uid].append(response.token)


def test_c25_sampling_defaults_of_the_checkpoint_are_not_read(tmp_path, random_checkpoint, loaded):
    shutil.copytree(random_checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 1.0, "top_k": 20, "top_p": 0.95}))
    assert generate(*load(tmp_path), PROMPT, max_tokens=12) == generate(*loaded, PROMPT, max_tokens=12)


@pytest.mark.parametrize("api", ["stream_generate", "command"])
def test_c37_streamed_characters_are_whole(command, scripted, api):
    text = "".join(SCRIPT)
    if api == "command":
        assert command("--model", scripted)[1].splitlines()[1] == text
        return
    deltas = [response.text for response in stream_generate(*load(scripted), PROMPT)]
    assert "".join(deltas) == text
    assert deltas[: len(SCRIPT)] == SCRIPT


def test_c57_without_a_template_the_prompt_is_raw(command, tmp_path, random_checkpoint, loaded):
    directory = shutil.copytree(random_checkpoint, tmp_path / "model")
    for name in ("tokenizer_config.json", "tokenizer.json"):
        shutil.copy(random_checkpoint / name, directory)
    (directory / "chat_template.jinja").unlink()
    got = command("--model", directory, "--prompt", PROMPT, "-m", 8, "--verbose", "f")
    assert got[:2] == (0, generate(*loaded, PROMPT, max_tokens=8) + "\n")


def test_c79_an_edit_in_the_middle(loaded):
    model, tokenizer = loaded
    a, b, c, other = "first part;", "second;", "third.", "changed;"
    cache = model.make_cache()
    list(generate_step(mx.array(tokenizer.encode(a)), model, max_tokens=0, prompt_cache=cache))
    for rest in (b + c, other + c, b[:1]):
        continued = solo(model, tokenizer, rest, 6, prompt_cache=copy.deepcopy(cache))
        assert continued == solo(model, tokenizer, a + rest, 6)


def test_c89_sequences_join_and_leave(loaded):
    model, tokenizer = loaded
    generator = BatchGenerator(model, stop_tokens=[[t] for t in tokenizer.eos_token_ids], prefill_batch_size=2)
    prompts = [tokenizer.encode(f"prompt {'x' * i}") for i in range(9)]
    uids = []

    def arrive():
        for i, prompt in enumerate(prompts):
            uids.extend(generator.insert([list(prompt)], [i + 1]))
            yield

    got = collect(generator, arrive())
    assert len(uids) == 9
    for i, (uid, prompt) in enumerate(zip(uids, prompts, strict=True)):
        assert got[uid] == solo(model, tokenizer, prompt, i + 1)


def test_c105_a_prompt_over_the_context_is_refused_with_both_numbers(loaded):
    with pytest.raises(ValueError, match="6000 tokens, but the model's context is 4096"):
        generate(*loaded, "x" * 6000)


@pytest.mark.parametrize(
    "name",
    [
        "vision_tower.x",
        "model.visual.x",
        "model.vision_tower.x",
        "visual.x",
        "model.language_model.visual.x",
        "mtp.x",
        "language_model.mtp.x",
    ],
)
def test_c109_vision_and_mtp_tensors_are_dropped(tmp_path, random_checkpoint, loaded, name):
    shutil.copytree(random_checkpoint, tmp_path, dirs_exist_ok=True)
    tensors = synthetic.read_tensors(tmp_path) | {name: mx.zeros((2, 2))}
    synthetic.write_tensors(tmp_path, tensors)
    assert generate(*load(tmp_path), PROMPT, max_tokens=6) == generate(*loaded, PROMPT, max_tokens=6)


@pytest.mark.parametrize("make", ["mlx_lm", "python"])
def test_samplers_in_python(loaded, make):
    model, tokenizer = loaded
    if make == "mlx_lm":
        mx.random.seed(5)
        first = solo(model, tokenizer, PROMPT, 8, sampler=make_sampler(1.0, top_p=0.9, min_p=0.01))
        mx.random.seed(5)
        assert solo(model, tokenizer, PROMPT, 8, sampler=make_sampler(1.0, top_p=0.9, min_p=0.01)) == first
    else:
        seen = []

        def second_best(logprobs):
            seen.append(logprobs.shape)
            return mx.argsort(-logprobs, axis=-1)[:, 1]

        ids = solo(model, tokenizer, PROMPT, 5, sampler=second_best)
        assert len(ids) == 5
        assert set(seen) == {(1, 320)}
        assert ids != solo(model, tokenizer, PROMPT, 5)


@pytest.mark.parametrize("chunk", [4, 2048])
def test_progress(loaded, chunk):
    calls = []
    options = {"prefill_step_size": chunk, "prompt_progress_callback": lambda *numbers: calls.append(numbers)}
    for response in stream_generate(*loaded, PROMPT, max_tokens=2, **options):
        calls.append(response.generation_tokens)
    parts = list(range(0, len(PROMPT), chunk))
    assert calls == [*((part, len(PROMPT)) for part in parts), (len(PROMPT), len(PROMPT)), 1, 2]


def test_generate_step(loaded):
    model, tokenizer = loaded
    prompt = mx.array(tokenizer.encode(PROMPT))
    steps = list(generate_step(prompt, model, max_tokens=4))
    assert [token for token, _ in steps] == solo(model, tokenizer, PROMPT, 4)
    for token, logprobs in steps:
        assert logprobs.shape == (320,)
        assert math.isclose(mx.exp(logprobs).sum().item(), 1, rel_tol=1e-3)
        assert mx.argmax(logprobs).item() == token
    cache, calls = model.make_cache(), []
    options = {"prompt_cache": cache, "prompt_progress_callback": lambda *numbers: calls.append(numbers)}
    assert list(generate_step(prompt, model, max_tokens=0, **options)) == []
    assert cache[-1].offset == prompt.size
    assert calls[-1] == (prompt.size, prompt.size)
    with pytest.raises(TypeError, match=r"generate_step\(\) got an unexpected keyword argument 'tempo'"):
        next(generate_step(prompt, model, tempo=1))


def test_a_stream_is_not_left_to_the_consumer(loaded):
    stream = mx.new_stream(mx.default_device())
    here = mx.default_stream(mx.default_device())
    ids = []
    for response in stream_generate(*loaded, PROMPT, max_tokens=3, stream=stream):
        assert mx.default_stream(mx.default_device()) == here
        ids.append(response.token)
    assert ids == solo(*loaded, PROMPT, 3)


def test_other_families_run_on_mlx_lms_path(tmp_path, caplog, command):
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs

    write_tokenizer(tmp_path)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": 2}
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 259, **sizes}
    mx.random.seed(0)
    weights = dict(tree_flatten(Model(ModelArgs.from_dict(config)).parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, tokenizer = load(tmp_path)
    (notice,) = [record.message for record in caplog.records]
    assert notice.startswith("this model runs on mlx_lm's own path: model_type 'llama' is not supported")
    import mlx_lm

    want = mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=6)
    assert generate(model, tokenizer, PROMPT, max_tokens=6) == want
    assert lily_mlx.accelerate(model) is model
    prompt = mx.array(tokenizer.encode(PROMPT))
    ids = [token for token, _ in generate_step(prompt, model, max_tokens=6)]
    assert ids == solo(model, tokenizer, PROMPT, 6)
    assert batch_generate(model, tokenizer, [prompt.tolist()], max_tokens=6).texts == [tokenizer.decode(ids)]
    assert solo(model, tokenizer, PROMPT, 6, temp=1.0, seed=1) == solo(model, tokenizer, PROMPT, 6, temp=1.0, seed=1)
    caplog.clear()
    arguments = ["--prompt", PROMPT, "--ignore-chat-template", "-m", 6, "--verbose", "f", "--max-kv-size", 64]
    assert command("--model", tmp_path, *arguments)[:2] == (0, want + "\n")
    assert len(caplog.records) == 1


@pytest.mark.parametrize("verbose", [True, False], ids=["verbose", "quiet"])
@pytest.mark.parametrize("after", [0, 2])
def test_ctrl_c_prints_the_statistics_so_far(command, scripted, monkeypatch, verbose, after):
    from lily_mlx import api

    def interrupted(*arguments, **options):
        for count, item in enumerate(tokens(*arguments, **options)):
            if count == after:
                raise KeyboardInterrupt
            yield item

    tokens = api.generate_tokens
    monkeypatch.setattr(api, "generate_tokens", interrupted)
    code, out, err = command("--model", scripted, "--verbose", verbose)
    assert (code, err) == (130, "")
    lines = out.splitlines()
    if not verbose:
        assert lines == []
    elif after:
        assert lines[:3] == ["=" * 10, "".join(SCRIPT[:2]), "=" * 10]
        assert re.fullmatch(r"Generation: 2 tokens, \d+\.\d{3} tokens-per-sec", lines[4])
    else:
        assert lines == ["=" * 10, "", "=" * 10, "No text generated for this prompt"]


def test_a_real_ctrl_c():
    arguments = ["--prompt", "ROMEO:", "--ignore-chat-template", "-m", "3000"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "lily_mlx", "generate", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )
    begin = process.stdout.read(30)  # the answer has begun
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    lines = (begin + out).decode().splitlines()
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert [line.split(":")[0] for line in lines[-4:]] == ["=" * 10, "Prompt", "Generation", "Peak memory"]
    assert "\x1b" not in "".join(lines)


def test_the_documented_table_of_cases_is_true():
    """Every case has a row; a row that names a test file names one in which the case is found."""
    root = Path(__file__).parents[1]
    text = (root / "docs" / "drop_in.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (C\d+) \|(.*)\|$", text, re.MULTILINE)
    numbers = [int(name[1:]) for name, _ in rows]
    assert numbers == [*range(1, 26, 2), *range(37, 58, 2), *range(79, 118, 2)]
    for name, row in rows:
        files = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row)
        assert files, name
        for file, test in files:
            content = (root / file).read_text(encoding="utf-8")
            wanted = rf"def {test}\b" if test else rf"\b{name}\b|{name.lower()}_"
            assert re.search(wanted, content), f"{name}: {test or name} is not in {file}"
