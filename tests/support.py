"""What the kernel tests share: seeded inputs, conversions and one comparison."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from lily_mlx.metal import current_backend, matrix_engines

BFLOAT16_TOLERANCE = 2e-2
FLOAT32_TOLERANCE = 1e-4


def rng(seed: int) -> np.random.Generator:
    """A generator whose seed is printed, so that a failure can be repeated."""
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def bf16(array: np.ndarray) -> mx.array:
    """The array rounded to bfloat16."""
    return mx.array(np.asarray(array, dtype=np.float32)).astype(mx.bfloat16)


def to_numpy(array: mx.array) -> np.ndarray:
    """The array's values in float64 (integers stay integers)."""
    if mx.issubdtype(array.dtype, mx.floating):
        return np.array(array.astype(mx.float32)).astype(np.float64)
    return np.array(array)


def round_bf16(array: np.ndarray) -> np.ndarray:
    """Float64 values rounded to bfloat16 and back."""
    return to_numpy(bf16(array))


def quantized(generator: np.random.Generator, shape: tuple[int, ...], bits: int = 4, group_size: int = 64):
    """A random quantised weight of `shape` [..., N, K] and its exact dense values in float64.

    The codes are random, not the image of a smooth matrix, so every code occurs. Scales and biases are
    bfloat16, as in checkpoints. With 16 bits the weight holds bfloat16 values, and `group_size` has no meaning.
    """
    from lily_mlx.kernels.linear import QuantizedWeight
    from lily_mlx.kernels.linear.weight import BFLOAT16_BITS

    *lead, columns = shape
    if bits == BFLOAT16_BITS:
        values = bf16(generator.standard_normal(shape) / columns**0.5)
        return QuantizedWeight.from_bfloat16(values), to_numpy(values)
    words = generator.integers(0, 2**32, size=(*lead, columns * bits // 32), dtype=np.uint32)
    scales = bf16(generator.uniform(0.5, 1.5, (*lead, columns // group_size)) / (2**bits * columns**0.5))
    signs = generator.choice([-1.0, 1.0], (*lead, columns // group_size))
    scales = (scales * mx.array(signs.astype(np.float32)).astype(mx.bfloat16)).astype(mx.bfloat16)
    biases = (scales * mx.array(-(2.0 ** (bits - 1)))).astype(mx.bfloat16)
    weight = mx.array(words)
    dense = mx.dequantize(
        weight, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group_size, bits=bits
    )
    return QuantizedWeight.pack(weight, scales, biases, bits, group_size), to_numpy(dense)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """max |got - want| / max |want|; infinite if a value is missing or not a number where it should be."""
    if got.shape != want.shape:
        raise AssertionError(f"shape {got.shape}, expected {want.shape}")
    if not np.array_equal(np.isnan(got), np.isnan(want)):
        return float("inf")
    difference = np.nanmax(np.abs(got - want), initial=0.0)
    return float(difference / max(np.nanmax(np.abs(want), initial=0.0), 1e-30))


def assert_close(name: str, got: mx.array | np.ndarray, want: np.ndarray, relative: float) -> None:
    """Fails unless max |got - want| <= relative * max |want|."""
    values = to_numpy(got) if isinstance(got, mx.array) else np.asarray(got)
    error = relative_error(values, np.asarray(want))
    print(f"{name}: relative error {error:.2e} (limit {relative:.0e})")
    assert error <= relative, f"{name}: relative error {error:.3e} exceeds {relative:.0e}"


def run_command(main, arguments, capsys) -> tuple[object, str, str]:
    """Runs a command's `main` in this process; returns exit code, stdout and stderr."""
    code: object = 0
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        code = exit_.code
    out, err = capsys.readouterr()
    return code, out, err


def need_tensor_operations() -> None:
    """Skips a test on a Mac without Metal 4's tensor operations; `cpu` and `cuda` have them for tests."""
    missing = matrix_engines.missing_for_tensors(*matrix_engines._device()) if current_backend() == "metal" else ""
    if missing:
        pytest.skip(missing)
