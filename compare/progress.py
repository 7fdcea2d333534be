"""A progress bar on standard error, silent where nobody watches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")


def progress(items: Sequence[Item], name: str) -> Iterable[Item]:
    """Iterates with a bar; `disable=None` switches it off where standard error is not a terminal."""
    return tqdm(items, desc=name, disable=None, leave=False)
