"""The end of a step: logits and the choice of the next token, on the device."""

from .batch import RowControls, choose_rows
from .controls import NO_TOKEN, adjust, draw
from .sampling import head, select
from .settings import Settings

__all__ = ["NO_TOKEN", "RowControls", "Settings", "adjust", "choose_rows", "draw", "head", "select"]
