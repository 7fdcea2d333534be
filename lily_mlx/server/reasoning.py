"""Splits what a model writes into its reasoning, its answer and its tool calls."""

from __future__ import annotations

from typing import Literal

from .stops import longest_overlap

Part = tuple[Literal["content", "reasoning", "call"], str]

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"


class ChannelSplitter:
    """A state machine over the text, whatever the borders of its pieces.

    Every think block outside tool calls is reasoning; the line breaks just inside and after its tags are layout and
    dropped. A closing tag without a block is text. A tool call, with its wrapper or a bare function block, comes out
    whole, and think tags inside it are part of it. White space after a call is dropped, unless other text follows.

    Args:
        thinking: whether think blocks are split off.
        in_thought: whether the prompt has opened a think block.
        tools: whether tool calls are split off.
        formed: whether the answer has a required form. Only the think block that the prompt has opened is one then, and
            what follows is calls and nothing else if it begins with a call's wrapper; otherwise it has no tags.
    """

    def __init__(self, thinking: bool, in_thought: bool = False, tools: bool = False, formed: bool = False):
        self._in_call = False
        self._in_thought = thinking and in_thought
        self._tags: tuple[str, ...] = (*([THINK] if thinking else []), *([CALL, FUNCTION] if tools else []))
        self._undecided = formed and tools
        if formed:
            self._tags = ()
        self._held = ""
        self._drop = self._in_thought  # whether line breaks are layout here
        self._after_call = False
        self._space = ""  # after a call, until it is known whether text follows

    def feed(self, text: str) -> list[Part]:
        """Takes the next text and returns the parts that are certain."""
        self._held += text
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """What still waits, when nothing follows it. An unfinished tool call comes out as a call."""
        text, self._held = self._held, ""
        if self._in_call:
            return [("call", text)]
        parts: list[Part] = []
        self._text(parts, text)
        return parts

    def _advance(self, parts: list[Part]) -> bool:
        """Handles the text up to the next tag; returns whether there was one."""
        if self._in_call:
            return self._end_call(parts)
        if self._undecided and not self._in_thought:
            begin = self._held.lstrip()[: len(CALL)]
            if begin != CALL and CALL.startswith(begin):
                return False
            self._undecided, self._tags = False, (CALL,) if begin == CALL else ()
        tags = (THINK_END,) if self._in_thought else self._tags
        found = [(start, tag) for tag in tags if (start := self._held.find(tag)) >= 0]
        if found:
            start, tag = min(found)
            before, self._held = self._held[:start], self._held[start:]
            self._text(parts, before.rstrip("\n") if self._in_thought else before)
            if tag in (CALL, FUNCTION):
                self._in_call = True
            else:
                self._held = self._held[len(tag) :]
                self._in_thought, self._drop = tag == THINK, True
            return True
        keep = longest_overlap(self._held, tags)
        ready = self._held[: len(self._held) - keep]
        if self._in_thought:  # line breaks may belong to the tag that follows
            ready = ready.rstrip("\n")
        self._held = self._held[len(ready) :]
        self._text(parts, ready)
        return False

    def _end_call(self, parts: list[Part]) -> bool:
        """Looks for the end of a call; a closing tag inside an argument of an open function block is none."""
        end_tag = CALL_END if self._held.startswith(CALL) else FUNCTION_END
        end = self._held.find(end_tag)
        while (
            end >= 0 and end_tag == CALL_END and FUNCTION in self._held[:end] and FUNCTION_END not in self._held[:end]
        ):
            end = self._held.find(end_tag, end + 1)
        if end < 0:
            return False
        end += len(end_tag)
        parts.append(("call", self._held[:end]))
        self._held = self._held[end:]
        self._in_call, self._after_call, self._space = False, True, ""
        return True

    def _text(self, parts: list[Part], text: str) -> None:
        if self._drop:
            text = text.lstrip("\n")
            self._drop = not text
        if self._after_call and not self._in_thought:
            text = self._space + text
            if not text.strip():
                self._space = text
                return
            self._after_call, self._space = False, ""
        if text:
            parts.append(("reasoning" if self._in_thought else "content", text))
