"""The few changes that turn Metal's spelling into C++ for OpenCL's. Every line stays where it is.

- A declaration of threadgroup memory becomes a reference to threadgroup storage of the same type, because
  OpenCL allows such declarations only in functions that are not templates.
- A constructor of a vector, `float4(...)`, becomes a call; OpenCL writes `(float4)(...)`.
- A constructor qualified with `thread` loses the qualifier: here a temporary has no address space.
- A function constant, which has its value when a pipeline is made, gets one here.
- An explicit instantiation loses its attributes.
"""

from __future__ import annotations

import re

from ..source import MAX_THREADGROUP_BYTES, rewrite_threadgroup
from .unit import Unit

_VECTOR = re.compile(r"\b(bool|u?char|u?short|u?int|u?long|half|bfloat|float)([234])\((?![&*])")
_DEPENDENT_VECTOR = re.compile(r"(?<!operator )(?<!\w)(?:metal::)?vec<([^<>]*)>\((?![&*])")
_STRUCT = re.compile(r"\b(?:struct|class)\s+(\w+)")
_THREAD_CONSTRUCTOR = re.compile(r"\b(\w+)(\((?:[^()]|\([^()]*\))*\)\s*)thread\b")
_FUNCTION_CONSTANT = re.compile(r"\bconstant\s+(\w+)\s+(\w+)\s*(\[\[function_constant\(\d+\)\]\]);")
_STORAGE = re.compile(r"\bLILY_THREADGROUP\(\w[^,]*, (\w+),")

# What the macro that `rewrite_threadgroup` writes means here.
STORAGE_DECLARATIONS = """\
template <typename T> threadgroup T& lily_storage();
#define LILY_THREADGROUP(type, name, dims) threadgroup type (&name) dims = lily_storage<type dims>()
"""


def translate(text: str) -> str:
    """Metal's spelling to the front end's."""
    text = rewrite_threadgroup(text)
    text = _VECTOR.sub(r"lily_vector<\1, \2>(", text)
    text = _DEPENDENT_VECTOR.sub(r"lily_vector<\1>(", text)
    text = _FUNCTION_CONSTANT.sub(r"constant \1 \2 = \1(1);", text)
    structs = set(_STRUCT.findall(text))

    def unqualified(match: re.Match[str]) -> str:
        return match.group(1) + match.group(2) if match.group(1) in structs else match.group()

    return _THREAD_CONSTRUCTOR.sub(unqualified, text)


def translate_unit(unit: Unit) -> str:
    """A unit's text, then one line for each instantiation."""
    text = translate(unit.text).rstrip()
    names = _threadgroup_names(text, unit.function)
    if names and text.endswith("}"):
        total = " + ".join(f"(sizeof({name}) + 15) / 16 * 16" for name in names)
        text = f'{text[:-1]} static_assert({total} <= {MAX_THREADGROUP_BYTES}, "threadgroup memory"); }}'
    lines = [f"template decltype({unit.function}{values}) {unit.function}{values};" for values in unit.instantiations]
    return "\n".join([text, *lines, ""])


def _threadgroup_names(text: str, function: str) -> list[str]:
    """Names of the threadgroup arrays at the top level of the kernel's body."""
    start = text.find("{", text.find(f"void {function}("))
    names = []
    for match in _STORAGE.finditer(text, start):
        before = text[start : match.start()]
        if before.count("{") - before.count("}") == 1:
            names.append(match.group(1))
    return names
