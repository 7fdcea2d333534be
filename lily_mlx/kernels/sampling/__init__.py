"""The end of a step: logits and the choice of the next token, on the device."""

from .controls import NO_TOKEN, adjust, draw
from .sampling import head, select
from .settings import Settings

__all__ = ["NO_TOKEN", "Settings", "adjust", "draw", "head", "select"]
