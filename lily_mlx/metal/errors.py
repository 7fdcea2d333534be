"""Errors of the kernel runtime. Every one names the kernel and the remedy."""


class KernelError(RuntimeError):
    """A kernel could not be prepared or run."""


class SourceError(KernelError):
    """The kernel's text or a launch breaks a rule that Metal or MLX sets."""


class CompilerMissingError(KernelError):
    """No C++ compiler was found for the `cpu` backend."""


class CompileError(KernelError):
    """The compiler rejected the kernel; the message holds the compiler's words."""


class LaunchError(KernelError):
    """The kernel ran and broke a rule, or the device reported a failure."""


class BackendError(KernelError):
    """The requested backend does not exist or cannot run on this machine."""
