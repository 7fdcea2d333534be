"""Stop strings, found wherever the borders of tokens are."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Passes text on until a stop string is complete.

    The string that is complete first ends the text, as if the characters came one by one; of two that are complete
    with the same character, the longer one does. Text that may be the beginning of a stop string waits.

    Args:
        stops: the stop strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Takes the next text; returns what can be passed on, and whether a stop string ended it."""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        keep = longest_overlap(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """The text that still waits, when nothing follows it."""
        text, self._held = self._held, ""
        return text


def longest_overlap(text: str, words: Sequence[str]) -> int:
    """Length of the longest end of `text` that is a beginning of one of the words, but not all of it."""
    longest = 0
    for word in words:
        for length in range(min(len(word) - 1, len(text)), longest, -1):
            if text.endswith(word[:length]):
                longest = length
                break
    return longest
