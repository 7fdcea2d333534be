"""What the check reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Finding:
    """A fault in a kernel's text.

    Attributes:
        path: the file, as the kernel names it; `<...>` where the text has no file.
        line: the line there, from 1.
        rule: a short name of the rule, `language` for what the compiler itself rejects.
        message: what is wrong.
        instantiation: the template instantiation that shows it, empty if all do.
    """

    path: str
    line: int
    rule: str
    message: str
    instantiation: str = ""

    def __str__(self) -> str:
        where = f" [{self.instantiation}]" if self.instantiation else ""
        return f"{self.path}:{self.line}: {self.rule}: {self.message}{where}"
