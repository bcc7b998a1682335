"""Checks links between the pages of the built site, to files and to anchors, without network.

Links to other sites are only checked for their form.
"""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

HELD = ("href", "src", "data-run", "data-plotly")  # attributes that name another file
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src"}  # elements that a page loads by itself


class Page(HTMLParser):
    """A page's links, loaded files and anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text("utf8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.links += [given[name] for name in HELD if name in given]
        lazy = [given[name] for name in HELD[2:] if name in given]
        self.loaded += [given[LOADED[tag]]] if LOADED.get(tag) in given and _loads(tag, given) else []
        self.loaded += lazy

    handle_startendtag = handle_starttag


def _loads(tag: str, given: dict[str, str]) -> bool:
    return tag != "link" or given.get("rel") in ("stylesheet", "preload", "icon")


@cache
def page(path: Path) -> Page:
    return Page(path)


def pages(site: Path) -> list[Path]:
    """Returns every page of the site, without _static, which contains a template of the theme."""
    return sorted(p for p in site.rglob("*.html") if "_static" not in p.parts)


def broken(path: Path, site: Path) -> list[str]:
    """Returns a page's links that lead nowhere or are malformed."""
    return [link for link in page(path).links if not leads_somewhere(path, link, site)]


def leads_somewhere(path: Path, link: str, site: Path) -> bool:
    try:
        parts = urlsplit(link)
    except ValueError:
        return False
    if parts.scheme or parts.netloc:
        return is_address(link)
    file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not file.is_relative_to(site.resolve()) or not file.is_file():
        return False
    return not parts.fragment or file.suffix != ".html" or unquote(parts.fragment) in page(file).anchors


def is_address(link: str) -> bool:
    """Returns whether a link is a well-formed address of another site."""
    if link.startswith("mailto:"):
        return bool(re.fullmatch(r"mailto:[^@\s]+@[\w-]+(\.[\w-]+)+", link))
    return bool(re.fullmatch(r"https?://[\w-]+(\.[\w-]+)+(:\d+)?(/[^\s<>\"]*)?(\?[^\s]*)?(#[^\s]*)?", link))


def weight(path: Path) -> int:
    """Returns the bytes on disk of a page and of all files that it loads, also late ones."""
    loaded = [path.parent / unquote(urlsplit(link).path) for link in page(path).loaded]
    return sum(file.stat().st_size for file in {path.resolve(), *(file.resolve() for file in loaded)})
