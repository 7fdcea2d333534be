"""From the text that MLX compiles to one translation unit, with the origin of each line.

MLX's text for a kernel is header + signature + body + one instantiation, under a name that holds the template
values. Texts that differ only there share one unit, so each function is compiled once for all its
instantiations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..source import KernelText, SourcePart, strip

_INSTANTIATION = re.compile(
    r'^template \[\[host_name\("(?P<name>\w+)"\)\]\] \[\[kernel\]\] decltype\((?P=name)(?P<values><.*>)\) '
    r"(?P=name)(?P=values);$",
    re.MULTILINE,
)
_FUNCTION = re.compile(r"\[\[kernel\]\] void (\w+)\(")


@dataclass(frozen=True)
class Origin:
    """A line of a file that a kernel was made from."""

    path: str
    line: int


@dataclass(frozen=True)
class ExactText:
    """One text as MLX would hand it to the compiler, less MLX's own preamble.

    Attributes:
        name: the kernel's short name.
        text: the text.
        source: the kernel's files, if it has any.
        constants: the float constants that stand before the headers.
    """

    name: str
    text: str
    source: KernelText | None = None
    constants: str = ""


@dataclass
class Unit:
    """A kernel function and its instantiations.

    Attributes:
        name: the kernel's short name.
        function: the function's name in `text`.
        text: the function's text without instantiations.
        origins: for each line of `text`, where it comes from.
        instantiations: template arguments, e.g. "<4, 64>"; empty for a function without template.
    """

    name: str
    function: str
    text: str
    origins: list[Origin]
    instantiations: list[str] = field(default_factory=list)

    def origin(self, line: int) -> Origin:
        """Where a line (from 1) of the text comes from."""
        if 1 <= line <= len(self.origins):
            return self.origins[line - 1]
        return Origin(f"<{self.name}: instantiations>", max(1, line - len(self.origins)))


def units_of(texts: Iterable[ExactText]) -> list[Unit]:
    """The units of some texts, one for each distinct function, in the order of their first text."""
    units: dict[str, Unit] = {}
    for text in texts:
        function, body, values = _split(text.text)
        # The name holds the template values; a fixed one makes equal functions equal texts.
        fixed = f"lily_{text.name}"
        body = re.sub(rf"\b{function}\b", fixed, body)
        unit = units.get(body)
        if unit is None:
            unit = units[body] = Unit(text.name, fixed, body, _origins(text, body))
        if values and values not in unit.instantiations:
            unit.instantiations.append(values)
    return list(units.values())


def _split(text: str) -> tuple[str, str, str]:
    """The function's name, the text without the instantiation, and the template arguments."""
    function = _FUNCTION.search(text)
    if function is None:
        raise ValueError(f"no kernel function in the text that starts with {text[:60]!r}")
    instantiation = _INSTANTIATION.search(text)
    if instantiation is None:
        return function.group(1), text, ""
    body = text[: instantiation.start()] + text[instantiation.end() :]
    return function.group(1), body.rstrip() + "\n", instantiation.group("values")


def _origins(text: ExactText, body: str) -> list[Origin]:
    """Where each line of a unit comes from, by the way in which MLX and `metal_backend` put texts together."""
    lines = body.splitlines()
    generated = f"<{text.name}: written by MLX>"
    origins = [Origin(generated, number) for number in range(1, len(lines) + 1)]
    if text.source is None:
        return origins
    kept = [_kept_lines(part) for part in text.source.header_parts]
    header = [origin for part in kept for origin in part]
    first = text.constants.count("\n")
    _place(origins, lines, header, [part.text for part in text.source.header_parts], first)
    # The body follows the line that ends the signature.
    own = _kept_lines(text.source.body_part)
    body_lines = text.source.body.splitlines()
    for start in range(first + len(header), len(lines) - len(body_lines) + 1):
        if lines[start : start + len(body_lines)] == body_lines:
            origins[start : start + len(own)] = own
            return origins
    raise ValueError(f"kernel {text.name}: the body is not in the text that MLX compiles")


def _place(
    origins: list[Origin], lines: Sequence[str], found: Sequence[Origin], parts: Sequence[str], first: int
) -> None:
    expected = "".join(strip(part) for part in parts).splitlines()
    if lines[first : first + len(expected)] != expected:
        raise ValueError("the headers are not in the text that MLX compiles, or not where they should be")
    origins[first : first + len(found)] = found


def _kept_lines(part: SourcePart) -> list[Origin]:
    """The lines of a file that `strip` keeps."""
    return [Origin(part.path, number) for number, line in enumerate(part.text.splitlines(), 1) if line.strip()]
