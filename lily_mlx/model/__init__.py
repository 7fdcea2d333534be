"""Models of Qwen3.5, Qwen3.6 and Qwen3-Next: configuration, checkpoint, and a step or a chunk as kernel calls."""

from .cache import DeltaNetCache, LayerCache, empty_caches, merge_tails
from .checkpoint import load_weights
from .choice import Controls, Sampling
from .config import ModelConfig, is_supported_family, read_config
from .decode import StepOutput, decode_step
from .model import Model
from .prefill import choose_token, prefill_chunk
from .weights import ModelWeights, arrays_of, with_arrays

__all__ = [
    "Controls",
    "DeltaNetCache",
    "LayerCache",
    "Model",
    "ModelConfig",
    "ModelWeights",
    "Sampling",
    "StepOutput",
    "arrays_of",
    "choose_token",
    "decode_step",
    "empty_caches",
    "is_supported_family",
    "load_weights",
    "merge_tails",
    "prefill_chunk",
    "read_config",
    "with_arrays",
]
