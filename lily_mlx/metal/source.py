"""Kernel text: reading, stripping, checking, and the one rewrite that `cpu` and `cuda` need.

A kernel is a body (what stands between the braces of a Metal kernel function, as
`mx.fast.metal_kernel(source=...)` takes it) and headers with helper functions. MLX decides which
attributes and shape buffers a kernel gets by searching the body for their names, never the headers;
the checks here turn the silent failures that follow from that into messages.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import SourceError

MAX_BUFFERS = 31
MAX_THREADGROUP_BYTES = 32_768

# The attributes that MLX adds to a kernel's signature when its body names them, and their Metal types.
ATTRIBUTES: Mapping[str, str] = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}
SHAPE_SUFFIXES = ("_shape", "_strides", "_ndim")


@dataclass(frozen=True)
class SourcePart:
    """One file of a kernel: where it came from, and its text with comments blanked (same lines)."""

    path: str
    text: str


@dataclass(frozen=True)
class KernelText:
    """A kernel's text in the two forms that the backends need.

    `header` and `body` are stripped of comments and blank space: what MLX sees. `header_parts` and
    `body_part` keep the lines of the files, so that a compiler's message can name the right one.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header_parts: tuple[SourcePart, ...]
    body_part: SourcePart

    @functools.cached_property
    def header(self) -> str:
        return "".join(strip(part.text) for part in self.header_parts)

    @functools.cached_property
    def body(self) -> str:
        return strip(self.body_part.text)

    @functools.cached_property
    def digest(self) -> str:
        """A short hash of everything that decides the kernel's meaning."""
        content = "\0".join([self.name, *self.inputs, "", *self.outputs, self.header, self.body])
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @functools.cached_property
    def attributes(self) -> tuple[str, ...]:
        """The attributes that the body uses, by MLX's rule (a plain substring search)."""
        return tuple(name for name in ATTRIBUTES if name in self.body)

    @functools.cached_property
    def shape_buffers(self) -> tuple[str, ...]:
        """The `x_shape`, `x_strides` and `x_ndim` parameters that the body uses."""
        return tuple(name + suffix for name in self.inputs for suffix in SHAPE_SUFFIXES if name + suffix in self.body)


_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def blank_comments(text: str) -> str:
    """Replaces comments by blanks and keeps every line where it was."""

    def blank(match: re.Match[str]) -> str:
        token = match.group()
        return token if token.startswith('"') else re.sub(r"[^\n]", " ", token)

    return _COMMENT_OR_STRING.sub(blank, text)


def strip(text: str) -> str:
    """Removes comments, indentation and empty lines. MLX hashes or compares this text at each launch."""
    lines = (re.sub(r"[ \t]+", " ", line.strip()) for line in blank_comments(text).splitlines())
    return "".join(line + "\n" for line in lines if line)


def read_text(
    name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], body: Path, headers: tuple[Path, ...]
) -> KernelText:
    """Reads a kernel's files.

    Raises:
        SourceError: a file is missing, is not ASCII, or breaks a rule of `check_text`.
    """
    return make_text(name, inputs, outputs, _read_part(name, body), tuple(_read_part(name, h) for h in headers))


def make_text(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    body: SourcePart,
    headers: tuple[SourcePart, ...] = (),
) -> KernelText:
    """Builds and checks a `KernelText` from parts whose comments may still be there."""
    for part in (*headers, body):
        position = next((i for i, c in enumerate(part.text) if ord(c) > 127), None)
        if position is not None:
            line = part.text.count("\n", 0, position) + 1
            raise SourceError(
                f"kernel {name}: {part.path}:{line} holds the non-ASCII character {part.text[position]!r}; "
                "Metal sources reach the compiler as ASCII, so write it in ASCII"
            )
    blanked = [SourcePart(part.path, blank_comments(part.text)) for part in (*headers, body)]
    text = KernelText(name, tuple(inputs), tuple(outputs), tuple(blanked[:-1]), blanked[-1])
    check_text(text)
    return text


def _read_part(name: str, path: Path) -> SourcePart:
    try:
        return SourcePart(str(path), path.read_bytes().decode("latin-1"))
    except OSError as error:
        raise SourceError(f"kernel {name}: cannot read {path}: {error.strerror}") from error


def check_text(text: KernelText) -> None:
    """Checks the rules that MLX and Metal set for a kernel's text.

    Raises:
        SourceError: with the file, the name and the remedy.
    """
    for part in text.header_parts:
        hidden = [*ATTRIBUTES, *(n + suffix for n in text.inputs for suffix in SHAPE_SUFFIXES)]
        for name in hidden:
            found = re.search(rf"\b{name}\b", part.text)
            if found:
                raise SourceError(
                    f"kernel {text.name}: {part.path}:{_line(part.text, found.start())} names {name} in a "
                    "header, where MLX does not look for it; use it in the body and pass it to the helper"
                )
    for name in text.inputs:
        for suffix in SHAPE_SUFFIXES:
            for found in re.finditer(re.escape(name + suffix), text.body_part.text):
                word = re.search(r"\w*$", text.body_part.text[: found.start()])
                if (word and word.group()) or re.match(r"\w", text.body_part.text[found.end() :][:1]):
                    line = _line(text.body_part.text, found.start())
                    raise SourceError(
                        f"kernel {text.name}: {text.body_part.path}:{line} has an identifier that contains "
                        f"{name + suffix!r}, so MLX would add that buffer; rename the identifier"
                    )
    if not text.attributes:
        raise SourceError(
            f"kernel {text.name}: the body of {text.body_part.path} uses no attribute such as "
            "thread_position_in_grid; MLX writes a broken signature for such a kernel"
        )
    buffers = len(text.inputs) + len(text.outputs) + len(text.shape_buffers)
    if buffers > MAX_BUFFERS:
        raise SourceError(
            f"kernel {text.name}: {buffers} buffers (inputs, outputs and shapes); Metal allows {MAX_BUFFERS}"
        )
    for part in (*text.header_parts, text.body_part):
        found = _INITIALISED_THREADGROUP.search(part.text)
        if found:
            raise SourceError(
                f"kernel {text.name}: {part.path}:{_line(part.text, found.start())} initialises threadgroup "
                "memory in its declaration; assign it after a barrier instead"
            )


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


