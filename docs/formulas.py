"""Shows LaTeX formulas as MathML, which browsers draw without a script, so that pages load nothing from elsewhere."""

from __future__ import annotations

from typing import Any, NoReturn

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml


def inline(writer: Any, node: nodes.math) -> NoReturn:
    """Writes a formula within a line."""
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def block(writer: Any, node: nodes.math_block) -> NoReturn:
    """Writes a formula on lines of its own."""
    writer.body.append(f"<p>{tex2mathml(node.astext(), as_block=True)}</p>\n")
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
