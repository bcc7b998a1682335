"""How `make docs` builds the site: Sphinx over the Markdown of the repository as it lies, so that links work in both.

No page is written here. Why Sphinx: workbench/DESIGN.md, "Pages that GitHub shows". All that it loads is local.
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
import lessons  # noqa: E402

ABOUT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Every page, in the order in which the sidebar names them; the first page is README.md.
PAGES = {
    "Begin": ["docs/using", "docs/clusters", "docs/wanted", "docs/glossary"],
    "Lessons": ["docs/notebooks", *lessons.PAGES],
    "For the teacher": [f"docs/course/{path.stem}" for path in sorted((ROOT / "docs" / "course").glob("*.md"))],
    "Reference": [
        "docs/reference/strategies", "docs/reference/partitions", "docs/reference/schedules",
        "docs/reference/compressors", "docs/reference/optimizers", "docs/reference/policies", "docs/reference/tasks",
        "docs/reference/fabric", "docs/reference/experiment", "docs/reference/verbs", "docs/reference/views",
        "docs/reference/cli", "docs/reference/errors",
    ],
    "API": [f"docs/reference/api/{path.stem}" for path in sorted((ROOT / "docs" / "reference" / "api").glob("*.md"))],
    "Measured": ["docs/benchmarks", "docs/strategies", "docs/compression", "docs/prediction", "docs/reliability",
                 "docs/gpu"],
    "How it is built": [
        "docs/one_step", *(f"docs/flows/{path.stem}" for path in sorted((ROOT / "docs" / "flows").glob("*.md"))),
        "docs/shapes", "workbench/DESIGN", "CONTRIBUTING", "SECURITY", "CHANGELOG",
    ],
}  # fmt: skip

project = ABOUT["name"]
version = release = ABOUT["version"]
extensions = ["myst_parser", "api", "formulas", "lessons", "words"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}  # a lesson is made Markdown by lessons.py
root_doc = "README"
include_patterns = ["README.md", *(f"{page}.*" for pages in PAGES.values() for page in pages)]
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


def contents(app: Any, page: str, text: list[str]) -> None:
    """Gives the first page its table of contents, which Markdown has no word for."""
    if page == root_doc:
        for caption, pages in PAGES.items():
            listed = "\n".join(f"/{name}" for name in pages)
            text[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"


def first_page(app: Any, error: Exception | None) -> None:
    """Web servers and people look for index.html."""
    if error is None and app.builder.name == "html":
        shutil.copy(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", contents)
    app.connect("build-finished", first_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
