"""The end of a step: logits and the choice of the next token, on the device."""

from .sampling import head, select

__all__ = ["head", "select"]
