"""Barriers and simdgroup operations stand in uniform control flow.

Each value has a level: the same in the whole threadgroup (UNIFORM), the same in each simdgroup (SIMDGROUP), or
different from thread to thread (THREAD). Levels start at the kernel's attributes and flow through expressions,
assignments (a variable assigned under a condition takes the condition's level), memory (what an index of some
level reads has that level) and calls, which are analysed with the levels of their arguments. A barrier needs
control flow of level UNIFORM, a simdgroup operation one of at most SIMDGROUP.

The analysis errs on the strict side: of all arithmetic it knows only an attribute divided by 32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .findings import Finding
from .tree import Functions, Node, arguments_of, body_of, is_pointer, parameters_of
from .unit import Unit

UNIFORM, SIMDGROUP, THREAD = range(3)
_WORDS = {SIMDGROUP: "the simdgroup", THREAD: "the thread"}

_ATTRIBUTES = {
    "thread_position_in_grid": THREAD,
    "thread_position_in_threadgroup": THREAD,
    "thread_index_in_threadgroup": THREAD,
    "thread_index_in_simdgroup": THREAD,
    "thread_index_in_quadgroup": THREAD,
    "quadgroup_index_in_threadgroup": THREAD,
    "simdgroup_index_in_threadgroup": SIMDGROUP,
}
# The index of a simdgroup, written out. (Threadgroups here are rows of whole simdgroups.)
_SIMDGROUP_INDEX = re.compile(
    r"(?:int\(|uint\()?(?:thread_index_in_threadgroup|thread_position_in_(?:grid|threadgroup)\.x)\)?(?:/32u?|>>5u?)"
)
# Every lane of a simdgroup gets the same result.
_REDUCTIONS = re.compile(r"simd_(?:sum|product|max|min|and|or|xor|any|all|broadcast_first)$")
_ONE_LANE = re.compile(r"simd_(?:broadcast|shuffle)$")
# `run` is that of a simdgroup's tensor operation.
_SIMD_OPERATION = re.compile(
    r"(?:simd|quad)_(?!lane|group)\w+$|simdgroup_(?:load|store|multiply|multiply_accumulate|barrier)$|run$"
)
# The argument that a function of the library writes through a pointer or reference.
_WRITES = {
    "simdgroup_load": 0, "simdgroup_multiply": 0, "simdgroup_multiply_accumulate": 0, "run": 2,
    "sincos": 1, "frexp": 1, "modf": 1, "atomic_compare_exchange_weak_explicit": 1,
}  # fmt: skip
_BARRIER = "threadgroup_barrier"
_LOOPS = ("FOR_STMT", "WHILE_STMT", "DO_STMT")
_PASSES = 4  # a level can rise twice; one pass more to see that nothing changes


def check_uniform(declarations: list[Node], unit: Unit) -> list[Finding]:
    """Barriers and simdgroup operations that not all threads reach, as far as the tree shows."""
    functions = Functions(declarations)
    analysis = _Analysis(functions)
    for kernel in functions.named(unit.function):
        levels = [_ATTRIBUTES.get(str(p.cursor.spelling), UNIFORM) for p in parameters_of(kernel)]
        analysis.function(kernel, levels, UNIFORM)
    return [
        Finding(unit.origin(line).path, unit.origin(line).line, rule, message)
        for line, rule, message in sorted(analysis.found)
    ]


class _Analysis:
    def __init__(self, functions: Functions):
        self.functions = functions
        self.found: set[tuple[int, str, str]] = set()
        self._done: dict[tuple[int, tuple[int, ...], int], tuple[int, list[int]]] = {}

    def function(self, node: Node, levels: Iterable[int], control: int) -> tuple[int, list[int]]:
        """The level of a function's result, and those of its parameters at the end."""
        levels = tuple(levels)
        key = (id(node), levels, control)
        if key not in self._done:
            self._done[key] = (THREAD, [THREAD] * len(levels))  # what a recursive call gets
            self._done[key] = _Function(self, node, levels, control).run()
        return self._done[key]

    def operation(self, call: Node, name: str, control: int) -> None:
        """Notes a barrier or simdgroup operation under control flow of a level."""
        if name == _BARRIER and control > UNIFORM:
            message = f"a barrier under a condition that depends on {_WORDS[control]}"
            self.found.add((call.line, "barrier-uniform", message))
        elif _SIMD_OPERATION.match(name) and control > SIMDGROUP:
            message = f"{name} under a condition that depends on {_WORDS[control]}"
            self.found.add((call.line, "simd-uniform", message))


