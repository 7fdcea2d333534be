"""From a kernel's Metal text to a C++ translation unit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import mlx.core as mx

from ..errors import SourceError
from ..launch import TemplateValue, float_constants
from ..source import ATTRIBUTES, KernelText, rewrite_threadgroup

CPP_TYPES: Mapping[mx.Dtype, str] = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "ulong",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "long",
    mx.float16: "half",
    mx.bfloat16: "bfloat",
    mx.float32: "float",
}
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<(?:metal_\w+|MetalPerformancePrimitives/\S+)>", re.MULTILINE)
_UNROLL = re.compile(r"^([ \t]*)#[ \t]*pragma[ \t]+(?:unroll|clang[ \t]+loop[ \t]+unroll\(full\))", re.MULTILINE)


def cpp_type(name: str, dtype: mx.Dtype) -> str:
    """The C++ type of a dtype's elements.

    Raises:
        SourceError: Metal kernels have no such type.
    """
    try:
        return CPP_TYPES[dtype]
    except KeyError:
        raise SourceError(f"kernel {name}: dtype {dtype} has no counterpart in Metal; convert the array") from None


def translate(
    text: KernelText,
    template: Mapping[str, TemplateValue],
    inputs: Sequence[tuple[mx.Dtype, int]],
    outputs: Sequence[mx.Dtype],
    unroll: str,
) -> str:
    """The translation unit for one set of template values and dtypes.

    It defines `extern "C" void lily_entry(void* const* arguments)`, which runs one thread. The arguments
    are the buffers in MLX's order: each input with the shape buffers that the body uses, then the outputs.

    Args:
        inputs: dtype and number of dimensions of each input; those without dimensions are references.
        outputs: dtype of each output.
        unroll: what stands for `#pragma unroll`, a compiler's own spelling.
    """
    parameters: list[str] = []
    arguments: list[str] = []

    def parameter(kind: str, name: str, by_reference: bool = False) -> None:
        argument = f"static_cast<{kind}*>(arguments[{len(arguments)}])"
        parameters.append(f"{kind}{'&' if by_reference else '*'} {name}")
        arguments.append(f"*{argument}" if by_reference else argument)

    for name, (dtype, ndim) in zip(text.inputs, inputs, strict=True):
        parameter(f"const {cpp_type(text.name, dtype)}", name, by_reference=ndim == 0)
        for suffix, kind in (("_shape", "const int"), ("_strides", "const long"), ("_ndim", "const int")):
            if name + suffix in text.shape_buffers:
                parameter(kind, name + suffix, by_reference=suffix == "_ndim")
    for name, dtype in zip(text.outputs, outputs, strict=True):
        parameter(cpp_type(text.name, dtype), name)

    names = {key: value for key, value in template.items() if not isinstance(value, float)}
    types = [_template_parameter(key, value) for key, value in names.items()]
    values = [_template_argument(text.name, value) for value in names.values()]
    attributes = "".join(
        f"const {ATTRIBUTES[name]} {name} = lily::Attributes::{name}(); (void){name};\n" for name in text.attributes
    )
    parts = ['#include "compat.h"\n', float_constants(template)]
    for part in text.header_parts:
        parts.append(_numbered(part.path, _plain(part.text, unroll)))
    parts += [
        "namespace {\n",
        f"template <{', '.join(types)}>\n" if types else "",
        f"inline __attribute__((always_inline)) void lily_kernel({', '.join(parameters)}) {{\n",
        attributes,
        "[[maybe_unused]] lily::ThreadgroupCursor lily_threadgroup_cursor;\n",
        _numbered(text.body_part.path, rewrite_threadgroup(_plain(text.body_part.text, unroll))),
        '\n#line 1 "lily_entry"\n}\n}\n',
        'extern "C" __attribute__((visibility("default"))) void lily_entry(void* const* arguments) {\n',
        f"lily_kernel{'<' + ', '.join(values) + '>' if values else ''}({', '.join(arguments)});\n}}\n",
    ]
    return "".join(parts)


def _plain(text: str, unroll: str) -> str:
    """Text without what only Apple's compiler knows; lines stay where they are."""
    return _UNROLL.sub(rf"\1{unroll}", _INCLUDE.sub("", text))


def _numbered(path: str, text: str) -> str:
    quoted = path.replace("\\", "\\\\").replace('"', '\\"')
    return f'#line 1 "{quoted}"\n{text}\n'


def _template_parameter(name: str, value: TemplateValue) -> str:
    if isinstance(value, mx.Dtype):
        return f"typename {name}"
    return f"{'bool' if isinstance(value, bool) else 'int'} {name}"


def _template_argument(kernel: str, value: TemplateValue) -> str:
    if isinstance(value, mx.Dtype):
        return cpp_type(kernel, value)
    return str(value).lower() if isinstance(value, bool) else str(value)
