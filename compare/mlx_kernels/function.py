"""A kernel function of a Metal header: its template parameters, parameters and body."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lily_mlx.metal.errors import SourceError
from lily_mlx.metal.source import ATTRIBUTES

from .portable import matching

_KERNEL = re.compile(r"\[\[\s*kernel\b[^\]]*\]\]\s*void\s+(\w+)\s*\(")
_MARK = re.compile(r"\[\[([^\[\]]*)\]\]")


@dataclass(frozen=True)
class TemplateParameter:
    """A template parameter: `kind` is "typename" or a type such as "int"; `default` may be None."""

    kind: str
    name: str
    default: str | None


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel function.

    Attributes:
        declaration: its type and name, e.g. "const device T* x".
        attribute: the kernel attribute that it stands for, or None for a buffer.
        optional: a function constant decides whether the buffer exists.
    """

    declaration: str
    name: str
    attribute: str | None
    optional: bool

    @property
    def is_pointer(self) -> bool:
        return "*" in self.declaration

    @property
    def is_output(self) -> bool:
        words = re.findall(r"\w+", self.declaration)
        return self.attribute is None and self.is_pointer and "device" in words and "const" not in words

    @property
    def value_type(self) -> str:
        """The type without address space, const, `*`, `&` and name, e.g. "int"."""
        words = re.findall(r"\w+", self.declaration[: -len(self.name)])
        return " ".join(word for word in words if word not in ("const", "constant", "device", "thread"))


@dataclass(frozen=True)
class KernelFunction:
    """A kernel function. `start` and `end` are its place in the header, `line` that of its body."""

    name: str
    template: tuple[TemplateParameter, ...]
    parameters: tuple[Parameter, ...]
    body: str
    line: int
    start: int
    end: int


def find_kernels(text: str) -> dict[str, KernelFunction]:
    """The kernel functions of a header whose comments are blanked, by name."""
    return {match.group(1): _parse(text, match) for match in _KERNEL.finditer(text)}


def remove_kernels(text: str) -> str:
    """The header without its kernel functions; lines stay where they are."""
    for kernel in sorted(find_kernels(text).values(), key=lambda kernel: -kernel.start):
        text = text[: kernel.start] + "\n" * text.count("\n", kernel.start, kernel.end) + text[kernel.end :]
    return text


def _parse(text: str, match: re.Match[str]) -> KernelFunction:
    name = match.group(1)
    start = match.start()
    template: tuple[TemplateParameter, ...] = ()
    header = re.search(r"template\s*<(?:(?!template\s*<).)*>\s*$", text[:start], re.DOTALL)
    if header:
        start = header.start()
        inside = header.group().rstrip()
        template = tuple(map(_template_parameter, _split(inside[inside.index("<") + 1 : -1])))
    opening = match.end() - 1
    closing = matching(text, opening)
    parameters = tuple(map(_parameter, _split(text[opening + 1 : closing])))
    brace = text.index("{", closing)
    if text[closing + 1 : brace].strip():
        raise SourceError(f"kernel {name} of MLX has no body after its parameters")
    end = matching(text, brace) + 1
    return KernelFunction(
        name, template, parameters, text[brace + 1 : end - 1], text.count("\n", 0, brace) + 1, start, end
    )


def _split(text: str) -> list[str]:
    """Splits at the commas that no bracket encloses."""
    items, depth, current = [], 0, ""
    for character in text:
        depth += (character in "<([{") - (character in ">)]}")
        if character == "," and depth == 0:
            items.append(current)
            current = ""
        else:
            current += character
    return [item.strip() for item in (*items, current) if item.strip()]


def _template_parameter(text: str) -> TemplateParameter:
    declaration, _, default = text.partition("=")
    *kind, name = declaration.split()
    words = [word for word in kind if word != "const"]
    return TemplateParameter("typename" if words == ["class"] else " ".join(words), name, default.strip() or None)


def _parameter(text: str) -> Parameter:
    marks = " ".join(_MARK.findall(text))
    declaration = " ".join(_MARK.sub("", text).split())
    name = re.findall(r"\w+", declaration)[-1]
    attribute = next((word for word in re.findall(r"\w+", marks) if word in ATTRIBUTES), None)
    return Parameter(declaration, name, attribute, "function_constant" in marks)
