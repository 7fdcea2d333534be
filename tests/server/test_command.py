"""The command's flags: those of mlx_lm.server, their ranges, and the way to mlx_lm's own server."""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest import mock

import pytest
from mlx_lm import server as mlx_lm_server

from lily_mlx.checkpoints import bundled_checkpoint
from lily_mlx.server import command


def flags(parser):
    return {action.option_strings[0] for action in parser._actions if action.option_strings}


def mlx_lm_parser():
    class FoundError(Exception):
        pass

    def parse(parser, *_):
        raise FoundError(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse), pytest.raises(FoundError) as found:
        mlx_lm_server.main()
    return found.value.args[0]


def test_every_flag_of_mlx_lm_is_known():
    assert flags(mlx_lm_parser()) - flags(command.make_parser()) == set()


@pytest.mark.parametrize(
    "flag", ["host", "port", "temp", "top_p", "top_k", "min_p", "max_tokens", "decode_concurrency", "prompt_concurrency",
             "prefill_step_size"]
)  # fmt: skip
def test_defaults_are_those_of_mlx_lm(flag):
    assert command.make_parser().get_default(flag) == mlx_lm_parser().get_default(flag)


def test_the_documentation_names_every_flag():
    text = (Path(command.__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    assert [flag for flag in flags(command.make_parser()) - {"-h"} if f"`{flag}" not in text] == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("5", 5), ("2KB", 2000), ("1.5M", 1_500_000), ("8GB", 8 * 10**9), ("1t", 10**12), ("0", 0)],
)
def test_sizes(text, size):
    assert command.size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "nan", "inf", "5 apples"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no size"):
        command.size_in_bytes(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temp", "-1"], "temperature is -1"),
        (["--top-p", "2"], "top_p is 2"),
        (["--top-k", "-1"], "top_k is -1"),
        (["--max-tokens", "0"], "--max-tokens is 0"),
        (["--decode-concurrency", "0"], "--decode-concurrency is 0"),
        (["--max-waiting", "-1"], "--max-waiting is -1"),
        (["--chat-template-args", "{"], "--chat-template-args"),
        (["--draft-model", "x"], "--draft-model is not supported"),
        (["--pipeline"], "--pipeline is not supported"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--prompt-cache-dir", __file__], "--prompt-cache-dir"),
        (["--prompt-cache-dir", "unused", "--prompt-cache-bytes", "0"], "--prompt-cache-bytes is 0"),
        (["--prompt-cache-dir", "unused", "--prompt-cache-size", "0"], "--prompt-cache-size is 0"),
        (["--prompt-cache-disk-bytes", "1GB"], "--prompt-cache-disk-bytes"),
    ],
    ids=lambda value: " ".join(value[::2]) if isinstance(value, list) else "",
)
def test_bad_values_end_with_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert message in line


def test_mlx_lms_server_runs_for_quantised_keys_and_values(caplog):
    with mock.patch.object(mlx_lm_server, "main") as main, mock.patch("sys.argv", ["x"]) as _:
        seen = []
        main.side_effect = lambda: seen.append(__import__("sys").argv)
        command.main(["--model", str(bundled_checkpoint()), "--kv-bits", "8", "--port", "9", "--max-waiting", "3"])
    assert "--max-waiting has no effect" in caplog.text
    (arguments,) = seen
    assert arguments[0] == "mlx_lm.server"
    assert set(arguments[1:]) == {f"--model={bundled_checkpoint()}", "--kv-bits=8", "--port=9"}
