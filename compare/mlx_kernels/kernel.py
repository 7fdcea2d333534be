"""`WheelKernel`: a kernel function of MLX's Metal headers as a `Kernel` of our runtime.

The function's body becomes the kernel's body, unchanged, behind declarations that give its parameters
the names that MLX uses: pointers to our arrays, numbers read from small arrays (as MLX passes them, so that
another shape needs no other build), and attributes. The rest of its header and the headers it includes are
the kernel's headers, without other kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import mlx.core as mx

from lily_mlx.metal import Kernel, current_backend
from lily_mlx.metal.errors import SourceError
from lily_mlx.metal.launch import Size3
from lily_mlx.metal.source import ATTRIBUTES, SourcePart, make_text

from . import headers, portable
from .function import KernelFunction, Parameter, TemplateParameter, find_kernels, remove_kernels

# Types of numbers that kernels take, and the dtype of the array that carries them.
_NUMBERS = {
    "int": mx.int32,
    "uint": mx.uint32,
    "size_t": mx.uint64,
    "int64_t": mx.int64,
    "float": mx.float32,
}
# Metal puts an array of fewer than 8 elements into the address space `constant`, where MLX has its numbers.
_MAX_NUMBERS = 7


class WheelKernel:
    """A kernel function from the installed wheel.

    Args:
        function: its name.
        header: the header that defines it, e.g. "quantized.h".
        needs: headers that MLX includes before that one; `utils.h` is always first.
        uses_fragments: the text depends on the layout of 8x8 matrices, which is then the runtime's.

    The text is read at the first call.
    """

    def __init__(self, function: str, header: str, needs: Sequence[str] = (), uses_fragments: bool = False):
        self.name = function
        self.header = header
        self.uses_fragments = uses_fragments
        self._needs = tuple(needs)
        self._kernels: dict[tuple[object, ...], Kernel] = {}

    def __repr__(self) -> str:
        return f"WheelKernel({self.name!r}, {self.header!r})"

    @functools.cached_property
    def function(self) -> KernelFunction:
        functions = find_kernels(headers.read(self.header))
        if self.name not in functions:
            raise SourceError(
                f"MLX {mx.__version__} has no kernel {self.name} in {self.header}; it has {', '.join(functions)}"
            )
        return functions[self.name]

    def __call__(
        self,
        arrays: Mapping[str, mx.array | None],
        numbers: Mapping[str, int | float | None],
        outputs: Mapping[str, tuple[Sequence[int], mx.Dtype]],
        *,
        template: Mapping[str, int | bool | mx.Dtype],
        threadgroups: Size3,
        threadgroup: Size3,
        types: Mapping[str, str] | None = None,
        constants: Mapping[str, bool | int] | None = None,
    ) -> list[mx.array]:
        """Launches the kernel.

        Args:
            arrays: one for each input pointer; None is a null pointer.
            numbers: one for each number; None where the kernel does not read it.
            outputs: shape and dtype for each output pointer.
            template: values of template parameters; the others have defaults.
            threadgroups, threadgroup: as in MLX's `dispatch_threadgroups`.
            types: template parameters that are not dtypes, as Metal text.
            constants: values of function constants.

        Returns:
            The outputs, in the order of the function's parameters.

        Raises:
            SourceError: an argument is missing or unknown, or the launch breaks a rule of Metal.
        """
        types, constants = types or {}, constants or {}
        given = {name: array for name, array in arrays.items() if array is not None}
        key = (
            *given, None, *arrays, None, *numbers, None, *outputs, None, *template, None,
            *types.items(), *constants.items(), current_backend(),
        )  # fmt: skip
        kernel = self._kernels.get(key)
        if kernel is None:  # names are checked once: this runs at every step of a measured loop
            self._check_names(arrays, numbers, outputs, {**template, **types})
            kernel = self._kernels[key] = self._kernel(given, template, types, constants)
        inputs = [given[parameter.name] for parameter in self._buffers if parameter.name in given]
        for kind, parameters in self._numbers.items():
            inputs.append(_number_array(kind, tuple(numbers.get(p.name) or 0 for p in parameters)))
        order = [outputs[parameter.name] for parameter in self._buffers if parameter.name in outputs]
        return kernel(
            inputs,
            template=template,
            grid=tuple(n * size for n, size in zip(threadgroups, threadgroup, strict=True)),  # type: ignore[arg-type]
            threadgroup=threadgroup,
            output_shapes=[shape for shape, _ in order],
            output_dtypes=[dtype for _, dtype in order],
        )

    @functools.cached_property
    def _buffers(self) -> list[Parameter]:
        return [p for p in self.function.parameters if p.attribute is None]

    @functools.cached_property
    def _numbers(self) -> dict[str, list[Parameter]]:
        """The parameters that are numbers, by type."""
        found: dict[str, list[Parameter]] = {}
        for parameter in self._buffers:
            if not parameter.is_pointer:
                found.setdefault(parameter.value_type, []).append(parameter)
        return found

    def _check_names(
        self,
        arrays: Mapping[str, object],
        numbers: Mapping[str, object],
        outputs: Mapping[str, object],
        template: Mapping[str, object],
    ) -> None:
        buffers = self._buffers
        expected = {
            "arrays": (arrays, [p for p in buffers if p.is_pointer and not p.is_output]),
            "numbers": (numbers, [p for p in buffers if not p.is_pointer]),
            "outputs": (outputs, [p for p in buffers if p.is_output]),
        }
        for what, (given, parameters) in expected.items():
            missing = {p.name for p in parameters if not p.optional} - set(given)
            unknown = set(given) - {p.name for p in parameters}
            if missing or unknown:
                raise SourceError(f"kernel {self.name}: {what} missing {sorted(missing)}, unknown {sorted(unknown)}")
        missing = {p.name for p in self.function.template if p.default is None} - set(template)
        unknown = set(template) - {p.name for p in self.function.template}
        if missing or unknown:
            raise SourceError(
                f"kernel {self.name}: template values missing {sorted(missing)}, unknown {sorted(unknown)}"
            )

    def _kernel(
        self,
        arrays: Mapping[str, mx.array],
        template: Mapping[str, object],
        types: Mapping[str, str],
        constants: Mapping[str, bool | int],
    ) -> Kernel:
        buffers = self._buffers
        pointers = [p for p in buffers if p.name in arrays]
        outputs = [p for p in buffers if p.is_output and not p.optional]
        numbers = self._numbers
        lines = [_template_line(p, types) for p in self.function.template if p.name not in template]
        lines += [f"{_plain(p)} = {p.name}_in;" for p in pointers]
        lines += [f"{_plain(p)} = {p.name}_out;" for p in outputs]
        lines += [f"{_plain(p)} = nullptr;" for p in buffers if p.is_pointer and p not in pointers and p not in outputs]
        for kind, parameters in numbers.items():
            if kind not in _NUMBERS or len(parameters) > _MAX_NUMBERS:
                raise SourceError(f"kernel {self.name}: {len(parameters)} numbers of type {kind} are not supported")
            lines += [f"{_plain(p)} = {kind}_numbers[{i}];" for i, p in enumerate(parameters)]
        lines += [_attribute_line(p) for p in self.function.parameters if p.attribute]
        body = headers.strip_marks(self.function.body)
        parts = self._header_parts(constants)
        if self.uses_fragments:
            changed = headers.use_runtime_fragments(body)
            if changed == body and not any("lily_fragment_row" in part.text for part in parts):
                raise SourceError(f"kernel {self.name}: MLX {mx.__version__} writes the layout of matrices otherwise")
            body = changed
        inputs = [f"{p.name}_in" for p in pointers] + [f"{kind}_numbers" for kind in numbers]
        # The declarations share the line of the opening brace, so that the lines of messages are the file's.
        text = "\n" * (self.function.line - 1) + " ".join(line for line in lines if line) + " " + body
        kernel = Kernel(f"mlx_{self.name}", inputs, [f"{p.name}_out" for p in outputs], "", max_threads=1024)
        kernel.text = make_text(
            kernel.name, kernel.inputs, kernel.outputs, headers.part(self.header, text), tuple(parts)
        )
        return kernel

    def _header_parts(self, constants: Mapping[str, bool | int]) -> list[SourcePart]:
        names = headers.resolve((headers.PRELUDE, *self._needs, self.header))
        on_metal = current_backend() == "metal"
        if on_metal:  # MLX puts these there itself
            prelude = headers.resolve((headers.PRELUDE,))
            names = tuple(name for name in names if name not in prelude)
        parts = []
        for name in names:
            text = headers.set_function_constants(remove_kernels(headers.read(name)), constants)
            text = portable.spell_const(headers.strip_marks(text))
            if self.uses_fragments:
                text = headers.use_runtime_fragments(text)
            parts.append(headers.part(name, text if on_metal else portable.rewrite(text)))
        return parts


def _plain(parameter: Parameter) -> str:
    """A parameter's declaration, with a name that is not an attribute's."""
    return portable.spell_const(headers.strip_marks(parameter.declaration))


def _template_line(parameter: TemplateParameter, types: Mapping[str, str]) -> str:
    value = types.get(parameter.name, parameter.default)
    if parameter.kind == "typename":
        return f"using {parameter.name} = {value};"
    return f"constexpr {parameter.kind} {parameter.name} = {value};"


def _attribute_line(parameter: Parameter) -> str:
    """The declaration of an attribute; a kernel may take fewer components than there are."""
    name = parameter.attribute
    assert name is not None
    if ATTRIBUTES[name] == "uint3":
        name = {"uint": f"{name}.x", "uint2": f"uint2({name}.x, {name}.y)"}.get(parameter.value_type, name)
    return f"{_plain(parameter)} = {name};"


@functools.lru_cache(maxsize=4096)
def _number_array(kind: str, values: tuple[int | float, ...]) -> mx.array:
    return mx.array(values, dtype=_NUMBERS[kind])


@functools.lru_cache(maxsize=4096)
def index_array(values: tuple[int, ...], dtype: mx.Dtype = mx.int32) -> mx.array:
    """A small array of shapes, strides or indices, made once."""
    return mx.array(values, dtype=dtype)
