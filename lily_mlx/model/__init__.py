"""Models of Qwen3.5, Qwen3.6 and Qwen3-Next: configuration, checkpoint, and a step or a chunk as kernel calls."""

from .batch import BatchOutput, Pool, RowMemory, Tails, batch_step, empty_memories
from .cache import DeltaNetCache, LayerCache, empty_caches, merge_tails
from .checkpoint import load_weights
from .choice import Controls, Sampling
from .config import ModelConfig, is_supported_family, read_config
from .decode import StepOutput, decode_step
from .model import Model
from .prefill import choose_token, prefill_chunk
from .weights import ModelWeights, arrays_of, with_arrays

__all__ = [
    "BatchOutput",
    "Controls",
    "DeltaNetCache",
    "LayerCache",
    "Model",
    "ModelConfig",
    "ModelWeights",
    "Pool",
    "RowMemory",
    "Sampling",
    "StepOutput",
    "Tails",
    "arrays_of",
    "batch_step",
    "choose_token",
    "decode_step",
    "empty_caches",
    "empty_memories",
    "is_supported_family",
    "load_weights",
    "merge_tails",
    "prefill_chunk",
    "read_config",
    "with_arrays",
]
