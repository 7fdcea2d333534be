"""Checks of single fields of a request: each returns the value or raises with the field's name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .errors import RequestError


def shown(value: Any) -> str:
    """A value for a message, cut to a readable length."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def bad(name: str, value: Any, remedy: str) -> RequestError:
    """The error of a field."""
    return RequestError(f"{name} is {shown(value)}: {remedy}", name)


class Fields:
    """The fields of a body. Null counts as absent; what was never asked for can be listed.

    Args:
        body: the parsed JSON object.
    """

    def __init__(self, body: Mapping[str, Any]):
        self._body = body
        self._asked: set[str] = set()

    def get(self, name: str) -> Any:
        """A value as it is."""
        self._asked.add(name)
        return self._body.get(name)

    def boolean(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise bad(name, value, "give true or false")
        return value

    def integer(self, name: str, default: int | None, low: int | None = None, high: int | None = None) -> int | None:
        """A whole number between two limits."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad(name, value, "give a whole number")
        _check_range(name, value, low, high)
        return value

    def number(
        self, name: str, default: float | None, low: float | None = None, high: float | None = None
    ) -> float | None:
        """A finite number between two limits."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise bad(name, value, "give a number")
        try:
            finite = math.isfinite(float(value))
        except OverflowError:
            finite = False
        if not finite:
            raise bad(name, value, "give a finite number")
        _check_range(name, value, low, high)
        return float(value)

    def mapping(self, name: str) -> dict[str, Any]:
        """A JSON object; an empty one where it is absent."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise bad(name, value, "give a JSON object")
        return value

    def unknown(self) -> list[str]:
        """Names of the fields that hold something and were never asked for."""
        return [name for name, value in self._body.items() if name not in self._asked and value is not None]


def _check_range(name: str, value: float, low: float | None, high: float | None) -> None:
    if low is not None and value < low:
        raise bad(name, value, f"give {low:g} or more")
    if high is not None and value > high:
        raise bad(name, value, f"give at most {high:g}")
