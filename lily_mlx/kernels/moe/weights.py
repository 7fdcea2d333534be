"""The quantised weights of one mixture-of-experts block, checked once when they are put together."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from lily_mlx.kernels.linear.weight import QuantizedWeight


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of E routed experts and the shared expert, hidden size H, intermediate size I.

    ``gate`` and ``up`` have the same bits and group size, so have ``shared_gate`` and ``shared_up``; apart
    from that each matrix may have its own. Checkpoint names: ``mlp.switch_mlp.{gate,up,down}_proj`` and
    ``mlp.shared_expert.{gate,up,down}_proj``.

    Raises:
        ValueError: shapes that do not fit together, or unequal formats of a gate and its up matrix.
    """

    gate: QuantizedWeight  # [E, I, H]
    up: QuantizedWeight  # [E, I, H]
    down: QuantizedWeight  # [E, H, I]
    shared_gate: QuantizedWeight  # [I, H]
    shared_up: QuantizedWeight  # [I, H]
    shared_down: QuantizedWeight  # [H, I]

    def __post_init__(self) -> None:
        if len(self.gate.lead) != 1:
            raise ValueError(f"gate has shape {self.gate.shape}; expected [experts, rows, columns]")
        experts, intermediate, hidden = self.experts, self.intermediate, self.hidden
        expected = {
            "gate": ((experts,), intermediate, hidden),
            "up": ((experts,), intermediate, hidden),
            "down": ((experts,), hidden, intermediate),
            "shared_gate": ((), intermediate, hidden),
            "shared_up": ((), intermediate, hidden),
            "shared_down": ((), hidden, intermediate),
        }
        for name, (lead, rows, columns) in expected.items():
            weight: QuantizedWeight = getattr(self, name)
            found = weight.lead, weight.rows, weight.columns
            if found != (lead, rows, columns):
                raise ValueError(
                    f"{name} holds matrices [{_join(*found)}], expected [{_join(lead, rows, columns)}] "
                    "to fit the gate's"
                )
        for gate, up in (("gate", "up"), ("shared_gate", "shared_up")):
            first, second = getattr(self, gate), getattr(self, up)
            if (first.bits, first.group_size) != (second.bits, second.group_size):
                raise ValueError(
                    f"{gate} has {first.bits} bits in groups of {first.group_size} and {up} {second.bits} in "
                    f"groups of {second.group_size}; re-encode one of them, they are read together"
                )

    @property
    def experts(self) -> int:
        """E, routed experts."""
        return self.gate.shape[0]

    @property
    def intermediate(self) -> int:
        """I, intermediate size of an expert (config ``moe_intermediate_size``)."""
        return self.gate.rows

    @property
    def hidden(self) -> int:
        """H, hidden size of the model."""
        return self.gate.columns

    def gate_up_arrays(self) -> list[mx.array]:
        """Inputs of the gate and up kernels, in their order."""
        return [w.packed for w in (self.gate, self.up, self.shared_gate, self.shared_up)]

    def down_arrays(self) -> list[mx.array]:
        """Inputs of the down kernels, in their order."""
        return [self.down.packed, self.shared_down.packed]


def format_template(routed: QuantizedWeight, shared: QuantizedWeight) -> dict[str, int]:
    """Template values that describe the packing of a routed and a shared matrix."""
    return {
        "BITS": routed.bits,
        "GROUP": routed.group_size,
        "SHARED_BITS": shared.bits,
        "SHARED_GROUP": shared.group_size,
    }


def check_array(name: str, array: mx.array, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    """Raises ValueError unless ``array`` has this shape and dtype."""
    if tuple(array.shape) != shape or array.dtype != dtype:
        raise ValueError(f"{name} is {array.dtype} {tuple(array.shape)}; expected {dtype} {shape}")


def _join(lead: tuple[int, ...], rows: int, columns: int) -> str:
    return ", ".join(str(size) for size in (*lead, rows, columns))
