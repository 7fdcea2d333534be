"""Our kernels at the shapes of the model, one module for each family, and the list of all cases."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any

from lily_mlx.model import ModelConfig

from ..full_size import configuration
from . import attention, deltanet, linear, moe, sampling
from .case import MLX_METAL, MLX_OPS, OURS, READ_ONLY, Case, Error, UnavailableError

__all__ = [
    "MLX_METAL",
    "MLX_OPS",
    "OURS",
    "READ_ONLY",
    "Case",
    "Error",
    "UnavailableError",
    "all_cases",
    "select",
    "small_configuration",
]

ROWS = (8, 64, 512, 2048, 4096)
DELTANET_ROWS = (8, 64, 2048, 4096)
CONTEXTS = (256, 4096, 32_768, 131_072)
CHUNKS = ((2048, (0, 32_768, 65_536)), (4096, (0,)))

SMALL_ROWS = (9, 40)
SMALL_CONTEXTS = (256, 300)
SMALL_CHUNKS = ((9, (0, 130)), (40, (300,)))


def small_configuration() -> dict[str, Any]:
    """A config.json with the structure of the full-size model and sizes for a CPU."""
    config = configuration(layers=4)
    config["text_config"] |= {
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "vocab_size": 2048,
    }
    return config


def all_cases(small: bool = False) -> list[Case]:
    """Every case, at the shapes of the full-size model or in a small form for tests."""
    config = ModelConfig.from_dict(small_configuration() if small else configuration())
    rows = SMALL_ROWS if small else ROWS
    return [
        *linear.cases(config, rows),
        *deltanet.cases(config, rows if small else DELTANET_ROWS),
        *attention.cases(config, SMALL_CONTEXTS if small else CONTEXTS, SMALL_CHUNKS if small else CHUNKS),
        *moe.cases(config, rows),
        *sampling.cases(config, rows),
    ]


def select(cases: Sequence[Case], patterns: Sequence[str], phase: str | None) -> Iterator[Case]:
    """The cases of a phase (None: both) whose name matches one of the patterns.

    Raises:
        ValueError: a pattern matches no case.
    """
    for pattern in patterns:
        if not any(fnmatch.fnmatch(case.name, pattern) for case in cases):
            raise ValueError(
                f"no case matches {pattern!r}; names look like {cases[0].name!r}, and --list prints all of them"
            )
    for case in cases:
        if phase is not None and case.phase != phase:
            continue
        if not patterns or any(fnmatch.fnmatch(case.name, pattern) for pattern in patterns):
            yield case
