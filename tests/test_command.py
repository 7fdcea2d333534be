"""What the commands share."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from lily_mlx.command import reader_may_leave

with reader_may_leave():
    for _ in range(100_000):
        print("a line that nobody reads")
"""


def test_a_reader_that_leaves_ends_the_process_without_a_word():
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141
