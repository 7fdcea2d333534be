"""The engine: states of sequences, prefill in chunks, steps, and the generation loop."""

from .batch import Chosen, DecodeBatch
from .engine import DEFAULT_CHUNK_SIZE, Engine
from .generation import generate_tokens
from .sampling import SAMPLING_OPTIONS, log_probabilities, make_sampling, recent_tokens
from .state import SequenceState

__all__ = [
    "DEFAULT_CHUNK_SIZE",
    "SAMPLING_OPTIONS",
    "Chosen",
    "DecodeBatch",
    "Engine",
    "SequenceState",
    "generate_tokens",
    "log_probabilities",
    "make_sampling",
    "recent_tokens",
]
