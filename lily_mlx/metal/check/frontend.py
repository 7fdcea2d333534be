"""libclang as a front end for Metal."""

from __future__ import annotations

import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..source import blank_comments
from .findings import Finding
from .translation import STORAGE_DECLARATIONS, translate, translate_unit
from .unit import Unit

INCLUDE = Path(__file__).resolve().parent / "include"
# Where the files that exist only in memory stand.
VIRTUAL = "/lily_mlx_check"
PREAMBLE = f"{VIRTUAL}/preamble.h"
METAL_HEADERS = (
    "metal_stdlib", "metal_math", "metal_common", "metal_simdgroup", "metal_simdgroup_matrix", "metal_integer",
    "metal_atomic", "metal_logging", "metal_compute",
)  # fmt: skip

_ARGUMENTS = (
    "-x", "clcpp", "-cl-std=clc++2021",
    # A fixed target, so that the verdict is the same on every machine. It has bfloat.
    "-target", "arm64-apple-macos",
    "-nostdinc", "-cl-no-stdinc",
    # No double. Without a generic address space a temporary would have no constructor; that every pointer
    # names its address space is checked on the tree.
    "-Xclang", "-cl-ext=-all,+cl_khr_fp16,+__opencl_c_generic_address_space",
    "-cl-single-precision-constant",
    "-ferror-limit=0", "-Wno-everything", "-Wimplicit-float-conversion",
)  # fmt: skip

# Metal 4's headers, which a text includes by name.
_TENSOR_HEADERS = {
    "metal_tensor": "metal_tensor_types.h",
    "MetalPerformancePrimitives/MetalPerformancePrimitives.h": "metal_performance_primitives.h",
}
_METAL_4 = "-D__METAL_VERSION__=400"

# Included before the text of a unit, so that its line numbers stay what they are. MLX defines shuffles of
# bfloat; a declaration that comes first makes their use an error.
BEFORE = f"{VIRTUAL}/before.h"
_SHUFFLES = (
    "shuffle",
    "shuffle_xor",
    "shuffle_up",
    "shuffle_down",
    "shuffle_rotate_up",
    "shuffle_rotate_down",
    "broadcast",
)
_BEFORE = "\n".join(
    [
        '#include "metal_stdlib.h"',
        *(
            f"namespace metal {{ bfloat simd_{name}(bfloat, ushort) "
            '__attribute__((unavailable("a shuffle moves float, int or uint, not bfloat"))); }'
            for name in _SHUFFLES
        ),
        f'#include "{PREAMBLE}"',
        "",
    ]
)


class FrontEndMissingError(RuntimeError):
    """libclang is not installed."""


def clang() -> Any:
    """The module clang.cindex."""
    try:
        from clang import cindex  # type: ignore[import-untyped]
    except ImportError:
        raise FrontEndMissingError("the check needs libclang: pip install 'lily_mlx[check]'") from None
    return cindex


@functools.cache
def wheel_include() -> Path:
    """The directory of MLX's headers in the installed wheel."""
    spec = importlib.util.find_spec("mlx")
    for location in (spec and spec.submodule_search_locations) or ():
        include = Path(location) / "include"
        if (include / "mlx/backend/metal/kernels/utils.h").exists():
            return include
    raise FrontEndMissingError("the installed MLX has no Metal headers (mlx/include/mlx/backend/metal/kernels)")


@functools.cache
def wheel_sources() -> dict[str, str]:
    """MLX's Metal headers in the wheel: text by path."""
    root = wheel_include() / "mlx/backend/metal/kernels"
    return {str(path): path.read_text() for path in sorted(root.rglob("*.h"))}


@functools.cache
def _virtual_files() -> tuple[tuple[str, str], ...]:
    files = [(f"{INCLUDE}/{name}", '#include "metal_stdlib.h"\n') for name in METAL_HEADERS]
    files += [(f"{INCLUDE}/{name}", f'#include "{INCLUDE}/{file}"\n') for name, file in _TENSOR_HEADERS.items()]
    files += [(path, translate(blank_comments(text))) for path, text in wheel_sources().items()]
    files.append((PREAMBLE, _preamble()))
    return tuple(files)


