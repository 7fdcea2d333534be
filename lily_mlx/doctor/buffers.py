"""How many launches MLX puts into one command buffer of Metal, and whether another number would be faster.

MLX reads MLX_MAX_OPS_PER_BUFFER and MLX_MAX_MB_PER_BUFFER when it opens the device, so that every setting needs a
process of its own. Each times decode steps of some layers of the full-size model, with weights of zeros.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from lily_mlx.checkpoints import bundled_checkpoint
from lily_mlx.metal import current_backend
from lily_mlx.metal.command_buffers import CAPS, CHOICE, MEGABYTES, OPS
from lily_mlx.model import Model, ModelConfig, Sampling, arrays_of, empty_caches, read_config
from lily_mlx.model.abstract import abstract_weights

from .sizes import Sizes

SETTINGS: tuple[dict[str, str], ...] = (
    {CHOICE: "mlx"},
    CAPS,
    {OPS: "10"},
    {OPS: "50", MEGABYTES: "50"},
    {OPS: "100", MEGABYTES: "100"},
    {OPS: "200", MEGABYTES: "1000"},
    {OPS: "1000", MEGABYTES: "4000"},
)
NOT_APPLICABLE = "not applicable: only MLX's Metal device has command buffers of this kind"
_LAYERS = 4
_VOCABULARY = 32_768
_TIMEOUT = 300


@dataclass(frozen=True)
class BufferTiming:
    """Milliseconds of a decode step of a few layers under one setting; `problem` where there are none."""

    setting: str
    milliseconds: float
    problem: str = ""


def compare_settings(sizes: Sizes) -> list[BufferTiming] | None:
    """Times every setting; None where the backend is not `metal`."""
    if current_backend() != "metal":
        return None
    return [_in_process(setting, sizes) for setting in SETTINGS]


def _in_process(setting: dict[str, str], sizes: Sizes) -> BufferTiming:
    values = " ".join(f"{name}={value}" for name, value in setting.items())
    label = {id(SETTINGS[0]): "MLX's own choice", id(CAPS): f"lily_mlx's choice: {values}"}.get(id(setting), values)
    environment = {name: value for name, value in os.environ.items() if name not in (OPS, MEGABYTES, CHOICE)} | setting
    command = [sys.executable, "-m", __spec__.name, sizes.label]
    try:
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
        return BufferTiming(label, float(json.loads(answer.stdout)))
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "no message").strip().splitlines()
        return BufferTiming(label, 0.0, lines[-1])
    except (subprocess.TimeoutExpired, ValueError) as error:
        return BufferTiming(label, 0.0, f"{type(error).__name__}")


def step_milliseconds(sizes: Sizes, steps: int = 40) -> float:
    """Median milliseconds of a decode step of `_LAYERS` layers."""
    model = _model(sizes)
    mx.eval(model.arrays)
    caches, token, position = empty_caches(model.config), mx.zeros(1, mx.uint32), mx.zeros(1, mx.int32)
    sampling = Sampling(mx.zeros(8), mx.zeros(1, mx.uint32))
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        output = model.step(token, position, caches, sampling)
        token, position, caches = output.token, output.position, output.caches
        mx.eval(token, position, arrays_of(caches))
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[steps // 4 :])


def _model(sizes: Sizes) -> Model:
    """Layers of the size, with weights of zeros."""
    settings: dict[str, Any] = read_config(bundled_checkpoint())
    text = settings.get("text_config", settings)
    text.pop("layer_types", None)
    attention, delta = sizes.attention, sizes.deltanet
    text.update(
        num_hidden_layers=_LAYERS,
        hidden_size=sizes.hidden,
        vocab_size=min(sizes.vocabulary, _VOCABULARY),
        num_attention_heads=attention.query_heads,
        num_key_value_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        linear_num_key_heads=delta.key_heads,
        linear_num_value_heads=delta.value_heads,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        moe_intermediate_size=sizes.expert_size,
        shared_expert_intermediate_size=sizes.expert_size,
    )
    config = ModelConfig.from_dict(settings)
    return Model(config, abstract_weights(config))


if __name__ == "__main__":
    from .sizes import FULL, SHORT, SMALL

    chosen = {size.label: size for size in (FULL, SHORT, SMALL)}[sys.argv[1]]
    print(json.dumps(step_milliseconds(chosen)))
