"""Answers of a required form: JSON of a schema, and tool calls that must be made. The grammars are llguidance's."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from lily_mlx.engine import SequenceState
from lily_mlx.kernels.sampling import adjust, draw, select
from lily_mlx.model import Sampling

from .errors import RequestError
from .reasoning import CALL, CALL_END, THINK_END
from .schemas import admitted, by_itself, properties_of

Result = TypeVar("Result")

DEEPEST = 64  # levels of a schema: the library follows them by recursion
_LAYOUT = {"x-guidance": {"whitespace_pattern": " "}}  # else a model may write white space for ever


@dataclass(frozen=True)
class Form:
    """The form that an answer must have.

    Attributes:
        schema: JSON schema of the content; None for no JSON.
        calls: definitions of the tools of which one must be called, or may be in place of JSON; empty for none.
        several: whether more than one call may be made.
        field: of the request that asks for it, for errors.
    """

    schema: dict[str, Any] | None
    calls: tuple[dict[str, Any], ...]
    several: bool
    field: str


class Grammars:
    """Makes constraints for one tokenizer.

    `matcher` is for one thread at a time. `tokenize` is for any thread and may run beside it: the library's tokenizer is
    made once, under a lock, and never changes.

    Args:
        tokenizer: mlx_lm's `TokenizerWrapper`.
        vocabulary: rows of the model's head.
    """

    def __init__(self, tokenizer: Any, vocabulary: int):
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._known: Any = None
        self._making = threading.Lock()

    def matcher(self, form: Form, in_thought: bool) -> Any:
        """llguidance's matcher at the beginning of an answer.

        Args:
            form: that the answer must have.
            in_thought: whether it begins with a thought, which line breaks may follow.

        Raises:
            RequestError: the form cannot be enforced, or the library is missing.
        """
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise RequestError(
                "the form of an answer is enforced by the package llguidance, which is not installed here: "
                "pip install 'lily_mlx[server]'",
                form.field,
            ) from error
        for part in (form.schema, *form.calls):
            _check_depth(part, form.field)
        tokenizer = self._library_tokenizer()
        grammar = _grammar(form, in_thought, lambda text: self._literal(tokenizer, text))
        matcher = _contained(lambda: LLMatcher(tokenizer, grammar, log_level=0))
        if matcher.is_error():
            reason = str(matcher.get_error()).split("\n")[0][:300]
            raise RequestError(f"{form.field} cannot be enforced: {reason}", form.field)
        return matcher

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a text."""
        return list(self._library_tokenizer().tokenize_str(text))

    def _library_tokenizer(self) -> Any:
        with self._making:
            if self._known is None:
                from llguidance.hf import from_tokenizer

                ends = sorted(self._tokenizer.eos_token_ids)
                self._known = from_tokenizer(self._tokenizer._tokenizer, n_vocab=self._vocabulary, eos_token=ends)
            return self._known

    def _literal(self, tokenizer: Any, text: str) -> str:
        """A tag of tool calls in a grammar: a token of its own in most tokenizers, text in others."""
        token = self._tokenizer.get_vocab().get(text)
        return text if token is not None and tokenizer.is_special_token(token) else _quoted(text)


