"""Runs the code of the how-to pages as a reader would, and compares what it prints with the page.

    python -m tests.howto_pages PAGE [FOLDER]     # prints each block and its output

A page's python blocks run in order, in one namespace. A block that begins with `# NAME.py` is a file of that name. A
`text` block shows the output of the block above. Numbers may differ, and `...` stands for lines that the page leaves
out. A `console` block shows output that depends on the moment; it is not compared.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench import Lab

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "howto").glob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
CONFIG = "# ipcluster_config.py"  # tests/engine/test_launchers.py runs these blocks


def blocks(page: Path, *kinds: str) -> list[tuple[str, str]]:
    """Returns (kind, text) of a page's code blocks of these kinds, in order."""
    return [(kind, text) for kind, text in FENCE.findall(page.read_text()) if kind in kinds]


def examples(page: Path) -> list[tuple[str, str]]:
    """Returns (code, output that the page shows) of a page's python blocks. The output may be ""."""
    found: list[tuple[str, str]] = []
    for kind, text in blocks(page, "python", "text"):
        if kind == "python":
            found.append((text, ""))
        elif found and not found[-1][1]:
            found[-1] = (found[-1][0], text)
    return [(code, output) for code, output in found if not code.startswith(CONFIG)]


def run_page(page: Path) -> Iterator[tuple[str, str, str]]:
    """Runs a page's examples in the current folder. Yields (code, output on the page, real output)."""
    names: dict[str, Any] = {"__name__": "__main__"}  # as in a notebook: ranks get such functions by value
    try:
        for code, output in examples(page):
            if file := re.match(r"# (\w+\.py)\n", code):
                Path(file[1]).write_text(code)
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, page.name, "exec", dont_inherit=True), names)
            yield code, output, printed.getvalue()
    finally:
        for lab in [value for value in names.values() if isinstance(value, Lab)]:
            lab.close()


def without_numbers(line: str) -> str:
    """Replaces each number by 0, and each run of blanks and rules by one character."""
    line = re.sub(r"-?\d+(\.\d+)?(e[-+]?\d+)?|\b(nan|inf)\b", "0", line.strip())
    return re.sub(r"(.)\1{3,}", r"\1", re.sub(r"\s+", " ", line))


def missing_lines(expected: str, printed: str) -> list[str]:
    """Returns the lines of the page's output that the program has not printed, numbers aside."""
    real = {without_numbers(line) for line in printed.splitlines()}
    shown = [line for line in expected.splitlines() if line.strip() not in ("", "...")]
    return [line for line in shown if without_numbers(line) not in real]


def main(page: str, folder: str | None = None) -> None:
    os.chdir(folder or tempfile.mkdtemp())
    path = ROOT / "docs" / "howto" / page
    for code, output, printed in run_page(path):
        print(f">>>\n{code}---\n{printed}")
        for line in missing_lines(output, printed):
            print("NOT PRINTED:", line)


if __name__ == "__main__":
    main(*sys.argv[1:])
