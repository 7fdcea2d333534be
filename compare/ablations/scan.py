"""Without the register-resident scan: Gated DeltaNet's scan in blocks, with the state in memory between them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import mlx.core as mx

from lily_mlx.kernels import deltanet
from lily_mlx.kernels.deltanet import DeltaNetShape

from .form import replaced

BLOCK_ROWS = 64


def blocked_scan() -> AbstractContextManager[None]:
    """`deltanet.scan` as one launch for each 64 rows. Every launch reads the state from memory and writes it."""
    scan = deltanet.scan

    def blocks(
        q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, state: mx.array, shape: DeltaNetShape
    ) -> tuple[mx.array, mx.array]:
        outputs = []
        for start in range(0, q.shape[0], BLOCK_ROWS):
            rows = slice(start, start + BLOCK_ROWS)
            y, state = scan(q[rows], k[rows], v[rows], decay[rows], beta[rows], state, shape)
            outputs.append(y)
        return mx.concatenate(outputs), state

    return replaced(deltanet, scan=blocks)
