"""Turns Metal's dialect of C++ into what compilers without its address spaces take.

Metal overloads on address spaces: a constructor for `thread` objects and one for `threadgroup` objects, or a
specialisation for `device T*` and one for `constant T*`. Off Apple the words vanish, so the second is a
redefinition of the first, and is removed. Explicit specialisations inside a class become plain overloads,
because g++ before 14 does not take them there.
"""

from __future__ import annotations

import re

_SPACES = re.compile(r"\b(?:thread|threadgroup|device|constant)\b")
_SCOPE = re.compile(r"\b(?:namespace|struct|class|union|enum)\b")
_SPECIALISATION = re.compile(r"\s*template\s*<\s*>")
_TEMPLATE_HEADER = re.compile(r"\btemplate\s*<")


_CONSTANT = re.compile(r"(?<!const )\bconstant\s+(?!const\b|constexpr\b)(\w+)(?=\s*[&*])")


def spell_const(text: str) -> str:
    """Writes the `const` that `constant` implies: `constant int&` becomes `const constant int&`."""
    return _CONSTANT.sub(r"const constant \1", text)


def rewrite(text: str) -> str:
    """The text without what only Metal's compiler takes; lines stay where they are."""
    dropped: list[tuple[int, int]] = []
    _scan_scope(text, 0, len(text), "namespace", dropped)
    for start, end in reversed(dropped):
        text = text[:start] + "\n" * text.count("\n", start, end) + text[end:]
    return text


def matching(text: str, position: int) -> int:
    """The position of the bracket that closes the one at `position`."""
    opening = text[position]
    closing = {"{": "}", "(": ")", "<": ">", "[": "]"}[opening]
    depth = 0
    for i in range(position, len(text)):
        if text[i] == opening:
            depth += 1
        elif text[i] == closing:
            depth -= 1
            if depth == 0:
                return i
    raise ValueError(f"no {closing} closes the {opening} in line {text.count(chr(10), 0, position) + 1}")


def _scan_scope(text: str, start: int, end: int, scope: str, dropped: list[tuple[int, int]]) -> None:
    """Collects the ranges to drop, in ascending order, from a namespace or a class."""
    seen: set[str] = set()
    first = i = start  # `first`: where the current declaration begins
    while i < end:
        character = text[i]
        if character == "#" and not text[text.rfind("\n", 0, i) + 1 : i].strip():
            i = first = _directive_end(text, i)
        elif character == ";":
            first = i = i + 1
        elif character == "(":
            i = matching(text, i) + 1
        elif character == "{":
            close = matching(text, i)
            if re.match(r"\s*[,{]", text[close + 1 : end]):  # `: member{0}, ...` before the body
                i = close + 1
                continue
            head = " ".join(_SPACES.sub("", text[first:i]).split())
            kind = _kind(head)
            if kind != "namespace" and head and head in seen:
                after = re.match(r"\s*;", text[close + 1 :])
                dropped.append((_skip_space(text, first), close + 1 + (after.end() if after else 0)))
            else:
                seen.add(head)
                specialisation = _SPECIALISATION.match(text, first)
                if scope != "namespace" and specialisation and not kind:
                    dropped.append(specialisation.span())
                if kind:
                    _scan_scope(text, i + 1, close, kind, dropped)
            i = first = close + 1
        elif character == ":" and re.search(r"\b(?:public|private|protected)\s*$", text[first:i]):
            first = i = i + 1
        else:
            i += 1


def _kind(head: str) -> str | None:
    """`namespace`, `struct`... if the head opens a scope of declarations."""
    head = re.sub(r"\s+", " ", head)
    while _TEMPLATE_HEADER.match(head):
        head = head[matching(head, head.index("<")) + 1 :].lstrip()
    found = _SCOPE.match(head)
    return found.group() if found and "(" not in head else None


def _directive_end(text: str, position: int) -> int:
    """The end of a preprocessor directive and its continued lines."""
    while True:
        newline = text.find("\n", position)
        if newline < 0:
            return len(text)
        if not text[:newline].rstrip(" \t").endswith("\\"):
            return newline + 1
        position = newline + 1


def _skip_space(text: str, position: int) -> int:
    while text[position].isspace():
        position += 1
    return position
