"""Shows the docstrings of public names on the pages of docs/reference/api/, by Sphinx's autodoc.

Docstrings are prose. This turns a line `name:  meaning` into the description of a parameter, and a sentence
`Raises KnobError if ...` into an entry.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import workbench
from tests import api
from tests.api import rst
from workbench.settings.parsed_docstring import is_code, paragraphs, terms

FIELD = re.compile(r"\w[\w, ]*: ")
RAISES = re.compile(r"^Raises ((?:\w*(?:Error|Deadlock))(?:(?:, | and )\w*(?:Error|Deadlock))*)(?: (.*))?\.$")


def sentences(text: str) -> list[str]:
    """Splits prose after full stops."""
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", " ".join(text.split()))


def parts(doc: str, parameters: dict[str, str]) -> Iterator[str]:
    """Yields the paragraphs of a docstring as reStructuredText, then a field for each parameter and each error."""
    errors: list[tuple[str, str]] = []
    for part in paragraphs(doc):
        if is_code(part):
            yield "::\n\n" + textwrap.indent(textwrap.dedent(part), "    ")
        elif part.startswith(">>> "):
            yield part
        elif FIELD.match(part) and (found := list(terms(part))):
            rest = [(names, text) for names, text in found if not {*re.split(", *", names)} <= parameters.keys()]
            yield "\n".join(f"- **{names}**: {rst(text)}" for names, text in rest)
        else:
            said = [(s, RAISES.match(s)) for s in sentences(part)]
            errors += [(found[1], found[2] or "") for _, found in said if found]
            yield rst(" ".join(s for s, found in said if not found))
    fields = [f":param {name}: {rst(text)}" for name, text in parameters.items()]
    for names, when in errors:
        fields += [f":raises {name}: {rst(when[:1].upper() + when[1:])}" for name in re.split(", | and ", names)]
    yield "\n".join(fields)


def public_place(name: str) -> int:
    """Returns the place of the public name in the parts of an address: 1 in `workbench.Lab.pause`."""
    parts = name.split(".")
    return next((i for i, part in enumerate(parts) if part in api.HOMES), 1)


def owner_of(name: str) -> tuple[type[Any] | None, str]:
    """Returns the public class in which `name` (`workbench.Lab.pause`) is, and the member's name."""
    top, *rest = name.split(".")[public_place(name) :]
    found = api.find(top) if top in api.HOMES else getattr(workbench, top, None)
    return (found, rest[0]) if inspect.isclass(found) and rest else (None, top)


def docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Replaces a docstring by its form for the site."""
    owner, member = owner_of(name)
    parameters: dict[str, str] = {}
    doc = "\n".join(lines).strip("\n")
    if what in ("method", "function"):
        methods = api.public(name.split(".")[public_place(name)])
        method = next((m for m in methods if m.name == member), None)
        if method is not None:
            doc = api.inherited_doc(owner, method) if owner else method.doc
            told = api.described(owner, method)
            parameters = {p: told[p] for p in method.parameters if p in told}
    lines[:] = [*"\n\n".join(filter(None, parts(doc, parameters))).split("\n"), ""]


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
