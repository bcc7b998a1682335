"""Links the first use of each of the glossary's words on a lesson's page to its row there.

A word is what the first column of a row has in bold; a name, what it has as code. Words are found in prose, in singular
or plural; names only as code. Nothing is written down for it in a lesson.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from lessons import PAGES

GLOSSARY = "docs/reference/glossary"
NOT_IN = (nodes.title, nodes.literal_block, nodes.reference, nodes.raw, nodes.comment, nodes.math, nodes.math_block)


def rows(glossary: nodes.document) -> Iterator[tuple[nodes.entry, str]]:
    """The first cell of each of the glossary's rows, and the anchor that it has on its page."""
    for row in glossary.findall(nodes.row):
        first = row[0]
        called = [*first.findall(nodes.strong), *first.findall(nodes.literal)]
        if isinstance(row.parent, nodes.tbody) and called:
            yield first, nodes.make_id(f"word {called[0].astext()}")


def anchor(app: Any, document: nodes.document) -> None:
    """Gives each row of the glossary its anchor."""
    if app.env.docname == GLOSSARY:
        for cell, name in rows(document):
            cell["ids"].append(name)


def named(glossary: nodes.document) -> tuple[dict[str, str], dict[str, str]]:
    """The anchors by word, in lower case, and by name in code."""
    words: dict[str, str] = {}
    names: dict[str, str] = {}
    every = list(rows(glossary))
    for cell, name in every:
        for node in cell.findall(nodes.strong):
            words.setdefault(node.astext().lower(), name)
    for cell, name in every:
        for node in cell.findall(nodes.literal):
            names.setdefault(node.astext(), words.get(node.astext(), name))  # `rank` is a rank, not PowerSGD's
    return words, names


def pattern(words: dict[str, str]) -> re.Pattern[str]:
    """Finds any of `words`, the longest first, each a group's match without its plural's ending."""

    def one(word: str) -> str:
        text = r"\s+".join(map(re.escape, word.split()))
        return rf"{text[:-1]}(?:y|ies)" if word.endswith("y") else rf"{text}(?:s|es)?"

    return re.compile(rf"\b(?:{'|'.join(map(one, sorted(words, key=len, reverse=True)))})\b", re.IGNORECASE)


def singular(found: str, words: dict[str, str]) -> str:
    """The word of which `found` is a form."""
    text = " ".join(found.lower().split())
    forms = (text, text.removesuffix("s"), text.removesuffix("es"), re.sub("ies$", "y", text))
    return next(form for form in forms if form in words)


def link(app: Any, document: nodes.document, page: str) -> None:
    """Makes the first use of each word on a lesson's page a link; a row is linked once, by whichever of its words."""
    if page not in PAGES:
        return
    words, names = named(app.env.get_doctree(GLOSSARY))
    there, done = app.builder.get_relative_uri(page, GLOSSARY), set[str]()
    finds = pattern(words)

    def reference(name: str, *inner: nodes.Node) -> nodes.reference:
        done.add(name)
        return nodes.reference("", "", *inner, refuri=f"{there}#{name}", internal=True, classes=["word"])

    def parts(text: str) -> Iterator[nodes.Node]:
        at = 0
        for match in finds.finditer(text):
            if (name := words[singular(match[0], words)]) not in done:
                yield nodes.Text(text[at : match.start()])
                yield reference(name, nodes.Text(match[0]))
                at = match.end()
        yield nodes.Text(text[at:])

    def inside(node: nodes.Node) -> bool:
        return any(isinstance(above, NOT_IN) for above in _above(node))

    for node in [n for n in document.findall() if isinstance(n, (nodes.Text, nodes.literal)) and not inside(n)]:
        if isinstance(node, nodes.literal):
            called = re.match(r"\w+", node.astext())
            if called and (name := names.get(called[0])) and name not in done:
                node.replace_self(reference(name, node.deepcopy()))
        elif not isinstance(node.parent, nodes.literal):
            node.parent.replace(node, list(parts(node.astext())))


def _above(node: nodes.Node) -> Iterator[nodes.Node]:
    while (node := node.parent) is not None:
        yield node


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("doctree-read", anchor)
    app.connect("doctree-resolved", link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
