"""Only what is known to exist in Metal is used.

Our declarations of the Metal library could be wrong. So each function and type that a kernel uses must also
occur in MLX's own Metal sources, which Apple's compiler accepts, or stand in the table below with the section
of the Metal Shading Language Specification that defines it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from .findings import Finding
from .frontend import INCLUDE, wheel_sources
from .tree import Node
from .unit import Unit

# Not in MLX's sources. Sections by title, because their numbers change between versions of the specification.
SPECIFICATION = {
    "clz": "Metal Standard Library, Integer Functions",
    "ctz": "Metal Standard Library, Integer Functions",
    "popcount": "Metal Standard Library, Integer Functions",
    "precise::exp2": "Metal Standard Library, Math Functions",
    "atomic_uint": "Data Types, Atomic Data Types",
    "atomic_int": "Data Types, Atomic Data Types",
    "uint4": "Data Types, Vector Data Types",
    "is_valid_element": "Data Types, Tensors: cooperative tensors",
}
# What a macro of our declarations hides.
_MACROS = {"__builtin_inff": "INFINITY", "__builtin_nanf": "NAN"}
# Words of the language itself, and the names that the translation puts in.
_LANGUAGE = re.compile(r"lily_\w+|(?:u?int|u?char|u?short|u?long)(?:8|16|32|64)?(?:_t)?|size_t|half|bfloat|float|bool")


def check_symbols(declarations: list[Node], unit: Unit) -> list[Finding]:
    """Names of the Metal library for which there is no evidence."""
    known = wheel_words()
    findings = []
    for declaration in declarations:
        for node, name in _library_names(declaration):
            if name in known or name in SPECIFICATION or _LANGUAGE.fullmatch(name):
                continue
            origin = unit.origin(node.line)
            message = f"{name} occurs neither in MLX's Metal sources nor in the table of the specification's names"
            findings.append(Finding(origin.path, origin.line, "symbol", message))
    return findings


@functools.cache
def wheel_words() -> frozenset[str]:
    """All identifiers of MLX's Metal sources; those of `fast` and `precise` with the namespace."""
    words: set[str] = set()
    for text in wheel_sources().values():
        code = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
        words.update(re.findall(r"[A-Za-z_]\w*", code))
        words.update(re.findall(r"\b(?:fast|precise)::\w+", code))
    return frozenset(words)


def _library_names(declaration: Node) -> Iterator[tuple[Node, str]]:
    for node in declaration.find("MEMBER_REF_EXPR"):
        # Of an object whose type is a template parameter the name is all there is.
        written = re.search(r"\.\s*(?:template\s+)?(\w+)\s*(?:<[^()]*>)?$", node.source)
        if written and written.group(1) in tensor_members():
            yield node, written.group(1)
    for node in declaration.find("DECL_REF_EXPR", "TYPE_REF", "OVERLOADED_DECL_REF", "TEMPLATE_REF"):
        if node.kind == "OVERLOADED_DECL_REF":
            # Which overload it is depends on template parameters; the name is what counts.
            written = re.search(r"((?:fast|precise)::)?(\w+)\s*(?:<[^<>]*>)?$", node.source)
            if written and written.group(2) in library_functions():
                yield node, (written.group(1) or "") + written.group(2)
            continue
        target = node.cursor.referenced
        if target is None or not str(target.location.file).startswith(str(INCLUDE)):
            continue
        if target.spelling == "lily_vector":
            vector = re.match(r"lily_vector<(\w+), (\d)>", node.source)
            if vector:
                yield node, vector.group(1) + vector.group(2)
            continue
        if target.kind.name.startswith("TEMPLATE_"):  # a template parameter inside our own declarations
            continue
        if target.spelling in _MACROS:
            yield node, _MACROS[target.spelling]
            continue
        parent = target.semantic_parent
        space = f"{parent.spelling}::" if parent is not None and parent.spelling in ("fast", "precise") else ""
        yield node, space + str(target.spelling)


@functools.cache
def tensor_members() -> frozenset[str]:
    """Methods of the tensor operations that we declare."""
    words: set[str] = set()
    for name in ("metal_tensor_types.h", "metal_performance_primitives.h"):
        words.update(re.findall(r"(\w+)\([^()]*\) const thread", (INCLUDE / name).read_text()))
    return frozenset(words)


@functools.cache
def library_functions() -> frozenset[str]:
    """Words of our declarations of the Metal library."""
    words: set[str] = set()
    for path in INCLUDE.glob("*.h"):
        words.update(re.findall(r"[A-Za-z_]\w*", path.read_text()))
    return frozenset(words)
