"""The engine: states of sequences, prefill in chunks, steps, and the generation loop."""

from .engine import DEFAULT_CHUNK_SIZE, Engine
from .generation import generate_tokens
from .sampling import log_probabilities, make_sampling
from .state import SequenceState

__all__ = [
    "DEFAULT_CHUNK_SIZE",
    "Engine",
    "SequenceState",
    "generate_tokens",
    "log_probabilities",
    "make_sampling",
]
