"""Tests the site that `make docs` builds: no warnings, valid links, and no files from elsewhere.

Chromium plays every fourth lesson at the size of a phone, from disk. EVERY=1 plays all.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from docutils.utils.math.latex2mathml import tex2mathml

import workbench
from tests.chromium import find
from tests.site_links import broken, is_address, page, pages, weight

ROOT = Path(__file__).parent.parent.parent
LESSONS = sorted(p.stem for p in (ROOT / "notebooks").glob("*.ipynb"))
MOST = 3_000_000  # maximum bytes of a page with everything that it loads
RUNS = "_static/lessons"


def test_every_page_is_on_the_site() -> None:
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    shown = {conf["root_doc"], *conf["LISTED"]}
    there = {p.relative_to(ROOT).with_suffix("").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    there |= {f"notebooks/{name}" for name in LESSONS}
    assert there <= shown and all(list(ROOT.glob(f"{name}.*")) for name in shown)


def test_the_sidebar_has_at_most_thirty_entries() -> None:
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    entries = [name for pages in conf["PAGES"].values() for name in pages]
    assert len(entries) <= 30 and set(conf["UNDER"]) <= set(entries)


def test_every_lesson_has_a_run_for_its_page() -> None:
    assert not set(LESSONS) - set(runpy.run_path(str(ROOT / "docs" / "lessons.py"))["RUNS"])


@pytest.mark.parametrize("name", LESSONS)
def test_the_formulas_of_a_lesson_can_be_drawn(name: str) -> None:
    """The site has formulas as MathML, from the part of LaTeX that docutils knows."""
    for cell in json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text("utf8"))["cells"]:
        text = re.sub(r"`[^`]*`", "", "".join(cell["source"])) if cell["cell_type"] == "markdown" else ""
        for block, inline in re.findall(r"\$\$(.+?)\$\$|\$([^$]+)\$", text, re.DOTALL):
            assert "<math" in tex2mathml(block or inline, as_block=bool(block))


def test_stored_outputs_are_shown_and_answers_are_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx", reason="needs the docs extra")
    monkeypatch.syspath_prepend(ROOT / "docs")
    import lessons

    def cell(source: str, **data: list[str] | str) -> dict[str, Any]:
        shown = {key.replace("_", "/"): value for key, value in data.items()}
        outputs = [{"output_type": "display_data", "metadata": {}, "data": one} for one in ({}, shown)] if data else []
        return {"cell_type": "code", "source": [source], "outputs": outputs}

    cells = [{"cell_type": "markdown", "source": ["# First run"]}, cell("1 + 1", text_plain=["a < b\n", "\n", "c"]),
             cell("Prediction()", text_html=["<p>How\n", "long?</p>"]),
             cell("guess.after(x)", image_png="AAAA", text_plain=['a "chart"']), cell("y = 1")]  # fmt: skip
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "01_first_run.ipynb").write_text(json.dumps({"cells": cells}))
    monkeypatch.setattr(lessons, "ROOT", tmp_path)
    monkeypatch.setattr(lessons, "PAGES", ["notebooks/01_first_run"])
    text = lessons.markdown("notebooks/01_first_run", "run.js", "Simulated.")
    shown = [line for line in text.splitlines() if "lesson-result" in line]
    assert shown[0] == '<div class="lesson-result"><pre>a &lt; b&#10;&#10;c</pre></div>'
    assert shown[1] == '<div class="lesson-result"><p>How long?</p></div>'
    assert shown[2].startswith(
        '<details class="lesson-result"><summary>Show the result</summary><img loading="lazy" src='
    )
    assert shown[2].endswith('alt="a &quot;chart&quot;"></details>') and len(shown) == 3
    lessons.write_pictures(tmp_path)
    (file,) = tmp_path.glob("*.png")
    assert file.read_bytes() == b"\0\0\0" and file.name in shown[2]


def test_is_address_accepts_only_addresses() -> None:
    assert is_address("https://docs.pytorch.org/docs/stable/ddp.html#a-b") and is_address("mailto:a@b.org")
    for wrong in ("https://", "https://one word.org", "http//x.org", "https://localhost", "mailto:a", "javascript:f()"):
        assert not is_address(wrong), wrong


def test_a_formula_is_mathml_or_stays_as_typed() -> None:
    pytest.importorskip("sphinx", reason="needs the docs extra")
    nodes = pytest.importorskip("docutils.nodes")
    mathml = runpy.run_path(str(ROOT / "docs" / "formulas.py"))["mathml"]
    assert mathml(nodes.math(text=r"\frac{1}{p}")).startswith("<math ")
    assert mathml(nodes.math(text=r"a < \unknown")) == r"<code>a &lt; \unknown</code>"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the site once. It reuses runs that `make docs` made from the same code, which their names show."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "site" / RUNS).mkdir(parents=True)
    for made in (ROOT / "site" / RUNS).glob("*.*.js"):
        shutil.copy(made, folder / "site" / RUNS)
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", "-d", str(folder / "doctrees")]
    command = [*build, str(ROOT), str(folder / "site")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return folder / "site"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the build simulates a run for each lesson
def test_the_site_has_all_pages_and_no_broken_links(site: Path) -> None:
    there = pages(site)
    wanted = {"index.html", "docs/reference/glossary.html", *(f"notebooks/{name}.html" for name in LESSONS)}
    assert wanted <= {p.relative_to(site).as_posix() for p in there}
    assert not {p.name: wrong for p in there if (wrong := broken(p, site))}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_inventory_of_the_site_has_every_public_name(site: Path) -> None:
    from sphinx.util.inventory import InventoryFile

    with (site / "objects.inv").open("rb") as file:
        found = InventoryFile.load(file, "", lambda base, page: page)
    there = {name for kind in found if kind.startswith("py:") for name in found[kind]}
    assert {f"workbench.{name}" for name in workbench.__all__} <= there


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_pages_load_only_local_files_of_less_than_three_megabytes(site: Path) -> None:
    for path in pages(site):
        assert not [link for link in page(path).loaded if re.match(r"\w+:|//", link)], path
        assert weight(path) < MOST, path
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", style.read_text()), style


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LESSONS)
def test_a_lessons_page_has_the_notebook_its_run_and_linked_terms(site: Path, name: str) -> None:
    text = (site / "notebooks" / f"{name}.html").read_text()
    bare = re.sub(r"<[^>]+>", "", text)
    cells = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    code = [line for cell in cells if cell["cell_type"] == "code" for line in "".join(cell["source"]).splitlines()]
    escaped = [re.sub(r"[&<>\"']", ".+?", re.escape(line)) for line in code if line.strip()]
    assert all(re.search(line, bare) for line in escaped)
    assert ("Simulated" in bare) != ("Recorded" in bare)
    prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert text.count("<math ") == len(re.findall(r"\$\$[^$]+\$\$|\$[^$\n]+\$", prose)), "formulas are MathML"
    links = re.findall(r'<a class="word[^"]*" href="([^"]+)"', text)
    assert "../docs/reference/glossary.html#word-rank" in links and len(links) == len(set(links)) > 4


@pytest.fixture(scope="module")
def phone(site: Path) -> Iterator[Any]:
    """A touch phone of 390 x 844."""
    if (chromium := find()) is None:
        pytest.skip("no chromium on this machine")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        size = {"width": 390, "height": 844}
        yield browser.new_context(viewport=size, is_mobile=True, has_touch=True)
        browser.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if k % 4 == 1 else pytest.mark.every) for k, name in enumerate(LESSONS)
])  # fmt: skip
def test_a_lessons_run_is_played_scrubbed_and_inspected_on_a_phone(phone: Any, site: Path, name: str) -> None:
    shown = phone.new_page()
    shown.set_default_timeout(120_000)  # the machine may be busy
    asked: set[str] = set()
    troubles: list[str] = []
    shown.on("request", lambda request: asked.add(request.url))
    shown.on("pageerror", lambda error: troubles.append(str(error)))
    shown.goto((site / "notebooks" / f"{name}.html").as_uri())
    assert not any("plotly.js" in url for url in asked), "two megabytes are loaded before anybody comes near the run"
    shown.evaluate("document.getElementById('the-run').scrollIntoView()")
    shown.wait_for_selector("[data-view=timeline][data-draws]")
    last = int(shown.inner_text(".wb-moment").split(" of ")[1].split(",")[0])

    held = "document.querySelector('[data-view=timeline]').dataset.firstStep == '{}'"
    for step in (0, last // 2, last // 2 + 1):  # every step, not only some
        shown.fill("[data-view=timeline] .wb-step", str(step))
        shown.press("[data-view=timeline] .wb-step", "Enter")
        shown.wait_for_function(held.format(step))
    shown.tap("[data-view=timeline] .wb-head .wb-button[aria-expanded]")
    cells = "[...document.querySelectorAll('[data-view=timeline] tbody td:first-child')]"
    rows = f"{cells}.map((cell) => Number(cell.textContent))"
    shown.wait_for_function(f"({rows}).length")
    assert min(shown.evaluate(rows)) == last // 2 + 1, "the table is of other steps than are shown"

    x, y = shown.evaluate("""() => {
      const { xaxis, yaxis } = document.querySelector('[data-view=timeline] .wb-chart')._fullLayout;
      return [xaxis._offset + 6, yaxis._offset + yaxis.l2p(-0.2)];
    }""")
    tip = shown.locator("[data-view=timeline] .wb-tip:not([hidden])")
    for right in range(0, 60, 4):  # the boxes of micro-batches are narrow, with idle time between them
        shown.tap("[data-view=timeline] .wb-frame", position={"x": x + right, "y": y})
        shown.wait_for_timeout(300)
        if tip.count():
            break
    assert "rank 0, step" in shown.inner_text("[data-view=timeline] .wb-tip")

    shown.select_option(".wb-player select", "1000")
    shown.tap(".wb-play")
    ended = f"document.querySelector('.wb-moment').textContent.startsWith('step {last} of')"
    shown.wait_for_function(ended)
    assert shown.evaluate("document.documentElement.scrollWidth") <= 390
    assert not shown.query_selector_all(".wb-kept [data-ask]:visible")
    assert {urlsplit(url).scheme for url in asked} <= {"file", "blob", "data"} and not troubles
    files = {Path(urlsplit(url).path) for url in asked if url.startswith("file:")}
    assert sum(file.stat().st_size for file in files) < MOST
    shown.close()
