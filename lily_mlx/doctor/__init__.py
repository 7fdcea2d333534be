"""Checks of the kernels on the user's own machine.

`python -m lily_mlx.doctor` compares every kernel with its reference there, and `selftest` is the short form that the
engine runs once for each device and version.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command `lily_mlx doctor`; ends the process with its exit status."""
    from lily_mlx.command import reader_may_leave

    from .command import run

    with reader_may_leave():
        status = run(arguments)
    raise SystemExit(status)
