"""A light copy of the syntax tree: libclang's cursors are slow to walk more than once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .frontend import clang


@dataclass
class Node:
    """A cursor of the unit's own text.

    Attributes:
        kind: libclang's name of the kind, e.g. "IF_STMT".
        cursor: the cursor.
        text: the whole text of the unit.
        start, end: where the node stands in it.
    """

    kind: str
    cursor: Any
    text: str
    start: int
    end: int
    children: list[Node] = field(default_factory=list)
    _declared: int | bool | None = field(default=False, repr=False)  # False: not looked up yet

    @property
    def source(self) -> str:
        return self.text[self.start : self.end]

    @property
    def line(self) -> int:
        return self.text.count("\n", 0, self.start) + 1

    def walk(self) -> Iterator[Node]:
        """The node and all below it, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))

    def find(self, *kinds: str) -> Iterator[Node]:
        return (node for node in self.walk() if node.kind in kinds)

    def declared(self) -> int | None:
        """A key of the declaration that an expression names, the same for all its uses."""
        if self._declared is False:
            target = self.cursor.referenced
            self._declared = _key(target) if target is not None else None
        return self._declared

    def key(self) -> int:
        """The key that `declared` of the node's uses gives, for a declaration."""
        return _key(self.cursor)

    def operator(self) -> str:
        """The operator between the two operands of a binary expression."""
        left, right = self.children[0], self.children[-1]
        return self.text[left.end : right.start].strip().strip("()").strip()

    def qualifier(self) -> str:
        """The class before `::` in a call, without template arguments; empty if there is none."""
        found = re.match(r"(?:metal::)?(\w+)\s*(?:<[^()]*>)?\s*::\s*\w+\s*(?:<[^()]*>)?\s*\(", self.source)
        return "" if found is None or found.group(1) in ("metal", "fast", "precise") else found.group(1)

    def callee(self) -> str:
        """The name that a call calls, without qualifiers but `fast::` and `precise::`, and without arguments."""
        end = self.children[0].end if self.children else self.end
        name = re.match(r"[\w:.<>, \[\]()&*+-]*?(?=\s*\()", self.text[self.start : self.end])
        head = self.text[self.start : end] if not name else name.group()
        head = re.sub(r"<[^()]*>$", "", head.strip())
        word = re.search(r"((?:fast|precise)::)?(\w+)$", head)
        return (word.group(1) or "") + word.group(2) if word else ""


def _key(cursor: Any) -> int:
    location = cursor.location
    return hash((str(location.file), location.offset))


FUNCTIONS = ("FUNCTION_DECL", "FUNCTION_TEMPLATE", "CXX_METHOD", "CONSTRUCTOR", "DESTRUCTOR", "CONVERSION_FUNCTION")


def tree_of(parsed: Any, path: str, text: str) -> list[Node]:
    """The declarations of a unit's own text."""
    return [_node(c, text) for c in parsed.cursor.get_children() if str(c.location.file) == path]


def _node(cursor: Any, text: str) -> Node:
    extent = cursor.extent
    kind = cursor.kind.name if _known(cursor) else "UNKNOWN"
    node = Node(kind, cursor, text, extent.start.offset, extent.end.offset)
    node.children = [_node(child, text) for child in cursor.get_children()]
    if kind == "CALL_EXPR":
        _restore_operator(node)
    return node


def _restore_operator(node: Node) -> None:
    """Turns a call of `operator+` and the like, which an operator is in a template, back into an operator."""
    position = next(
        (
            i
            for i, c in enumerate(node.children)
            if str(c.cursor.spelling).startswith("operator") and c.kind != "CALL_EXPR"
        ),
        None,
    )
    if position is None or node.children[position].source.startswith("operator"):
        return
    name = str(node.children.pop(position).cursor.spelling).removeprefix("operator")
    if name == "[]":
        node.kind = "ARRAY_SUBSCRIPT_EXPR"
    elif len(node.children) == 1:
        node.kind = "UNARY_OPERATOR"
    elif re.fullmatch(r"(?:[+\-*/%&|^]|<<|>>)=", name):
        node.kind = "COMPOUND_ASSIGNMENT_OPERATOR"
    else:
        node.kind = "BINARY_OPERATOR"


def _known(cursor: Any) -> bool:
    try:
        return cursor.kind is not None
    except ValueError:  # a kind that the Python binding does not know
        return False


def functions_of(declarations: list[Node]) -> Iterator[Node]:
    """All functions and methods with a body."""
    for declaration in declarations:
        for node in declaration.find(*FUNCTIONS):
            if body_of(node) is not None:
                yield node


def body_of(function: Node) -> Node | None:
    """A function's body, or None for a declaration."""
    return next((c for c in function.children if c.kind == "COMPOUND_STMT"), None)


def parameters_of(function: Node) -> list[Node]:
    return [c for c in function.children if c.kind == "PARM_DECL"]


def is_pointer(kind: Any) -> bool:
    types = clang().TypeKind
    return kind in (types.POINTER, types.LVALUEREFERENCE, types.RVALUEREFERENCE)


def owner_of(function: Node) -> str:
    """The class of a method; empty for a function."""
    parent = function.cursor.semantic_parent
    kinds = ("STRUCT_DECL", "CLASS_DECL", "CLASS_TEMPLATE")
    return str(parent.spelling) if parent is not None and parent.kind.name in kinds else ""


class Functions:
    """The functions of a unit, to be found by their calls."""

    def __init__(self, declarations: list[Node]):
        self.all = list(functions_of(declarations))
        self._by_key = {f.key(): f for f in self.all}
        self._by_name: dict[str, list[Node]] = {}
        for function in self.all:
            self._by_name.setdefault(name_of(function), []).append(function)

    def named(self, name: str) -> list[Node]:
        return self._by_name.get(name, [])

    def called(self, call: Node, caller: Node | None = None) -> list[Node]:
        """The functions that a call may call: more than one where only an instantiation would tell."""
        target = call.declared()
        if target in self._by_key:
            return [self._by_key[target]]
        named = [f for f in self.named(call.callee()) if len(parameters_of(f)) >= len(arguments_of(call))]
        qualifier = call.qualifier()
        if qualifier:
            return [f for f in named if owner_of(f) == qualifier]
        if call.children and call.children[0].kind == "MEMBER_REF_EXPR":
            return [f for f in named if owner_of(f)]
        own = owner_of(caller) if caller is not None else ""
        return [f for f in named if owner_of(f) in ("", own)]


def arguments_of(call: Node) -> list[Node]:
    """The arguments of a call, in order."""
    count = len(list(call.cursor.get_arguments()))
    if count and count <= len(call.children):
        return call.children[len(call.children) - count :]
    return call.children[1:]


def name_of(function: Node) -> str:
    return str(function.cursor.spelling).split("<")[0]
