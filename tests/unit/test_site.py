"""The site as `make docs` builds it: without a warning, and with all that it loads in its own folder."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LOADED = r"<(?:script|link|img|iframe)[^>]*?\s(?:src|href)=\"([^\"]*)\""


def test_every_page_is_on_the_site() -> None:
    every = runpy.run_path(str(ROOT / "docs" / "conf.py"))["PAGES"].values()
    shown = {f"{name}.md" for pages in every for name in pages}
    there = {p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert there <= shown and all((ROOT / name).exists() for name in shown)


@pytest.mark.long
def test_the_site_is_built_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    site = tmp_path / "site"
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", "-d", str(tmp_path / "doctrees")]
    ran = subprocess.run([*build, str(ROOT), str(site)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    pages = sorted(p for p in site.rglob("*.html") if "_static" not in p.parts)  # there lies a template of the theme
    assert {"index.html", "docs/glossary.html"} <= {p.relative_to(site).as_posix() for p in pages}
    for page in pages:
        for target in re.findall(LOADED, page.read_text()):
            assert not re.match(r"\w+:|//", target), f"{page}: {target}"
            assert (page.parent / target.partition("?")[0].partition("#")[0]).exists(), f"{page}: {target}"
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", style.read_text()), style