class Constraint:
    """Keeps one answer to a form. Used on the GPU thread.

    Args:
        matcher: at the beginning of an answer; it is changed.
        sampling: how to choose among the allowed tokens: with controls, but without biases and penalties, which the
            logits have in them already.
        tokenize: makes tokens of a text.
        in_thought: whether the prompt has opened a think block. What is inside it is free, but it cannot end the text.
        ends: ids that end the text.
    """

    def __init__(
        self,
        matcher: Any,
        sampling: Sampling,
        tokenize: Callable[[str], list[int]],
        in_thought: bool,
        ends: Iterable[int],
    ):
        assert sampling.controls is not None
        self._ends = sorted(ends)
        self._matcher, self._sampling, self._tokenize = matcher, sampling, tokenize
        self._free, self._tail = in_thought, ""

    def choose(self, state: SequenceState) -> SequenceState:
        """The state with a token that the form allows. Its logits have -infinity for all others."""
        assert state.logits is not None
        size = state.logits.shape[1]
        if self._free:
            assert state.token is not None
            if int(state.token.item()) not in self._ends:
                return state
            allowed = ~np.isin(np.arange(size), self._ends)
        else:
            mask = _contained(self._matcher.compute_bitmask)
            allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little", count=size) != 0
        logits = mx.where(mx.array(allowed[None]), state.logits, -mx.inf)
        controls, seed = self._sampling.controls, self._sampling.seed
        assert controls is not None
        position = state.position - 1  # where the last token stands
        _, _, best_value, best_index, total = adjust(
            logits,
            mx.zeros(1, mx.uint32),
            position,
            controls.empty,
            controls.bias_ids,
            controls.bias_values,
            controls.settings,
            seed,
            controls.filtered,
        )
        if controls.filtered:
            token, _, _ = draw(logits, best_value, total, controls.special_tokens, controls.settings, seed, position)
        else:
            token, _ = select(best_value, best_index, position)
        return replace(state, token=token, logits=logits)

    def take(self, token: int, text: str) -> None:
        """Follows the answer.

        Args:
            token: the chosen one.
            text: what it adds.

        Raises:
            RuntimeError: the token is not allowed, or the grammar has become too complex.
        """
        tokens = [token]
        if self._free:
            self._tail = (self._tail + text)[-len(THINK_END) - len(text) :]
            if THINK_END not in self._tail:
                return
            self._free = False
            rest = self._tail.split(THINK_END, 1)[1]
            tokens = self._tokenize(rest) if rest.strip() else []
        if tokens and not _contained(lambda: self._matcher.consume_tokens(tokens)):
            raise RuntimeError(f"the form of the answer cannot be kept: {self._matcher.get_error()}")


def _contained(action: Callable[[], Result]) -> Result:
    """A panic of the library as an ordinary error: it must not end a thread."""
    try:
        return action()
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise RuntimeError(f"llguidance failed: {error}") from error


def _check_depth(value: Any, field: str) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise RequestError(f"{field} has a schema of more than {DEEPEST} levels: make it flatter", field)
        below = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list)))
        level = [item for items in below for item in items]


def _grammar(form: Form, in_thought: bool, tag: Callable[[str], str]) -> str:
    """The form in llguidance's dialect of Lark."""
    ways, rules = [], []
    if form.schema is not None:
        ways.append("json")
        rules.append(f"json: %json {_json(form.schema)}")
    if form.calls:
        ways.append("calls")
        rules.append('calls: call ("\\n" call)*' if form.several else "calls: call")
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(form.calls))))
        for i, tool in enumerate(form.calls):
            rules += _call_rules(f"call_{i}", tool["function"], tag)
    space = "SPACE? " if in_thought else ""
    return "\n".join(["%llguidance {}", f"start: {space}({' | '.join(ways)})", "SPACE: /\\n{1,2}/", *rules, ""])


def _call_rules(name: str, function: dict[str, Any], tag: Callable[[str], str]) -> list[str]:
    """A call in the form that the model was trained on: parameters in the order of the schema."""
    root = function.get("parameters") or {}
    properties, required = properties_of(root)
    rules, parts = [], []
    for i, (parameter, kind) in enumerate(properties.items()):
        part = f"{name}_{i}"
        parts.append(part if parameter in required else f"{part}?")
        rules += _parameter_rules(part, parameter, kind, root)
    head, end = _quoted(f"\n<function={function['name']}>\n"), _quoted("</function>\n")
    return [" ".join([f"{name}: {tag(CALL)}", head, *parts, end, tag(CALL_END)]), *rules]


def _parameter_rules(part: str, parameter: str, kind: Any, root: Any) -> list[str]:
    """Strings stand as they are, either any or one of a list; all other values are JSON."""
    begin, end = _quoted(f"<parameter={parameter}>\n"), "\n</parameter>\n"
    values = admitted(kind, root)
    if values.any_text:
        return [f"{part}: {begin} {part}_text", f"{part}_text[suffix={_quoted(end)}]: /(.|\\n)*/"]
    ways, rules = [_quoted(text) for text in values.texts or ()], []
    others = sorted(values.kinds - {"string"})
    if others or not ways:
        ways.append(f"{part}_value")
        schema = by_itself(kind, root) if isinstance(kind, dict) else {"not": {}}
        if values.texts:  # these are JSON's strings in the schema
            definitions = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
            schema = {"allOf": [schema, {"type": others}], **definitions}
        rules.append(f"{part}_value: %json {_json(schema)}")
    return [f"{part}: {begin} ({' | '.join(ways)}) {_quoted(end)}", *rules]


def _json(schema: dict[str, Any]) -> str:
    return json.dumps({**schema, **_LAYOUT}, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
