"""All checks at some sizes."""

from __future__ import annotations

from . import attention, deltanet, linear, mlp, moe
from .check import Check
from .sizes import Sizes


def all_checks(sizes: Sizes) -> list[Check]:
    """The checks of every kernel function."""
    families = (linear, deltanet, attention, moe, mlp)
    return [check for family in families for check in family.checks(sizes)]
