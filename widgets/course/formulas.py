"""Writes the LaTeX formulas of a page as MathML, which browsers draw without a script."""

from __future__ import annotations

import re
from html import escape

from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml

CODE_OR_FORMULA = re.compile(
    r"```.*?```|`[^`\n]*`|\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^\s$](?:[^$\n]*[^\s$])?)\$", re.S
)
MARK = "twbformula{}end"  # stands for a formula while Markdown becomes HTML


def take_formulas(text: str, formulas: list[str]) -> str:
    """Replaces each formula in Markdown by a mark and appends its MathML to `formulas`.

    >>> made = []
    >>> take_formulas("`$a$` and $p - 1$.", made), "<math" in made[0]
    ('`$a$` and twbformula0end.', True)
    """

    def mark(match: re.Match[str]) -> str:
        latex = match["block"] or match["inline"]
        if latex is None:
            return match[0]
        formulas.append(write_mathml(latex.strip(), as_block=match["block"] is not None))
        return MARK.format(len(formulas) - 1)

    return CODE_OR_FORMULA.sub(mark, text)


def put_formulas(page: str, formulas: list[str]) -> str:
    """Replaces the marks in HTML by the formulas."""
    return re.sub(MARK.format(r"(\d+)"), lambda match: formulas[int(match[1])], page)


def write_mathml(latex: str, as_block: bool = False) -> str:
    """Returns a formula as MathML, or as code if docutils cannot read it."""
    try:
        return str(tex2mathml(latex, as_block=as_block))
    except MathError:
        return f"<code>{escape(latex)}</code>"
