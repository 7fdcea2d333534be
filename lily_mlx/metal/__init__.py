"""The kernel runtime: one Metal text, run by Apple's GPU, by an NVIDIA GPU, or by the CPU."""

from .backend import checked, current_backend, is_checked, require_backend, use_backend
from .errors import BackendError, CompileError, CompilerMissingError, KernelError, LaunchError, SourceError
from .kernel import Kernel
from .matrix_engines import engine_choice, matrix_engine, use_matrix_engine

__all__ = [
    "BackendError",
    "CompileError",
    "CompilerMissingError",
    "Kernel",
    "KernelError",
    "LaunchError",
    "SourceError",
    "checked",
    "current_backend",
    "engine_choice",
    "is_checked",
    "matrix_engine",
    "require_backend",
    "use_backend",
    "use_matrix_engine",
]
