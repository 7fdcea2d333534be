"""The commands have the flags of mlx_lm's commands: a flag that mlx_lm adds or changes fails here."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import re
from pathlib import Path

import pytest

# Flags of ours that mlx_lm does not have.
OURS = {"--backend", "--version"}
# Defaults that differ on purpose: without --model the bundled checkpoint is used.
OTHER_DEFAULT = {("chat", "model"), ("cache_prompt", "model")}
# Digests of mlx_lm's help texts, which are not repeated here. A change means: read the new text, see whether ours
# still says the same and does it, then update the digest.
HELP = {
    "generate": {
        "-h": "608017daf42d",
        "--model": "b9bdb75ff29d",
        "--trust-remote-code": "328525f203a0",
        "--adapter-path": "6ac3bd6aab3e",
        "--extra-eos-token": "1c6d45fb7ec9",
        "--system-prompt": "c764554c3edf",
        "--prompt": "3d5cd8dc1693",
        "--image": "c1710cdeae25",
        "--prefill-response": "7e0bc5d3dd86",
        "--max-tokens": "877bc91aff34",
        "--temp": "fff8c2b81733",
        "--top-p": "d1c2a484df5f",
        "--min-p": "933615238eaa",
        "--top-k": "83fb09c9081f",
        "--xtc-probability": "ebed58d9cc34",
        "--xtc-threshold": "72d3f0ea2e08",
        "--min-tokens-to-keep": "b8c7459bf97a",
        "--seed": "52fb25ab7716",
        "--ignore-chat-template": "34c82851da3e",
        "--use-default-chat-template": "3789dd5b79ef",
        "--chat-template-config": "b85067811fe7",
        "--verbose": "b415e6a59881",
        "--max-kv-size": "244232020fea",
        "--prefill-step-size": "d95146216f4f",
        "--prompt-cache-file": "b3cce0578e18",
        "--quantize-activations": "08bf0b79b4f4",
        "--kv-bits": "a12a9e857eee",
        "--kv-group-size": "b4c51759e16e",
        "--quantized-kv-start": "ea23fd431cd7",
        "--draft-model": "1e3d9ce4ca33",
        "--num-draft-tokens": "5378350b4b15",
    },
    "chat": {
        "-h": "608017daf42d",
        "--model": "d5a78222a829",
        "--trust-remote-code": "328525f203a0",
        "--adapter-path": "6ac3bd6aab3e",
        "--temp": "fff8c2b81733",
        "--top-p": "d1c2a484df5f",
        "--xtc-probability": "ebed58d9cc34",
        "--xtc-threshold": "ccb514ef856c",
        "--seed": "52fb25ab7716",
        "--max-kv-size": "244232020fea",
        "--prefill-step-size": "d95146216f4f",
        "--max-tokens": "877bc91aff34",
        "--system-prompt": "c764554c3edf",
        "--pipeline": "0dc1cfa4e7f4",
    },
    "benchmark": {
        "-h": "608017daf42d",
        "--model": "b9bdb75ff29d",
        "--prompt-tokens": "803cdf1a1049",
        "--generation-tokens": "ad353e93d54b",
        "--batch-size": "8cfe32a04155",
        "--num-trials": "23d1179cf959",
        "--pipeline": "0dc1cfa4e7f4",
        "--quantize-activations": "08bf0b79b4f4",
        "--prefill-step-size": "f4ce3c45507c",
        "--delay": "a98253cbd996",
        "--trust-remote-code": "ff5efec6011e",
    },
    "cache_prompt": {
        "-h": "608017daf42d",
        "--model": "d5a78222a829",
        "--adapter-path": "6ac3bd6aab3e",
        "--trust-remote-code": "328525f203a0",
        "--eos-token": "1c943cb022de",
        "--max-kv-size": "244232020fea",
        "--prompt-cache-file": "40e7c35358a6",
        "--prompt": "3d5cd8dc1693",
        "--kv-bits": "a12a9e857eee",
        "--kv-group-size": "b4c51759e16e",
        "--quantized-kv-start": "ea23fd431cd7",
    },
}
COMMANDS = list(HELP)


def actions(command: str, package: str) -> dict[str, argparse.Action]:
    module = importlib.import_module(f"{package}.{command}")
    parser = module.make_parser() if package == "lily_mlx" else module.setup_arg_parser()
    return {action.option_strings[0]: action for action in parser._actions}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_mlx_lm_and_no_other(command):
    ours, theirs = actions(command, "lily_mlx"), actions(command, "mlx_lm")
    assert theirs.keys() - ours.keys() == set(), "mlx_lm has new flags"
    assert ours.keys() - theirs.keys() <= OURS, "flags that mlx_lm does not have any more"


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_mean_the_same(command):
    ours, theirs = actions(command, "lily_mlx"), actions(command, "mlx_lm")
    for flag, want in theirs.items():
        got = ours[flag]
        for field in ("option_strings", "dest", "nargs", "const", "required", "choices"):
            assert getattr(got, field) == getattr(want, field), f"{flag}: {field}"
        assert type(got) is type(want), flag
        assert (got.type or str) is (want.type or str) or got.type.__name__ == "truth", f"{flag}: type"
        if (command, got.dest) not in OTHER_DEFAULT:
            assert got.default == want.default, f"{flag}: default"
        assert bool(got.help), f"{flag}: no help"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_mlx_lm_is_the_one_that_was_read(command):
    digests = {flag: digest(action.help or "") for flag, action in actions(command, "mlx_lm").items()}
    assert digests == HELP[command]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_row_in_the_documentation(command):
    text = (Path(__file__).parents[1] / "docs" / "drop_in.md").read_text(encoding="utf-8")
    section = text.partition(f"\n### {command}\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| (`-.*?) \| (same|better|refused|mlx_lm's path) \|", section, re.MULTILINE)
    documented = {flag for names, _ in rows for flag in re.findall(r"`(-[^`]+)`", names)}
    wanted = {flag for action in actions(command, "mlx_lm").values() for flag in action.option_strings}
    assert documented == wanted - {"-h", "--help"}


@pytest.mark.parametrize("text", ["True", "T", "yes", "0", "", "False", "f", "FALSE", "F"])
def test_truth_values(text):
    from mlx_lm.generate import str2bool

    from lily_mlx.command import truth

    assert truth(text) == str2bool(text)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("generate", ["--model", "m", "--prompt", "-", "--kv-bits", "4", "--verbose", "f", "-qa", "--temp", "0.5"]),
        ("generate", ["--model", "m", "--extra-eos-token", "a", "b", "--prompt=-x", "--backend", "cpu"]),
        ("chat", ["--model", "m", "-m", "3", "--max-kv-size", "7", "--pipeline"]),
        ("benchmark", ["--model", "m", "-p", "3", "-g", "2"]),
        ("cache_prompt", ["--model", "m", "--prompt", "a b", "--prompt-cache-file", "f", "--kv-bits", "8"]),
    ],
)
def test_arguments_are_handed_on_to_mlx_lm(command, arguments):
    from lily_mlx.command import mlx_lm_arguments

    parser = importlib.import_module(f"lily_mlx.{command}").make_parser()
    args = parser.parse_args(arguments)
    theirs = importlib.import_module(f"mlx_lm.{command}").setup_arg_parser()
    handed = vars(theirs.parse_args(mlx_lm_arguments(parser, args)))
    assert handed == {name: value for name, value in vars(args).items() if name != "backend"}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
