"""Measures how plainly pages and notebooks are written. `python -m tests.prose PAGE` quotes sentences to rewrite.

A marker is a phrase that a native reader has to read twice. Tables, headings and code do not count.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests import links

MARKERS = {
    "a clause without a noun: name the actor or the thing": (
        r"\b(?:to|by|for|from|of|with|in|on|at|whom|tell|tells|say|says|and|but|or|so|until|that|,) "
        r"(?:who|whoever|what|whatever) "
        r"(?:is|are|was|were|has|have|had|it|they|a|the|no|each|all|can|may|goes|comes|lies|holds|asks|came|went|looks?"
        r"|knows?)\b"
    ),
    "a sentence that begins with a clause, not with its subject": (
        r"(?:^|[.;:] )(?:Who|What|Whoever|Whatever|Whose) (?!(?:is|are|was|were|do|does|did|can|should|would|will"
        r"|happens|if|to|else)\b[^.]*\?)[a-z]+[^?]*$"
    ),
    "of which, of whom: turn the sentence round": (
        r"\bof (?:which|whom|whose)\b|\bin (?:whose|whom)\b|\bto whom\b|\bfor whom\b|\bwhose shards\b"
    ),
    "an ornament or an archaic word": (
        r"\b(?:seldom|anew|whereof|thereof|hence|thus|therein|amiss|forthwith|ere|nought|naught|unlike stages"
        r"|so-manieth|dear(?:er)?|in hand|by and by|now and then|meanwhile|besides?)\b"
    ),
    "a passive of saying: who says what to whom": (
        r"\b(?:is|are|was|were|be|been|being) "
        r"(?:said|told|named|heard|asked|given|let go|put out|made up|taken in|left out|done away)\b"
    ),
    "for: write because": (
        r", for (?:it|they|he|she|there|these|those|this|that|a|the|no|each|all|we|nobody|nothing)\b"
    ),
    "a pronoun without a noun": (
        r"\b(?:the others|all others|all the rest|all that|those that|those who|that which|such as are|such a one"
        r"|one of them)\b"
    ),
    "a share in words: write the number": (
        r"\b(?:a|the) (?:twentieth|tenth|fifth|third|quarter|hundredth|thousandth) of (?:a|the|its|it)\b"
    ),
    "to the bit: write exact or bit-identical": r"\bto the (?:bit|digit|letter)\b",
    "a figurative verb": (
        r"\b(?:comes?|goes|go|came|went) (?:to lie|to stand|to hold|over it|apart|along with)\b"
        r"|\b(?:lies|stands) (?:where|there|beside|with)\b"
    ),
    "a subject of no and none": (
        r"\bnobody (?:knows|asks|has|else|need)|\bnothing (?:of it|more|else) (?:is|comes|goes)\b|\bno more than\b"
    ),
    "is there, can be had: write exists or is available": (
        r"\bmay (?:not )?be had\b|\bcan be had\b|\bis there\b(?!\?)|\bare there\b(?!\?)|\bwill there be\b"
    ),
}
COMPILED = {why: re.compile(pattern, re.I) for why, pattern in MARKERS.items()}
LONG = 30  # words in a sentence


class Figures(NamedTuple):
    """The measure of a text: its words, markers per 1,000 words, words per sentence, and long sentences in per cent."""

    words: int
    markers: float
    mean: float
    long: float


def pages() -> list[Path]:
    """Returns the pages for readers: README, CONTRIBUTING, SECURITY and every page of `docs/`."""
    first = {links.ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")}
    return [page for page in links.pages() if page in first or (links.ROOT / "docs") in page.parents]


def notebooks() -> list[Path]:
    every = (links.ROOT / "notebooks").rglob("*.ipynb")
    return sorted(path for path in every if ".ipynb_checkpoints" not in path.parts)


def sentences(path: Path) -> list[str]:
    """Returns the sentences of a page or a notebook, with CODE for inline code."""
    text = path.read_text()
    if path.suffix != ".ipynb":
        return list(split(plain(text)))
    cells = ["".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown"]
    return [sentence for cell in cells for sentence in split(plain(cell))]


def plain(text: str) -> str:
    """Returns Markdown without blocks of code, tags, tables, headings and the targets of links."""
    text = re.sub(r"```.*?```", " ", text, flags=re.S)
    text = re.sub(r"<[^>]+>", " ", text)
    kept = [n for n in text.splitlines() if not n.lstrip().startswith(("|", "#", "![", "<!--")) and n[:4] != "    "]
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(kept))
    return re.sub(r"`[^`]*`", "CODE", text)


def split(text: str) -> Iterator[str]:
    """Yields the sentences of plain text that have at least four words."""
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*0-9]+[.)]? |\n(?=\s*[\w`][\w`, *]*: )", text):
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(C])", " ".join(paragraph.split())):
            if len(re.findall(r"[A-Za-z]+", sentence)) >= 4:
                yield sentence.strip()


def length(sentence: str) -> int:
    """Returns the number of words."""
    return len(re.findall(r"[A-Za-z0-9'’]+", sentence))


def markers(sentence: str) -> list[tuple[str, str]]:
    """Returns each marker of a sentence and its kind."""
    return [(found.group(), why) for why, marker in COMPILED.items() for found in marker.finditer(sentence)]


def measure(text: list[str]) -> Figures:
    """Measures sentences."""
    lengths = [length(sentence) for sentence in text]
    words, count = sum(lengths), max(1, len(text))
    found = sum(len(markers(sentence)) for sentence in text)
    long = sum(n > LONG for n in lengths)
    return Figures(words, 1000 * found / max(1, words), words / count, 100 * long / count)


def main() -> None:
    """Prints the figures of pages, and the sentences that are long or have a marker."""
    text = [sentence for name in sys.argv[1:] for sentence in sentences(Path(name))]
    got = measure(text)
    print(f"{got.words} words: {got.markers:.1f} markers per 1,000 words, {got.mean:.1f} words per sentence,"
          f" {got.long:.1f} % of the sentences over {LONG} words")  # fmt: skip
    for sentence in sorted(text, key=lambda s: (-len(markers(s)), -length(s))):
        if (found := markers(sentence)) or length(sentence) > LONG:
            print(f"\n- ({length(sentence)} words) {sentence}")
            print(*(f"    {part!r}: {why}" for part, why in found), sep="\n")


if __name__ == "__main__":
    main()
