"""A hook of MkDocs: links from a page to a file outside docs/.

On the site such a link leads to the repository, where `repo_url` of mkdocs.yml names it; without one it becomes plain
text. A link to a file that does not exist is a warning, and so an error with `mkdocs build --strict`.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((\.\./[^)\s#]*)(#[^)\s]*)?\)")

log = logging.getLogger("mkdocs.hooks")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Replaces links that lead out of docs/."""

    def replace(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        path = (ROOT / "docs" / Path(page.file.src_uri).parent / target).resolve()
        if not path.exists():
            log.warning("%s: link to %s, which does not exist", page.file.src_uri, target)
        if not config.repo_url or not path.is_relative_to(ROOT):
            return str(text)
        kind = "tree" if path.is_dir() else "blob"
        return f"[{text}]({config.repo_url.rstrip('/')}/{kind}/main/{path.relative_to(ROOT)}{anchor or ''})"

    return OUTSIDE.sub(replace, markdown)
