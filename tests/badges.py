"""Draws the README's badges from pyproject.toml (`python -m tests.tables`), as files without a badge service."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "badges"
LETTER, PAD, HIGH = 7.0, 7, 20
SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="{high}" role="img">
<title>{left}: {right}</title>
<rect width="{whole}" height="{high}" rx="3" fill="#444"/>
<path d="M{at} 0h{width}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3h-{width}z" fill="#005a8d"/>
<g fill="#fff" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11">
<text x="{pad}" y="14" textLength="{left_long}">{left}</text>
<text x="{text}" y="14" textLength="{right_long}">{right}</text>
</g>
</svg>
"""


def badge(left: str, right: str) -> str:
    """Returns two words side by side as SVG."""
    longs = [round(LETTER * len(word)) for word in (left, right)]
    at, width = longs[0] + 2 * PAD, longs[1] + 2 * PAD
    return SVG.format(left=left, right=right, whole=at + width, high=HIGH, at=at, width=width - 3, pad=PAD,
                      left_long=longs[0], right_long=longs[1], text=at + PAD)  # fmt: skip


def badges() -> dict[str, str]:
    """Returns the badges by file name."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
    return {
        "licence": badge("licence", about["license"]),
        "python": badge("Python", about["requires-python"].replace(">=", "") + " or newer"),
        "lessons": badge("lessons", "also without a kernel"),
    }


def write() -> None:
    for name, text in badges().items():
        (FOLDER / f"{name}.svg").write_text(text, "utf8")
