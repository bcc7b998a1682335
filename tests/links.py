"""Checks links between Markdown pages, to files and to headings as GitHub names them, offline."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent
MARKDOWN = MarkdownIt("commonmark").enable("table")
ROOMS = ("docs", "workbench", "widgets", "tests", "notebooks", "binder")


def pages() -> list[Path]:
    """Every Markdown page of the repository."""
    inside = (p for room in ROOMS for p in (ROOT / room).rglob("*.md") if "__pycache__" not in p.parts)
    return sorted([*ROOT.glob("*.md"), *inside])


def broken(page: Path) -> list[str]:
    """Returns a page's links and pictures that lead nowhere."""
    return [target for target in targets(page.read_text()) if not leads_somewhere(page, target)]


def targets(text: str) -> list[str]:
    """Returns the targets of links and pictures in a Markdown text, without other sites."""
    inline = [child for token in MARKDOWN.parse(text) for child in token.children or ()]
    found = [str(t.attrGet("href") or t.attrGet("src") or "") for t in inline if t.type in ("link_open", "image")]
    return [target for target in found if not re.match(r"[a-z]+:|//", target)]


def leads_somewhere(page: Path, target: str) -> bool:
    path, _, anchor = unquote(target).partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.is_relative_to(ROOT) or not file.is_file():
        return False
    return not anchor or (file.suffix == ".md" and anchor in anchors(file))


@cache
def anchors(page: Path) -> frozenset[str]:
    """Returns the names of a page's headings, like GitHub and MyST."""
    tokens, found, seen = MARKDOWN.parse(page.read_text()), [], Counter[str]()
    for before, token in itertools.pairwise(tokens):
        if before.type == "heading_open":
            text = "".join(c.content for c in token.children or () if c.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
            found.append(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return frozenset(found)
