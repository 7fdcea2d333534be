"""The shape of a Gated DeltaNet layer and of its joined projection."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIM = 128
CONV_KERNEL = 4


@dataclass(frozen=True)
class DeltaNetShape:
    """A Gated DeltaNet layer of Qwen3-Next, Qwen3.5 and Qwen3.6 (Yang et al., "Gated Delta Networks", arXiv:2412.06464).

    The joined projection has rows of P columns: q (Hk Dk), k (Hk Dk), v (Hv Dv), z (Hv Dv), b (Hv), a (Hv).
    The first three, C channels, pass through the convolution.

    Attributes:
        key_heads: Hk (config ``linear_num_key_heads``); Hv / Hk neighbouring value heads share one of them.
        value_heads: Hv (config ``linear_num_value_heads``).
        key_dim: Dk (config ``linear_key_head_dim``), 128.
        value_dim: Dv (config ``linear_value_head_dim``), 128.
        conv_kernel: taps of the causal convolution (config ``linear_conv_kernel_dim``), 4.

    Raises:
        ValueError: a size that the kernels do not support.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    def __post_init__(self) -> None:
        if self.key_heads < 1 or self.value_heads < 1 or self.value_heads % self.key_heads:
            raise ValueError(
                f"deltanet: value_heads {self.value_heads} must be a positive multiple of key_heads {self.key_heads}"
            )
        if self.key_dim != HEAD_DIM or self.value_dim != HEAD_DIM:
            raise ValueError(
                f"deltanet: key_dim {self.key_dim} and value_dim {self.value_dim} must be {HEAD_DIM}, "
                "the only head size that the kernels support"
            )
        if self.conv_kernel != CONV_KERNEL:
            raise ValueError(
                f"deltanet: conv_kernel {self.conv_kernel} must be {CONV_KERNEL}, the only one that the kernels support"
            )

    @property
    def channels(self) -> int:
        """C, channels of the convolution: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def z_offset(self) -> int:
        """First column of z, the output gate, in the joined projection."""
        return self.channels

    @property
    def b_offset(self) -> int:
        """First column of b, which gives beta, in the joined projection."""
        return self.z_offset + self.value_heads * self.value_dim

    @property
    def a_offset(self) -> int:
        """First column of a, which gives the decay, in the joined projection."""
        return self.b_offset + self.value_heads

    @property
    def projection_width(self) -> int:
        """P, columns of the joined projection."""
        return self.a_offset + self.value_heads
