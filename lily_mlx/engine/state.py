"""`SequenceState`: everything about one sequence, as an immutable value."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from lily_mlx.model import LayerCache, ModelConfig, StepOutput, empty_caches


@dataclass(frozen=True)
class SequenceState:
    """One sequence between two steps.

    Nothing writes to a state: each step returns a new one. So a snapshot is a reference, forking is using a
    state twice, and states share the arrays that they have in common.

    Attributes:
        length: tokens in `caches`, known on the host.
        caches: the layers' memory of those tokens.
        token: uint32 [1], the token chosen to follow them, not fed yet; None before the first prefill. A step
            reads it on the device and writes the next one to a new slot.
        position: int32 [1], `length` on the device.
        logits: float32 [1, V], from which `token` was chosen; None before the first prefill.
        recent: uint32 [R], the last tokens fed, while the sampling has penalties, see `recent_tokens`; None otherwise.
    """

    length: int
    caches: tuple[LayerCache, ...]
    token: mx.array | None
    position: mx.array
    logits: mx.array | None
    recent: mx.array | None = None

    @classmethod
    def empty(cls, config: ModelConfig) -> SequenceState:
        """The state of a sequence without tokens."""
        return cls(0, empty_caches(config), None, mx.zeros(1, mx.int32), None)

    @classmethod
    def after(cls, length: int, output: StepOutput) -> SequenceState:
        """The state after a step or a chunk, when `length` tokens have been fed."""
        return cls(length, output.caches, output.token, output.position, output.logits, output.recent)
