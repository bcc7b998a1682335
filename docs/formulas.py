"""Shows LaTeX formulas as MathML, which browsers draw without a script, so that pages load nothing from elsewhere."""

from __future__ import annotations

import html
from typing import Any, NoReturn

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

log = logging.getLogger(__name__)


def mathml(node: nodes.Element, as_block: bool = False) -> str:
    """Returns a formula as MathML. Warns about LaTeX that docutils cannot read, and returns it as it is."""
    try:
        return tex2mathml(node.astext(), as_block=as_block)
    except MathError as error:
        log.warning("formula %r: %s", node.astext(), error, location=node)
        return f"<code>{html.escape(node.astext())}</code>"


def inline(writer: Any, node: nodes.math) -> NoReturn:
    """Writes a formula within a line."""
    writer.body.append(mathml(node))
    raise nodes.SkipNode


def block(writer: Any, node: nodes.math_block) -> NoReturn:
    """Writes a formula on lines of its own."""
    writer.body.append(f"<p>{mathml(node, as_block=True)}</p>\n")
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
