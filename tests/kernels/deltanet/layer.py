"""Random inputs of one Gated DeltaNet layer, and what the tests here share."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from lily_mlx.kernels.deltanet import DeltaNetShape
from tests.support import bf16, rng, to_numpy

# Key and value heads: ratios 1, 2 and 4. An odd number of value heads also shifts the rows of the
# projection off their 8-byte alignment.
HEADS = [(1, 1), (1, 2), (2, 4), (1, 4), (3, 3)]
ROWS = [1, 2, 3, 4, 7, 16, 33, 65]


def heads_id(heads: tuple[int, int]) -> str:
    return f"{heads[0]}-key-{heads[1]}-value-heads"


def rows_id(rows: int) -> str:
    return f"{rows}-rows"


@dataclass
class Layer:
    """Inputs of the kernels. Columns of the projection that convolution and gates must not read are NaN."""

    shape: DeltaNetShape
    proj: mx.array
    conv_state: mx.array
    state: mx.array
    conv_weight: mx.array
    a_log: mx.array
    dt_bias: mx.array

    @property
    def convolution(self) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        return self.conv_state, self.conv_weight, self.a_log, self.dt_bias


def shape_of(heads: tuple[int, int]) -> DeltaNetShape:
    return DeltaNetShape(*heads, key_dim=128, value_dim=128, conv_kernel=4)


def random_layer(seed: int, heads: tuple[int, int], rows: int, z_is_nan: bool = True) -> Layer:
    """A layer with values of the sizes that occur in a trained model, and a full state."""
    generator, shape = rng(seed), shape_of(heads)
    proj = generator.normal(size=(rows, shape.projection_width))
    if z_is_nan:
        proj[:, shape.z_offset : shape.b_offset] = np.nan
    return Layer(
        shape=shape,
        proj=bf16(proj),
        conv_state=bf16(generator.normal(size=(3, shape.channels))),
        state=float32(generator.normal(size=(shape.value_heads, shape.value_dim, shape.key_dim))),
        conv_weight=bf16(generator.normal(size=(4, shape.channels)) * 0.5),
        a_log=float32(generator.uniform(-2, 2, shape.value_heads)),
        dt_bias=float32(generator.normal(size=shape.value_heads)),
    )


def float32(array: np.ndarray) -> mx.array:
    return mx.array(np.asarray(array, np.float32))


def arrays(*inputs: mx.array) -> tuple[np.ndarray, ...]:
    """The reference's form of a kernel's inputs."""
    return tuple(to_numpy(x) for x in inputs)


def same_bits(a: mx.array, b: mx.array) -> bool:
    """Whether two arrays are equal bit for bit."""
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(to_numpy(a), to_numpy(b))


def assert_rounded_once(name: str, got: mx.array, want: np.ndarray, slack: float = 1e-6) -> None:
    """Fails unless each value is the nearest bfloat16 to the wanted one (half a unit in the last place).

    ``slack`` is the error that float32 arithmetic may have added, relative to the largest value.
    """
    values = to_numpy(got)
    assert values.shape == want.shape, f"{name}: shape {values.shape}, expected {want.shape}"
    limit = 2.0**-8 * np.abs(want) * (1 + 1e-4) + slack * np.max(np.abs(want), initial=1e-30)
    excess = np.max(np.abs(values - want) / limit)
    print(f"{name}: {excess:.3f} of half a bfloat16 step")
    assert excess <= 1.0, f"{name}: error is {excess:.3f} times half a bfloat16 step"
