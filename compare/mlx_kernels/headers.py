"""MLX's Metal headers, read from the installed wheel and made ready for a kernel.

Nothing is copied into this repository: the text is found beside `mlx.core` at run time.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import mlx.core as mx

from lily_mlx.metal.errors import SourceError
from lily_mlx.metal.source import ATTRIBUTES, SourcePart, blank_comments

FOLDER = "mlx/backend/metal/kernels/"
# What `mx.fast.metal_kernel` puts before every kernel on an Apple GPU.
PRELUDE = "utils.h"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+(?:"([^"]+)"|<[^>]+>)[ \t]*$', re.MULTILINE)
_PRAGMA = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+(?:once|METAL\b.*)$", re.MULTILINE)
_MARK = re.compile(r"\[\[[^\[\]]*\]\]")
_FUNCTION_CONSTANT = re.compile(r"\bconstant\s+(\w+)\s+(\w+)\s*\[\[\s*function_constant\(\d+\)\s*\]\]\s*;")
_ATTRIBUTE_WORD = re.compile(rf"\b({'|'.join(ATTRIBUTES)})\b")
# How Apple's GPUs spread an 8x8 matrix over the lanes, as MLX writes it. `qid` is lane / 4.
_APPLE_ROW = re.compile(r"\(qid\s*&\s*4\)\s*\+\s*\(\((\w+)\s*/\s*2\)\s*%\s*4\)")
_APPLE_COLUMN = re.compile(r"\(qid\s*&\s*2\)\s*\*\s*2\s*\+\s*\((\w+)\s*%\s*2\)\s*\*\s*2")


def include_folder() -> Path:
    """The folder of MLX's headers in the installed wheel.

    Raises:
        SourceError: the wheel has no Metal headers.
    """
    folder = Path(mx.__file__).resolve().parent / "include"
    if not (folder / FOLDER / PRELUDE).exists():
        raise SourceError(f"MLX {mx.__version__} has no Metal headers in {folder / FOLDER}; install a wheel that has")
    return folder


@functools.cache
def read(name: str) -> str:
    """A header without comments, includes and pragmas of its own; lines stay where they are.

    Args:
        name: path inside MLX's folder of Metal kernels, e.g. "quantized.h".

    Raises:
        SourceError: there is no such header.
    """
    return _PRAGMA.sub("", _INCLUDE.sub("", _raw(name)))


@functools.cache
def _raw(name: str) -> str:
    path = include_folder() / FOLDER / name
    try:
        return blank_comments(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SourceError(f"MLX {mx.__version__} has no Metal header {name}: {error.strerror} ({path})") from error


def resolve(names: Iterable[str]) -> tuple[str, ...]:
    """The headers that `names` need, each once, in the order of their includes.

    Headers written in functions of Apple's compiler (`__metal_...`) implement Metal's own library and are
    left out: our runtime has that library already.
    """
    order: list[str] = []

    def visit(name: str) -> None:
        if name in order:
            return
        text = _raw(name)
        if "__metal_" in text:
            return
        for found in _INCLUDE.finditer(text):
            if found.group(1):
                visit(found.group(1).removeprefix(FOLDER))
        order.append(name)

    for name in names:
        visit(name)
    return tuple(order)


def part(name: str, text: str) -> SourcePart:
    """A text of the header `name`, with the file's path for messages."""
    return SourcePart(FOLDER + name, text)


def set_function_constants(text: str, values: Mapping[str, bool | int]) -> str:
    """Defines function constants. One without a value is removed, so that its use is a compile error."""

    def define(match: re.Match[str]) -> str:
        kind, name = match.groups()
        if name not in values:
            return "\n" * match.group().count("\n")
        value = str(values[name]).lower() if kind == "bool" else str(values[name])
        return f"constant constexpr {kind} {name} = {value};" + "\n" * match.group().count("\n")

    return _FUNCTION_CONSTANT.sub(define, text)


def strip_marks(text: str) -> str:
    """Removes `[[...]]`; names of attributes that stay (parameters, macros) get the prefix `mlx_`."""
    # Line ends stay, in macros with their backslashes.
    text = _MARK.sub(lambda match: re.sub(r"[^\\\n]", "", match.group()), text)
    return _ATTRIBUTE_WORD.sub(r"mlx_\1", text)


def use_runtime_fragments(text: str) -> str:
    """Puts the runtime's layout of 8x8 matrices for Apple's, the one place where MLX relies on the hardware's."""
    text = _APPLE_ROW.sub(r"lily_fragment_row(\1)", text)
    return _APPLE_COLUMN.sub(r"lily_fragment_column(\1)", text)
