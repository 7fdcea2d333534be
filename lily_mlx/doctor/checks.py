"""All checks at some sizes."""

from __future__ import annotations

from . import attention, deltanet, linear, moe
from .check import Check
from .sizes import Sizes


def all_checks(sizes: Sizes) -> list[Check]:
    """The checks of every kernel function."""
    return [*linear.checks(sizes), *deltanet.checks(sizes), *attention.checks(sizes), *moe.checks(sizes)]
