"""`lily_mlx.benchmark`: mlx_lm.benchmark's lines."""

from __future__ import annotations

import re

import pytest

from lily_mlx.benchmark import main
from tests.model import synthetic
from tests.model.scripted import EOS
from tests.model.tokenizer import write_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("random")
    ids = write_tokenizer(directory)
    return synthetic.write_checkpoint(directory, synthetic.config(eos_token_id=ids[EOS]))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_output(model, capsys, batch_size):
    main(["--model", str(model), "-p", "6", "-g", "4", "-n", "2", "-b", str(batch_size)])
    lines = capsys.readouterr().out.splitlines()
    number = r"\d+\.\d{3}"
    values = f"prompt_tps={number}, generation_tps={number}, peak_memory={number}"
    wanted = [
        r"Running warmup\.\.",
        rf"Timing with prompt_tokens=6, generation_tokens=4, batch_size={batch_size}\.",
        rf"Trial 1:  {values}, total_time={number}",
        rf"Trial 2:  {values}, total_time={number}",
        f"Averages: {values}",
    ]
    assert len(lines) == len(wanted)
    for line, pattern in zip(lines, wanted, strict=True):
        assert re.fullmatch(pattern, line), line


def test_the_end_of_sequence_does_not_shorten_a_trial(model, monkeypatch, capsys):
    from lily_mlx import benchmark

    counts = []

    def counted(*arguments, **options):
        for response in stream(*arguments, **options):
            counts.append(response.generation_tokens)
            yield response

    stream = benchmark.stream_generate
    monkeypatch.setattr(benchmark, "stream_generate", counted)
    main(["--model", str(model), "-p", "3", "-g", "40", "-n", "1"])
    assert counts == [*range(1, 41)] * 2
    assert "Trial 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "0"], "--prompt-tokens is 0"),
        (["-n", "0"], "--num-trials is 0"),
        (["--pipeline"], "--pipeline is not supported"),
        (["-qa"], "does not support activation quantization"),
    ],
    ids=lambda a: a[0] if isinstance(a, list) else "",
)
def test_refuses(model, capsys, arguments, words):
    with pytest.raises(SystemExit) as stopped:
        main(["--model", str(model), *arguments])
    assert stopped.value.code == 1
    assert words in capsys.readouterr().err