class _Function:
    """One function with given levels of its arguments."""

    def __init__(self, analysis: _Analysis, node: Node, levels: tuple[int, ...], control: int):
        self.analysis, self.node, self.control = analysis, node, control
        self.parameters = parameters_of(node)
        self.levels = {p.key(): level for p, level in zip(self.parameters, levels, strict=False)}
        self.result = UNIFORM
        self.left = UNIFORM  # the level at which some threads have left the function
        self.loops: list[int] = []  # for each loop around, the level at which some threads have left it

    def run(self) -> tuple[int, list[int]]:
        body = body_of(self.node)
        assert body is not None
        for _ in range(_PASSES):
            before = dict(self.levels)
            self.left = UNIFORM
            self.statement(body, self.control)
            if self.levels == before:
                break
        return self.result, [self.levels.get(p.key(), UNIFORM) for p in self.parameters]

    def now(self, control: int) -> int:
        """The level of control flow here, with the threads that left."""
        return max(control, self.left, *self.loops, UNIFORM)

    # ---- statements -----------------------------------------------------------------------------------

    def statement(self, node: Node, control: int) -> None:
        control = self.now(control)
        if node.kind in ("COMPOUND_STMT", "DECL_STMT"):
            for child in node.children:
                self.statement(child, control)
        elif node.kind == "VAR_DECL":
            values = [self.value(c, control) for c in node.children if not c.kind.endswith("_REF")]
            if values:
                self.levels[node.key()] = max(*values, self.now(control), self.levels.get(node.key(), UNIFORM))
        elif node.kind == "IF_STMT":
            condition, *branches = node.children
            inner = max(control, self.value(condition, control))
            for branch in branches:
                self.statement(branch, inner)
        elif node.kind in _LOOPS:
            self.loop(node, control)
        elif node.kind == "SWITCH_STMT":
            inner = max(control, self.value(node.children[0], control))
            self.loops.append(UNIFORM)
            self.statement(node.children[-1], inner)
            self.loops.pop()
        elif node.kind in ("BREAK_STMT", "CONTINUE_STMT"):
            if self.loops:
                self.loops[-1] = max(self.loops[-1], control)
        elif node.kind == "RETURN_STMT":
            level = max((self.value(c, control) for c in node.children), default=UNIFORM)
            self.result = max(self.result, level, control)
            # Threads that leave under the condition of the whole function leave together.
            self.left = max(self.left, control if control > self.control else UNIFORM)
        elif node.kind.endswith("_STMT") and node.kind != "NULL_STMT":
            for child in node.children:
                self.statement(child, control)
        else:
            self.value(node, control)

    def loop(self, node: Node, control: int) -> None:
        body = node.children[0] if node.kind == "DO_STMT" else node.children[-1]
        head = [child for child in node.children if child is not body]
        self.loops.append(UNIFORM)
        for _ in range(2):  # the second time with what the first has left behind
            level = control
            for part in head:
                if part.kind in ("DECL_STMT", "VAR_DECL"):
                    self.statement(part, control)
                elif not _is_step(part):
                    level = max(level, self.value(part, control))
            self.statement(body, level)
            for part in head:
                if _is_step(part):
                    self.value(part, self.now(level))
        self.loops.pop()

    # ---- expressions ----------------------------------------------------------------------------------

    def value(self, node: Node, control: int) -> int:
        """The level of an expression; assignments inside are noted."""
        control = self.now(control)
        kind = node.kind
        if kind == "DECL_REF_EXPR":
            declared = node.declared()
            return self.levels.get(declared, UNIFORM) if declared is not None else UNIFORM
        if kind == "CALL_EXPR":
            return self.call(node, control)
        if kind == "CONDITIONAL_OPERATOR":
            condition = self.value(node.children[0], control)
            return max(condition, *(self.value(c, max(control, condition)) for c in node.children[1:]))
        if kind == "BINARY_OPERATOR" and len(node.children) == 2:
            left, right = node.children
            operator = node.operator()
            if operator in ("&&", "||"):
                first = self.value(left, control)
                return max(first, self.value(right, max(control, first)))
            if operator == "=":
                level = self.value(right, control)
                self.assign(left, level, control)
                return level
            if _SIMDGROUP_INDEX.fullmatch(re.sub(r"\s", "", node.source)):
                return SIMDGROUP
        if kind == "COMPOUND_ASSIGNMENT_OPERATOR":
            level = max(self.value(child, control) for child in node.children)
            self.assign(node.children[0], level, control)
            return level
        if kind == "UNARY_OPERATOR" and re.match(r"\+\+|--|.*(?:\+\+|--)$", node.source, re.DOTALL):
            level = self.value(node.children[0], control)
            self.assign(node.children[0], level, control)
            return level
        return max((self.value(child, control) for child in node.children), default=UNIFORM)

    def assign(self, target: Node, level: int, control: int) -> None:
        """Raises the variable behind an assignment's left side, unless it points to shared memory."""
        indices = [self.value(n.children[-1], control) for n in target.find("ARRAY_SUBSCRIPT_EXPR")]
        variable = next(target.find("DECL_REF_EXPR"), None)
        if variable is None or _points_to_shared_memory(variable):
            return
        declared = variable.declared()
        if declared is not None:
            old = self.levels.get(declared, UNIFORM)
            self.levels[declared] = max(old, level, self.now(control), *indices, UNIFORM)

    def call(self, node: Node, control: int) -> int:
        name = node.callee()
        given = arguments_of(node)
        levels = [self.value(child, control) for child in given]
        owner = [self.value(child, control) for child in node.children[:1] if child not in given]
        highest = max([*levels, *owner], default=UNIFORM)
        self.analysis.operation(node, name, control)
        if _REDUCTIONS.match(name):
            return min(highest, SIMDGROUP)
        if _ONE_LANE.match(name) and len(levels) == 2 and levels[1] <= SIMDGROUP:
            return min(highest, SIMDGROUP)
        if name.startswith("atomic_") or name == "simd_is_first":
            return THREAD
        known = self.analysis.functions.called(node, self.node)
        if not known:
            if name in _WRITES and len(given) > _WRITES[name]:
                self.assign(given[_WRITES[name]], highest, control)
            if _is_method_call(node):
                self.assign(node.children[0], highest, control)
            return highest
        result = UNIFORM
        for function in known:
            level, after = self.analysis.function(function, levels, control)
            result = max(result, level)
            for parameter, argument, reached in zip(parameters_of(function), given, after, strict=False):
                if is_pointer(parameter.cursor.type.kind):
                    self.assign(argument, reached, control)
        if _is_method_call(node):
            self.assign(node.children[0], max(highest, result), control)
            result = max(result, *owner, UNIFORM)
        return result


def _is_step(node: Node) -> bool:
    """Whether a part of a for statement's head changes its variable."""
    if node.kind in ("COMPOUND_ASSIGNMENT_OPERATOR",):
        return True
    if node.kind == "UNARY_OPERATOR":
        return bool(re.search(r"\+\+|--", node.source))
    return node.kind == "BINARY_OPERATOR" and node.operator() in ("=", ",")


def _points_to_shared_memory(variable: Node) -> bool:
    spelling = variable.cursor.type.spelling
    declared = variable.cursor.referenced
    if declared is not None:
        spelling += " " + declared.type.spelling
    return any(space in spelling for space in ("__global", "__local", "__constant"))


def _is_method_call(call: Node) -> bool:
    return bool(call.children) and call.children[0].kind == "MEMBER_REF_EXPR" and bool(call.children[0].children)
