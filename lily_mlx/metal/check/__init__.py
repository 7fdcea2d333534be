"""Checks the Metal text of every kernel with a C++ front end, on any machine: `python -m lily_mlx.metal.check`.

Apple's compiler runs on Apple's systems only. Here libclang (C++ for OpenCL, in which the address spaces are as
distinct as in Metal) compiles the exact text that MLX would compile, against declarations of the Metal library
and MLX's own preamble; what the language does not check is checked on the syntax tree.
"""

from .check import Result, check_texts, check_unit
from .findings import Finding
from .unit import ExactText, Unit, units_of

__all__ = ["ExactText", "Finding", "Result", "Unit", "check_texts", "check_unit", "units_of"]
