"""What the commands share."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from lily_mlx.command import reader_may_leave

with reader_may_leave():
    for _ in range({lines}):
        print("a line that nobody reads")
    if {breaks}:
        read, write = os.pipe()
        os.close(read)
        os.write(write, b"another pipe")
    {end}
"""


def run(lines: int, unbuffered: bool, breaks: bool = False, end: str = "pass", reads: bool = False) -> tuple[int, str]:
    """Exit code and stderr of a command whose reader leaves after the first line, or stays."""
    code = SCRIPT.format(lines=lines, breaks=breaks, end=end)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONUNBUFFERED": "1"} if unbuffered else {}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        if reads:
            _, errors = process.communicate(timeout=60)
        else:
            process.stdout.close()
            errors = process.stderr.read()
        return process.wait(60), errors


@pytest.mark.parametrize("unbuffered", [False, True], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("lines", [1, 100_000], ids=["one-line", "many-lines"])
def test_a_reader_that_leaves_ends_the_process_without_a_word(lines, unbuffered):
    assert run(lines, unbuffered) == (141, "")


@pytest.mark.parametrize("unbuffered", [False, True], ids=["buffered", "unbuffered"])
def test_another_exit_code_stays(unbuffered):
    assert run(0, unbuffered, end="sys.exit(3)") == (3, "")


def test_a_broken_pipe_of_another_kind_is_an_error():
    code, errors = run(1, False, breaks=True, reads=True)
    assert code == 1
    assert "BrokenPipeError" in errors


def test_a_reader_that_stays_sees_nothing_of_it():
    assert run(3, False, reads=True) == (0, "")
