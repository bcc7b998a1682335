"""Draws SVG by hand: shapes as text, one class per look. Knows no run and no strategy."""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

TEXT = 14  # px, the smallest text
WIDE = 0.56  # of the text's size: mean width of a character in a plain sans-serif


def n(x: float) -> str:
    """Formats a coordinate with at most two decimals, always in the same way."""
    words = f"{x:.2f}".rstrip("0").rstrip(".")
    return "0" if words == "-0" else words


def rect(x: float, y: float, width: float, height: float, look: str, **more: object) -> str:
    return f'<rect class="{look}" x="{n(x)}" y="{n(y)}" width="{n(width)}" height="{n(height)}"{_rest(more)}/>'


def line(x1: float, y1: float, x2: float, y2: float, look: str) -> str:
    return f'<line class="{look}" x1="{n(x1)}" y1="{n(y1)}" x2="{n(x2)}" y2="{n(y2)}"/>'


def text(x: float, y: float, words: str, look: str, **more: object) -> str:
    return f'<text class="{look}" x="{n(x)}" y="{n(y)}"{_rest(more)}>{escape(words)}</text>'


def _rest(more: dict[str, object]) -> str:
    return "".join(f' {k.replace("_", "-")}="{escape(str(v))}"' for k, v in more.items())


def width(words: str, size: float = TEXT) -> float:
    """Estimates the width of a text; the exact width depends on the reader's font."""
    return len(words) * size * WIDE


def wrapped(words: str, room: float, size: float = TEXT) -> list[str]:
    """Wraps a text into lines that fit into `room` px."""
    lines: list[str] = []
    for word in words.split():
        if lines and width(f"{lines[-1]} {word}", size) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def fitting(names: tuple[str, ...], room: float, size: float = TEXT) -> str:
    """Returns the longest of some names that fits into a box; "" if none does."""
    return next((name for name in names if width(name, size) <= room - 4), "")


def ticks(length: float, most: int = 10) -> list[float]:
    """Returns round numbers from 0 to `length`, at most `most` + 1 of them.

    >>> ticks(250)
    [0.0, 50.0, 100.0, 150.0, 200.0, 250.0]
    """
    rough = length / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(k * power for k in (1.0, 2.0, 5.0, 10.0) if k * power >= rough * (1 - 1e-9))
    return [k * step for k in range(math.floor(length / step * (1 + 1e-9)) + 1)]
