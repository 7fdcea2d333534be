"""All checks of one kernel text, and of all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .findings import Finding
from .frontend import FrontEnd, unit_path
from .rules import check_ascii, check_tree
from .symbols import check_symbols
from .tree import tree_of
from .uniform import check_uniform
from .unit import ExactText, Unit, units_of


@dataclass(frozen=True)
class Result:
    """What the check says of a unit."""

    unit: Unit
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return not self.findings


def check_texts(texts: Iterable[ExactText]) -> Iterator[Result]:
    """Checks kernel texts; those of one function are compiled together."""
    front_end = FrontEnd()
    for unit in units_of(texts):
        yield Result(unit, check_unit(unit, front_end))


def check_unit(unit: Unit, front_end: FrontEnd | None = None) -> tuple[Finding, ...]:
    """Everything that is wrong with a unit, sorted by file and line."""
    found = check_ascii(unit)
    if found:  # libclang counts bytes where Python counts characters
        return tuple(found)
    compiled = (front_end or FrontEnd()).compile(unit)
    tree = tree_of(compiled.parsed, unit_path(unit), compiled.text)
    found += compiled.findings
    found += check_tree(tree, unit)
    found += check_uniform(tree, unit)
    found += check_symbols(tree, unit)
    return tuple(sorted(_one_of_each(found)))


def _one_of_each(findings: Iterable[Finding]) -> Iterator[Finding]:
    """One finding for each place and message, whatever the instantiation."""
    seen: set[tuple[str, int, str]] = set()
    for finding in findings:
        # Messages about types name the values of the instantiation.
        key = (finding.path, finding.line, re.sub(r"\d+", "#", finding.message))
        if key not in seen:
            seen.add(key)
            yield finding
