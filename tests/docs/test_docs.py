"""The pages that people read: every link leads somewhere, and the site builds without a warning."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "notebooks/*.ipynb", "lily_mlx/checkpoints/**/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"(?<!`)!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    if page.suffix == ".ipynb":
        cells = json.loads(page.read_text())["cells"]
        return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return page.read_text()


def links(text: str) -> list[str]:
    return [target for target in LINK.findall(FENCE.sub("", text)) if not re.match(r"\w+:", target)]


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_links_are_found() -> None:
    text = "[a](b.md), ![c](d.svg), [`e`](../f#g), [x](https://example.org)\n```\n[not](this)\n```\n"
    assert links(text) == ["b.md", "d.svg", "../f#g"]
    assert anchors("# A b\n## Does it, then?\n") == {"a-b", "does-it-then"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for target in links(text_of(page)):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path.read_text())):
            wrong.append(target)
    assert not wrong


def test_every_page_is_reached() -> None:
    """From the README or the site's first page a reader comes to every page of docs/."""
    reached, waiting = set(), [ROOT / "README.md", ROOT / "docs" / "index.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or not page.exists():
            continue
        reached.add(page)
        waiting += [(page.parent / t.partition("#")[0]).resolve() for t in links(page.read_text()) if ".md" in t]
    assert {page for page in PAGES if page.parent == ROOT / "docs"} <= reached


def test_site_builds_without_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site needs the extra 'docs'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= 10
    fetched = [p for p in pages if re.search(r'<(?:script|link)[^>]+(?:src|href)="https?://', p.read_text())]
    assert not fetched, "the site must need no other host"