def _preamble() -> str:
    """What stands before a kernel's text: our declarations, then what MLX itself puts there."""
    math = (wheel_include() / "mlx/backend/metal/kernels/bf16_math.h").read_text()
    internal = sorted(set(re.findall(r"__metal_\w+", math)) - {"__metal_get_simdgroup_size"})
    return "\n".join(
        [
            '#include "metal_stdlib.h"',
            STORAGE_DECLARATIONS,
            # Functions of Apple's compiler that MLX's bfloat math is built on.
            *(f"template <typename T, typename... A> T {name}(T, A...);" for name in internal),
            "ushort __metal_get_simdgroup_size(ushort);",
            "#define __METAL_MAYBE_FAST_MATH__ 1",
            "#define __METAL_FAST_MATH__ 1",
            "#define __METAL_PRECISE_MATH__ 0",
            '#include "mlx/backend/metal/kernels/utils.h"',
            "",
        ]
    )


@dataclass(frozen=True)
class Compiled:
    """A compiled unit: libclang's translation unit, the text that it saw, and what it rejects."""

    parsed: Any
    text: str
    findings: list[Finding]


class FrontEnd:
    """Compiles units."""

    def __init__(self) -> None:
        self._index = clang().Index.create()
        self._arguments = [*_ARGUMENTS, "-I", VIRTUAL, "-I", str(INCLUDE), "-I", str(wheel_include())]

    def compile(self, unit: Unit) -> Compiled:
        """Compiles a unit and its instantiations."""
        text = translate_unit(unit)
        path = unit_path(unit)
        files = [*_virtual_files(), (BEFORE, _BEFORE), (path, text)]
        version = [_METAL_4] if "#include <metal_tensor>" in unit.text else []
        arguments = [*self._arguments, *version, "-include", BEFORE]
        parsed = self._index.parse(path, args=arguments, unsaved_files=files)
        return Compiled(parsed, text, diagnostics(parsed, unit, path))

    def errors(self, text: str) -> list[str]:
        """Errors of a text that is no kernel of ours: MLX's preamble stands before it, our own rules do not."""
        path = f"{VIRTUAL}/text.metal"
        files = [*_virtual_files(), (path, text)]
        parsed = self._index.parse(path, args=[*self._arguments, "-include", PREAMBLE], unsaved_files=files)
        return [
            f"{_file(found)}:{found.location.line}: {_in_metal(found.spelling)}"
            for found in parsed.diagnostics
            if found.severity >= clang().Diagnostic.Error
        ]


def unit_path(unit: Unit) -> str:
    """The name under which a unit is compiled."""
    return f"{VIRTUAL}/{unit.name}.metal"


def diagnostics(parsed: Any, unit: Unit, path: str) -> list[Finding]:
    """The compiler's errors, and the implicit conversions to bfloat that Metal does not have."""
    findings = []
    error = clang().Diagnostic.Error
    for found in parsed.diagnostics:
        # In Metal neither float nor half converts to bfloat by itself.
        conversion = found.severity < error and re.search(r"to '[^']*bf(?:loat|16)", found.spelling)
        if found.severity < error and not conversion:
            continue
        line, inside = _line_in(found, path)
        origin = unit.origin(line) if inside else None
        rule = "bfloat-conversion" if conversion else _rule(found.spelling)
        findings.append(
            Finding(
                origin.path if origin else _file(found),
                origin.line if origin else found.location.line,
                rule,
                _in_metal(found.spelling),
                _instantiation(found, unit),
            )
        )
    return findings


def _line_in(found: Any, path: str) -> tuple[int, bool]:
    """The line of the unit that a diagnostic is about: its own, or the first of its notes there."""
    for place in (found, *found.children):
        if _file(place) == path and not place.spelling.startswith("in file included"):
            return int(place.location.line), True
    return 0, False


def _file(found: Any) -> str:
    return str(found.location.file)


def _instantiation(found: Any, unit: Unit) -> str:
    first = len(unit.origins)
    for note in found.children:
        line = int(note.location.line)
        if line > first and "in instantiation" in note.spelling and line - first <= len(unit.instantiations):
            return unit.instantiations[line - first - 1]
    return ""


_RULES = (
    ("threadgroup memory", "threadgroup-memory"),
    ("cannot be declared in local address space", "threadgroup-declaration"),
    ("a shuffle moves", "shuffle-bfloat"),
    ("use of type 'double'", "double"),
)


def _rule(message: str) -> str:
    return next((rule for part, rule in _RULES if part in message), "language")


def _in_metal(message: str) -> str:
    """A message with Metal's words for the address spaces."""
    words = {
        "__global": "device", "__constant": "constant", "__local": "threadgroup", "__private": "thread",
        "__bf16": "bfloat", "local address space": "threadgroup address space", "C++ for OpenCL": "Metal",
    }  # fmt: skip
    if "use of type 'double'" in message:
        return "Metal has no double"
    for word, metal in words.items():
        message = message.replace(word, metal)
    return message
