"""MLX operations in place of kernels that do not work on a device.

Every public function of `lily_mlx.kernels` has an equivalent here: the same name, arguments and results, made of
MLX's operations only, in float32 where the kernel computes in float32. They are slow and meant to be right.

`use` puts them in place once, before anything runs: it changes the names that the packages of `lily_mlx` look up, so
that a call costs what it cost before.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from lily_mlx.kernels import attention as attention_kernels
from lily_mlx.kernels import deltanet as deltanet_kernels
from lily_mlx.kernels import linear as linear_kernels
from lily_mlx.kernels import mlp as mlp_kernels
from lily_mlx.kernels import moe as moe_kernels
from lily_mlx.kernels import sampling as sampling_kernels

from . import attention, deltanet, linear, mlp, moe, sampling

__all__ = ["NAMES", "active", "kernel", "replacement", "use", "using"]

Function = Callable[..., Any]

_FAMILIES: dict[str, tuple[ModuleType, ModuleType]] = {
    "linear": (linear_kernels, linear),
    "deltanet": (deltanet_kernels, deltanet),
    "attention": (attention_kernels, attention),
    "mlp": (mlp_kernels, mlp),
    "moe": (moe_kernels, moe),
    "sampling": (sampling_kernels, sampling),
}
_KERNELS: dict[str, Function] = {
    f"{family}.{name}": getattr(kernels, name)
    for family, (kernels, replacements) in _FAMILIES.items()
    for name in replacements.__all__
}
_REPLACEMENTS: dict[str, Function] = {
    f"{family}.{name}": getattr(replacements, name)
    for family, (_, replacements) in _FAMILIES.items()
    for name in replacements.__all__
}

NAMES = tuple(_KERNELS)
"""Names of all functions that can be replaced, `family.function`."""

_active: frozenset[str] = frozenset()


def kernel(name: str) -> Function:
    """The function that launches kernels, whether it is replaced or not."""
    return _KERNELS[name]


def replacement(name: str) -> Function:
    """The function of MLX operations."""
    return _REPLACEMENTS[name]


def active() -> tuple[str, ...]:
    """The functions that are replaced now."""
    return tuple(name for name in NAMES if name in _active)


def use(names: Iterable[str]) -> bool:
    """Replaces these functions of `lily_mlx.kernels`, and no others, in all of `lily_mlx`.

    Steps that `mx.compile` has traced already keep what they were traced with.

    Args:
        names: `family.function`, from `NAMES`.

    Returns:
        Whether anything changed.

    Raises:
        ValueError: an unknown name.
    """
    global _active
    wanted = frozenset(names)
    unknown = wanted - set(NAMES)
    if unknown:
        raise ValueError(f"no kernel function is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if wanted == _active:
        return False
    for name in wanted ^ _active:
        old, new = _KERNELS[name], _REPLACEMENTS[name]
        _rebind(name, *((old, new) if name in wanted else (new, old)))
    _active = wanted
    return True


@contextlib.contextmanager
def using(names: Iterable[str]) -> Iterator[None]:
    """Replaces functions inside the block."""
    before = active()
    use(names)
    try:
        yield
    finally:
        use(before)


def _rebind(name: str, old: Function, new: Function) -> None:
    """Changes the family's package, which later imports read, and every module that has imported the function."""
    family, _, attribute = name.partition(".")
    setattr(_FAMILIES[family][0], attribute, new)
    for path, module in list(sys.modules.items()):
        if not path.startswith("lily_mlx.") or path.startswith(("lily_mlx.kernels.", f"{__name__}.")):
            continue
        for key, value in list(vars(module).items()):
            if value is old:
                setattr(module, key, new)
