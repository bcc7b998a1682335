"""How `make docs` builds the site: Sphinx over the Markdown of the repository as it lies, so that links work in both.

No page is written here. Why Sphinx: workbench/DESIGN.md, "Pages that GitHub shows". All that it loads is local.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
import lessons  # noqa: E402

ABOUT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def stems(folder: str) -> list[str]:
    """Returns the Markdown pages of a folder."""
    return [f"{folder}/{path.stem}" for path in sorted((ROOT / folder).glob("*.md"))]


# The entries of the sidebar by section: at most 30 (tests/unit/test_site.py). The first page is docs/index.md.
PAGES = {
    "Start": ["docs/start/install", "docs/start/quickstart", "docs/start/tour", "docs/start/own_script"],
    "How-to": ["docs/howto/index"],
    "Learn": ["docs/learn/lessons", "docs/learn/teachers"],
    "Explain": [f"docs/explain/{name}" for name in (
        "two_clocks", "exposed_communication", "cost_models", "live_change", "rank_replaced", "checkpoints",
        "comparison")],
    "Reference": ["docs/reference/families", "docs/reference/experiment", "docs/reference/verbs",
                  "docs/reference/views", "docs/reference/api", "docs/reference/cli", "docs/reference/errors",
                  "docs/reference/glossary"],
    "Project": ["docs/project/measured", "docs/project/wanted", "docs/project/tests", "workbench/DESIGN",
                "CONTRIBUTING", "SECURITY", "CHANGELOG"],
}  # fmt: skip
# Pages below an entry of the sidebar, which folds them away.
UNDER = {
    "docs/howto/index": [page for page in stems("docs/howto") if page != "docs/howto/index"],
    "docs/learn/lessons": lessons.PAGES,
    "docs/learn/teachers": [*stems("docs/learn/teach"), "docs/project/tried"],
    "docs/reference/families": [
        "docs/reference/strategies", "docs/reference/partitions", "docs/reference/schedules",
        "docs/reference/compressors", "docs/reference/optimizers", "docs/reference/policies", "docs/reference/tasks",
        "docs/reference/fabric", "docs/reference/scripts",
    ],
    "docs/reference/api": stems("docs/reference/api"),
    "docs/project/measured": [
        "docs/project/benchmarks", *stems("docs/project/benchmarks"), "docs/project/strategies",
        "docs/project/compression", "docs/project/prediction", "docs/project/reliability", "docs/project/gpu",
    ],
    "workbench/DESIGN": ["docs/project/one_step", *stems("docs/project/flows"), "docs/project/shapes"],
}  # fmt: skip

project = ABOUT["name"]
version = release = ABOUT["version"]
extensions = ["myst_parser", "api", "formulas", "lessons", "words"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}  # a lesson is made Markdown by lessons.py
root_doc = "docs/index"
LISTED = [page for pages in (*PAGES.values(), *UNDER.values()) for page in pages]
include_patterns = [f"{root_doc}.md", *(f"{page}.*" for page in LISTED)]
OTHERS = [p.name for p in ROOT.iterdir() if p.is_dir() and p.name not in ("docs", "workbench", "notebooks")]
exclude_patterns = ["docs/data", *OTHERS]
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]  # $x$ is a formula, as GitHub and JupyterLab have it
html_math_renderer = "mathml"  # formulas.py
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
smartquotes = False  # what is typed stays what is typed
html_theme = "pydata_sphinx_theme"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_context = {"default_mode": "auto"}
templates_path = ["_templates"]
html_sidebars = {"**": ["contents.html"]}
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "navbar_start": ["navbar-logo"], "navbar_center": [], "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"], "show_toc_level": 2, "footer_start": [], "footer_end": [],
    "article_header_start": [], "article_header_end": [], "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}  # fmt: skip


def toctree(pages: list[str], caption: str = "") -> str:
    """Returns a table of contents, for which Markdown has no syntax."""
    options = "\n".join([":hidden:", *([f":caption: {caption}"] if caption else [])])
    listed = "\n".join(f"/{name}" for name in pages)
    return f"\n```{{toctree}}\n{options}\n\n{listed}\n```\n"


def contents(app: Any, page: str, text: list[str]) -> None:
    """Gives the first page and the overview pages their tables of contents."""
    if page == root_doc:
        text[0] += "".join(toctree(pages, caption) for caption, pages in PAGES.items())
    if page in UNDER:
        text[0] += toctree(UNDER[page])


def first_page(app: Any, error: Exception | None) -> None:
    """Writes index.html, which web servers and people look for: it leads to the first page."""
    if error is None and app.builder.name == "html":
        there = f"{root_doc}.html"
        page = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={there}">
<title>{project}</title></head><body><a href="{there}">{project}</a></body></html>
"""
        (Path(app.outdir) / "index.html").write_text(page, "utf8")


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", contents)
    app.connect("build-finished", first_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
