"""Metal's rules beyond the language, on the syntax tree of a kernel's own text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from ..source import MAX_BUFFERS
from .findings import Finding
from .tree import FUNCTIONS, Functions, Node, body_of, functions_of, is_pointer, name_of
from .unit import Unit

Report = Iterator[tuple[Node, str]]
Rule = Callable[[list[Node], Unit], Report]

_SPACES = re.compile(r"\b(?:device|constant|threadgroup|thread)\b")


def check_ascii(unit: Unit) -> list[Finding]:
    """MLX hands the text over as ASCII."""
    findings = []
    for number, line in enumerate(unit.text.splitlines(), 1):
        wrong = next((c for c in line if ord(c) > 127), None)
        if wrong is not None:
            origin = unit.origin(number)
            findings.append(Finding(origin.path, origin.line, "ascii", f"the character {wrong!r} is not ASCII"))
    return findings


def check_tree(declarations: list[Node], unit: Unit) -> list[Finding]:
    """All rules of this module that look at the tree."""
    findings = []
    for name, rule in RULES.items():
        for node, message in rule(declarations, unit):
            origin = unit.origin(node.line)
            findings.append(Finding(origin.path, origin.line, name, message))
    return findings


def no_recursion(declarations: list[Node], unit: Unit) -> Report:
    """Metal has no call stack."""
    functions = Functions(declarations)
    calls = {id(f): [g for c in f.find("CALL_EXPR") for g in functions.called(c, f)] for f in functions.all}

    def reaches(function: Node, target: Node, seen: set[int]) -> bool:
        for called in calls[id(function)]:
            if called is target:
                return True
            if id(called) not in seen:
                seen.add(id(called))
                if reaches(called, target, seen):
                    return True
        return False

    for function in functions.all:
        # Of overloaded templates one may call another: that ends at compile time.
        overloaded = function.kind == "FUNCTION_TEMPLATE" and len(functions.named(name_of(function))) > 1
        if not overloaded and reaches(function, function, set()):
            yield function, f"{name_of(function)} calls itself, directly or through others; Metal has no recursion"


def address_spaces(declarations: list[Node], unit: Unit) -> Report:
    """Each pointer and reference names its address space."""
    for declaration in declarations:
        for node in declaration.find("PARM_DECL", "VAR_DECL", "FIELD_DECL"):
            if is_pointer(node.cursor.type.kind) and "LILY_THREADGROUP" not in node.source:
                declarator = node.source.split("=")[0]
                if not _SPACES.search(declarator) and not re.search(r"\bauto\b", declarator):
                    yield node, f"{node.cursor.spelling!r} is a pointer or reference without an address space"
        for function in declaration.find(*FUNCTIONS):
            result = function.cursor.result_type
            if is_pointer(result.kind) and not _SPACES.search(function.source.split(name_of(function))[0]):
                yield function, f"{name_of(function)} returns a pointer or reference without an address space"


def left_out(declarations: list[Node], unit: Unit) -> Report:
    """Features of C++ that our Metal leaves out. (Those that Metal has not are errors of the language.)"""
    names = {"LAMBDA_EXPR": "a lambda", "GOTO_STMT": "goto", "ASM_STMT": "asm"}
    for declaration in declarations:
        for node in declaration.walk():
            if node.kind in names:
                yield node, f"{names[node.kind]} is not part of the Metal that runs on all backends"


def global_variables(declarations: list[Node], unit: Unit) -> Report:
    """Variables outside functions, and static ones inside, are `constant`."""
    for declaration in declarations:
        if declaration.kind == "VAR_DECL" and not re.search(r"\bconstant\b", declaration.source.split("=")[0]):
            yield declaration, f"the global variable {declaration.cursor.spelling!r} is not `constant`"
        for node in declaration.find("DECL_STMT"):
            if re.match(r"static\b(?!.*\bconstant\b)", node.source.split("=")[0]):
                yield node, "a static variable inside a function is not `constant`"


def threadgroup_scope(declarations: list[Node], unit: Unit) -> Report:
    """Threadgroup memory is declared at the top level of the kernel's body."""
    for function in functions_of(declarations):
        body = body_of(function)
        assert body is not None
        top = {id(child) for child in body.children}
        for statement in body.find("DECL_STMT"):
            if not statement.source.startswith("LILY_THREADGROUP"):
                continue
            if name_of(function) != unit.function:
                yield statement, f"threadgroup memory is declared in {name_of(function)}, which is not the kernel"
            elif id(statement) not in top:
                yield statement, "threadgroup memory is declared inside a block of the kernel's body"


def buffers(declarations: list[Node], unit: Unit) -> Report:
    """At most 31 buffers."""
    for function in functions_of(declarations):
        count = len(re.findall(r"\[\[buffer\(\d+\)\]\]", function.source)) if name_of(function) == unit.function else 0
        if count > MAX_BUFFERS:
            yield function, f"the kernel has {count} buffers; Metal allows {MAX_BUFFERS}"


def method_spaces(declarations: list[Node], unit: Unit) -> Report:
    """A method without an address space is for objects in `thread` memory only."""
    for function in functions_of(declarations):
        for call in function.find("CALL_EXPR"):
            method = call.cursor.referenced
            if method is None or method.kind.name != "CXX_METHOD" or method.is_static_method():
                continue
            if not call.children or not call.children[0].children:
                continue
            # Inside the conversion to the generic address space that the call makes.
            owner = next(
                n for n in call.children[0].children[0].walk() if n.kind != "UNEXPOSED_EXPR"
            ).cursor.type.spelling
            space = next((s for w, s in (("__global", "device"), ("__local", "threadgroup")) if w in owner), None)
            if space and not re.search(rf"\b{space}\b", _signature_end(method)):
                yield call, f"{method.spelling} is called on an object in {space} memory, but is not a {space} method"


def _signature_end(method: Any) -> str:
    """What stands between a method's parameters and its body."""
    tokens = [token.spelling for token in method.get_tokens()]
    text = " ".join(tokens)
    return text.split("{")[0].rsplit(")", 1)[-1]


RULES: dict[str, Rule] = {
    "recursion": no_recursion,
    "address-space": address_spaces,
    "left-out": left_out,
    "global-variable": global_variables,
    "threadgroup-scope": threadgroup_scope,
    "buffers": buffers,
    "method-space": method_spaces,
}
