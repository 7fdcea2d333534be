"""The recipes of the README run as they are printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SHELL = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
COMMANDS = [line for line in SHELL if line.startswith(("lily_mlx", "python -m"))]


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LILY_MLX_BACKEND": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python(number: int) -> None:
    done = run(["-c", PYTHON[number]])
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5


def test_there_are_recipes() -> None:
    assert len(PYTHON) >= 2
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_exist(command: str) -> None:
    """Every flag of a command is one that its --help names."""
    words = shlex.split(command)
    flags = [word for word in words if word.startswith("-") and word != "-m"]
    module = words[2] if words[0] == "python" else ".".join(words[: 1 if "." in words[0] else 2])
    done = run(["-m", module, "--help"])
    assert done.returncode == 0, done.stderr
    missing = [flag for flag in flags if not re.search(rf"(?<![\w-]){re.escape(flag)}\b", done.stdout)]
    assert not missing