_TYPE = r"[A-Za-z_][\w:]*(?:\s*<[^;{}()=]*>)?"
_DECLARATOR = r"\w+\s*(?:\[[^\[\];]*\]\s*)*"
_THREADGROUP_DECLARATION = re.compile(
    rf"(?:alignas\s*\([^)]*\)\s*)?\bthreadgroup\s+({_TYPE})\s+({_DECLARATOR}(?:,\s*{_DECLARATOR})*);"
)
_INITIALISED_THREADGROUP = re.compile(rf"\bthreadgroup\s+{_TYPE}\s+{_DECLARATOR}=")


def rewrite_threadgroup(text: str) -> str:
    """Turns declarations of threadgroup memory into `LILY_THREADGROUP(type, name, [dims]);`.

    In a declaration `threadgroup` means storage, in a pointer type it means nothing off Apple; a macro
    cannot tell the two apart. Lines stay where they are.
    """

    def rewrite(match: re.Match[str]) -> str:
        kind, declarators = match.group(1).strip(), match.group(2)
        statements = []
        if "," in kind:  # a comma would split the macro's argument
            alias = "Threadgroup_" + re.match(r"\w+", declarators).group()  # type: ignore[union-attr]
            statements.append(f"using {alias} = {kind};")
            kind = alias
        for declarator in declarators.split(","):
            name, dims = re.match(r"\s*(\w+)\s*(.*)", declarator, re.DOTALL).groups()  # type: ignore[union-attr]
            statements.append(f"LILY_THREADGROUP({kind}, {name}, {''.join(dims.split())});")
        return " ".join(statements) + "\n" * match.group().count("\n")

    return _THREADGROUP_DECLARATION.sub(rewrite, text)


_SIZES = {
    "bool": 1, "char": 1, "uchar": 1, "int8_t": 1, "uint8_t": 1,
    "half": 2, "bfloat": 2, "bfloat16_t": 2, "float16_t": 2, "short": 2, "ushort": 2,
    "float": 4, "int": 4, "uint": 4, "int32_t": 4, "uint32_t": 4, "atomic_uint": 4, "atomic_int": 4,
    "long": 8, "ulong": 8, "size_t": 8, "int64_t": 8, "uint64_t": 8,
}  # fmt: skip
_CONSTANT = re.compile(r"\bconstexpr\s+(?:int|uint|short|ushort|size_t|bool)\s+(\w+)\s*=\s*([^;]+);")
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip
_COMPARISONS = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


def threadgroup_bytes(text: KernelText, template: Mapping[str, object], sizes: Mapping[str, int]) -> int | None:
    """Bytes of threadgroup memory that a kernel declares, or None where the text is too clever to tell.

    Args:
        template: values of the template parameters.
        sizes: bytes of the types among them, by parameter name.
    """
    values = {name: int(value) for name, value in template.items() if isinstance(value, (bool, int))}
    for part in (*text.header_parts, text.body_part):
        for name, expression in _CONSTANT.findall(part.text):
            value = _evaluate(expression, values)
            if value is not None:
                values[name] = value
    total = 0
    for kind, declarators in _THREADGROUP_DECLARATION.findall(text.body_part.text):
        base = re.match(r"(\w+?)([234]?)$", kind.strip())
        size = {**_SIZES, **sizes}.get(kind.strip())
        if size is None and base and base.group(2):
            scalar = _SIZES.get(base.group(1))
            size = scalar and scalar * (4 if base.group(2) == "3" else int(base.group(2)))
        if size is None:
            return None
        for declarator in declarators.split(","):
            count = 1
            for dim in re.findall(r"\[([^\]]*)\]", declarator):
                value = _evaluate(dim, values)
                if value is None:
                    return None
                count *= value
            total += (size * count + 15) // 16 * 16
    return total


def _evaluate(expression: str, values: Mapping[str, int]) -> int | None:
    """Evaluates an integer expression of constants, at most one choice `a ? b : c` among them, or returns None."""
    choice = re.fullmatch(r"([^?:]+)\?([^?:]+):([^?:]+)", expression.strip(), re.DOTALL)
    if choice:
        condition = _evaluate(choice.group(1), values)
        return None if condition is None else _evaluate(choice.group(2 if condition else 3), values)

    def visit(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return int(node.value)
        if isinstance(node, ast.Name):
            return values[node.id]
        if isinstance(node, ast.BinOp):
            return int(_OPERATORS[type(node.op)](visit(node.left), visit(node.right)))  # type: ignore[index]
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return int(_COMPARISONS[type(node.ops[0])](visit(node.left), visit(node.comparators[0])))  # type: ignore[index]
        raise KeyError

    try:
        return visit(ast.parse(expression.strip().replace("/", "//"), mode="eval").body)
    except (KeyError, SyntaxError, ZeroDivisionError):
        return None
