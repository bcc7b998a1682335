"""Generates docs/reference/api/ and docs/reference/errors.md, and finds what docstrings of public methods lack.

A docstring describes a parameter in a line `name:  meaning` of a paragraph of its own, and an error in a sentence
`Raises KnobError if ...`. The docstring of a class may describe a parameter for all of its methods.
`docs/api.py` shows the same docstrings on the site.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import workbench
from tests.reference import prose, shipped, table
from workbench.settings import Knob, knobs
from workbench.settings.parsed_docstring import paragraphs, terms

# Every public name that is not a member of a family is on one of these pages.
PAGES: dict[str, tuple[str, ...]] = {
    "lab": ("Lab",),
    "run": ("Run", "Checkpoint"),
    "experiment": ("Experiment", "Fabric", "Link"),
    "task": ("Task", "adopt", "steps", "training"),
    "change": ("Change", "Knob", "knob"),
    "functions": ("simulate", "plan", "balance", "tune", "recipe", "report", "log_to"),
    "families": ("Strategy", "Partition", "Schedule", "Compressor", "Codec", "Optimizer", "Policy", "Seen", "Decision",
                 "Fault", "Algorithm"),
    "rank": ("Rank", "Bucket", "Memory"),
    "record": ("Timeline", "Span", "Sample", "Mark", "Costs"),
}  # fmt: skip
RESULTS = {  # objects that public methods return, on docs/reference/api/results.md, by module
    "workbench.cluster.run.run_changes": ("PendingChange",),
    "workbench.record.checkpoint_request": ("PendingCheckpoint",),
    "workbench.cluster.engines.rank_stacks": ("Stacks",),
    "workbench.record.run": ("Standing",),
    "workbench.analysis.resources.memory": ("RankMemory",),
    "workbench.sim.plan.advice": ("AdviceTable", "Advice", "Suggestion"),
    "workbench.sim.plan.what_if": ("WhatIf",),
    "workbench.sim.plan.scaling": ("Scaling", "ScalingRow"),
    "workbench.sim.plan.planner": ("PlannedPair",),
    "workbench.sim.plan.balancer": ("BalanceProposal",),
    "workbench.sim.tune.live_search": ("Tuning",),
    "workbench.sim.plan.trials": ("Tuned", "Trial"),
}
HOMES = {name: module for module, names in RESULTS.items() for name in names}
ERRORS = {  # on docs/reference/errors.md, by the module from which users import them
    "workbench": ("KnobError", "RunError", "Deadlock"),
    "workbench.lab": ("ClusterError", "RankError"),
    "workbench.cluster.run.rank_errors": ("RankRefusal",),
    "workbench.rank": ("StrategyError",),
    "workbench.tasks": ("TaskError",),
    "workbench.host.memory.budget": ("OutOfMemory",),
    "workbench.host.placement.canonical_state": ("RankDisagreement",),
}
REMEDY = "What to do:"
FAMILIES = ("Strategy", "Partition", "Schedule", "Compressor", "Optimizer", "PolicyBase", "Fault", "Algorithm",
            "TaskBase")  # fmt: skip
OWN_PAGES = {"Task", "Policy", "Codec"}  # members of a family that have an entry of their own
INHERITED = {"Family", "ABC", "object"}  # bases that add no method for users
RAISES = re.compile(r"\b[Rr]aises? ([^.]*(?:\.\w[^.]*)*)")


@dataclass(frozen=True)
class Method:
    """A public method or property, and the class that defines it (None for a function)."""

    name: str
    function: Any
    owner: type[Any] | None = None
    is_property: bool = False

    @property
    def doc(self) -> str:
        return inspect.cleandoc(self.function.__doc__ or "")

    @property
    def summary(self) -> str:
        """The first sentence of the docstring."""
        return first_sentence(self.doc)

    @property
    def parameters(self) -> list[str]:
        """The names of its parameters without `self` and `cls`."""
        every = list(inspect.signature(self.function).parameters)
        return every[1:] if self.owner and every[:1] in (["self"], ["cls"]) else every


def first_sentence(doc: str) -> str:
    """Returns the first sentence of a docstring in one line."""
    text = " ".join((paragraphs(doc) or [""])[0].split())
    return re.split(r"(?<=[.:?])\s(?=[A-Z`])", text, maxsplit=1)[0]


def bases(owner: type[Any]) -> list[type[Any]]:
    """Returns the class and its own bases, nearest first, without Family and Python's classes."""
    return [b for b in owner.__mro__ if b.__module__.startswith("workbench") and b.__name__ not in INHERITED]


def methods(owner: type[Any]) -> Iterator[Method]:
    """Yields the public methods and properties of a class, inherited ones included, in the order of the source."""
    seen: set[str] = set()
    for base in bases(owner):
        for name, value in vars(base).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if isinstance(function, property | functools.cached_property):
                getter = function.fget if isinstance(function, property) else function.func
                if getter is not None and getter.__name__ != "<lambda>":
                    yield Method(name, getter, base, True)
            elif inspect.isfunction(function) and function.__name__ == name:  # not a second name of it
                yield Method(name, function, base)


def find(name: str) -> Any:
    """Returns the public class or function, or the class of results, of this name."""
    return getattr(importlib.import_module(HOMES.get(name, "workbench")), name)


def public(name: str) -> list[Method]:
    """Returns the methods of a public class, or the function of this name."""
    found = find(name)
    return list(methods(found)) if inspect.isclass(found) else [Method(name, found)]


def inherited_doc(owner: type[Any], method: Method) -> str:
    """Returns the method's docstring, or that of the nearest base that has one."""
    found = [vars(b)[method.name] for b in bases(owner) if method.name in vars(b)]
    docs = [getattr(f, "__func__", f).__doc__ for f in found]
    return inspect.cleandoc(next(filter(None, docs), ""))


def described(owner: type[Any] | None, method: Method) -> dict[str, str]:
    """Returns the description of each parameter by name. The method's own comes before that of its class."""
    docs = [inspect.cleandoc(b.__doc__ or "") for b in reversed(bases(owner))] if owner else []
    found: dict[str, str] = {}
    for doc in [*docs, inherited_doc(owner, method) if owner else method.doc]:
        for names, meaning in terms(doc):
            found |= dict.fromkeys(listed(names), meaning)
    return found


def raised(function: Any) -> set[str]:
    """Returns the names of the errors that a function's own body raises."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    every = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc)
    names = (ast.unparse(e.func if isinstance(e, ast.Call) else e) for e in every)
    return {name.rpartition(".")[2] for name in names} - {"NotImplementedError"}


def lacks(owner: type[Any] | None, method: Method) -> list[str]:
    """Returns what the docstring of a public method lacks: a summary, parameters, errors."""
    doc = inherited_doc(owner, method) if owner else method.doc
    wrong = [] if re.match(r"\S.*\S", doc) else ["a summary"]
    told = described(owner, method)
    wrong += [f"parameter {name}" for name in method.parameters if name not in told]
    found = sorted(e for e in raised(method.function) if e[:1].isupper())
    return wrong + [f"error {name}" for name in found if not states(doc, name)]


def undescribed(owner: type[Any]) -> list[str]:
    """Returns the parameters of a class's constructor that neither its docstring nor a knob describes."""
    made = owner.__init__ if inspect.isfunction(owner.__init__) else owner  # a NamedTuple has none of its own
    every = (names for b in [*bases(owner), made] for names, _ in terms(inspect.cleandoc(b.__doc__ or "")))
    told = {name for names in every for name in listed(names)} | {k.name for k in declared_knobs(owner)}
    return [name for name in inspect.signature(made).parameters if name != "self" and name not in told]


def listed(names: str) -> list[str]:
    """Returns the names before a colon, as in `host, disk:  bandwidths`."""
    return [name.strip() for name in names.split(",")]


# -- pages


def entry(name: str) -> str:
    """Returns the part of a page on one public name: its summary, its members, and a block for the site."""
    found = find(name)
    if not inspect.isclass(found):
        return f"## {name}\n\n{prose(first_sentence(inspect.getdoc(found) or ''))}\n\n{directive('function', name)}"
    rows = []
    for method in methods(found):
        doc = first_sentence(inherited_doc(found, method))
        call = method.name if method.is_property else f"{method.name}({', '.join(method.parameters)})"
        rows.append([f"`{call}`", prose(doc)])
    listed = table(["member", "what it does or is"], rows) if rows else ""
    said = prose(first_sentence(inspect.cleandoc(found.__doc__ or "")))
    options = [":members:", f":inherited-members: {', '.join(sorted(outside(found)))}", *exclude(found)]
    return "\n\n".join(filter(None, [f"## {name}", said, listed, directive("class", name, *options)]))


def exclude(found: type[Any]) -> list[str]:
    """Returns the option that leaves out settings, which are listed in words, and old names of methods."""
    shown = {m.name for m in methods(found)}
    names = {n for b in bases(found) for n in vars(b) if not n.startswith("_")} - shown
    return [f":exclude-members: {', '.join(sorted(names))}"] if names else []


def settings(found: type[Any]) -> list[str]:
    """Returns an entry for each setting of a class: its type, default, description and allowed values."""
    lines = []
    for k in declared_knobs(found):
        lines += ["", f"   .. py:attribute:: {k.name}", f"      :type: {k.kind.__name__}",
                  f"      :value: {k.default!r}", "", f"      {in_words(k)}"]  # fmt: skip
    return lines


def declared_knobs(found: type[Any]) -> tuple[Knob, ...]:
    """Returns the settings of a class. () for one without settings."""
    takes = is_dataclass(found) and any("knob" in f.metadata for f in fields(found))
    return knobs(found) if takes else ()


def in_words(k: Knob) -> str:
    """Returns what a setting is, with its unit and its range."""
    span = "" if k.kind is bool else f" Allowed: {k.allowed}."
    return rst(f"{k.doc[:1].upper()}{k.doc[1:]}.{span}{'' if k.live else ' Fixed during a run.'}")


def outside(found: type[Any]) -> set[str]:
    """Returns the bases whose members no page shows."""
    return {b.__name__ for b in found.__mro__} - {b.__name__ for b in bases(found)}


def directive(kind: str, name: str, *options: str) -> str:
    """Returns the block from which the site makes the entry of a name."""
    found = find(name)
    lines = [f".. auto{kind}:: {HOMES.get(name, 'workbench')}.{name}", *(f"   {option}" for option in options)]
    lines += settings(found) if inspect.isclass(found) else []
    return "\n".join(["```{eval-rst}", *lines, "```"])


def rst(text: str) -> str:
    """Returns prose with the marks of reStructuredText escaped. `code` stays code, as a link if it names an entry."""
    pieces = " ".join(text.split()).split("`")
    if not len(pieces) % 2:
        return re.sub(r"([*|_\\`])", r"\\\1", " ".join(text.split()))
    for i in range(0, len(pieces), 2):
        pieces[i] = re.sub(r"([*|\\]|_(?!\w))", r"\\\1", pieces[i])
    for i in range(1, len(pieces), 2):
        name = re.sub(r"\(.*\)$", "", pieces[i])
        role = "py:obj" if re.fullmatch(r"(?:workbench\.)?[A-Z]\w*(?:\.\w+)?", name) else "code"
        inner = pieces[i].replace("\\", "\\\\")
        pieces[i] = f"\\ :{role}:`{inner}`\\ " if inner.strip() else ""
    return "".join(pieces)


def members() -> str:
    """Returns the entries of all members of families, by family."""
    parts = []
    for name in FAMILIES:
        base = _family(name)
        parts.append(f"## Members of {name.removesuffix('Base')}")
        for m in sorted(shipped(base), key=lambda m: m.__name__):
            if m.__name__ in OWN_PAGES:
                continue
            said = prose(first_sentence(inspect.cleandoc(m.__doc__ or "")))
            parts += [f"### {m.__name__}", said, directive("class", m.__name__)]
    return "\n\n".join(parts)


def _family(name: str) -> type[Any]:
    from workbench.policies import PolicyBase
    from workbench.tasks import TaskBase

    return {"PolicyBase": PolicyBase, "TaskBase": TaskBase}.get(name) or getattr(workbench, name)


def errors() -> str:
    """Returns the entry of each public error: when it is raised, what to do, and which methods state it."""
    parts = []
    for module, names in ERRORS.items():
        for name in names:
            text = paragraphs(inspect.getdoc(getattr(importlib.import_module(module), name)) or "")
            remedy = next(p for p in text if p.startswith(REMEDY)).removeprefix(REMEDY)
            stated = stating(name)
            parts += [f"## {name}", prose(text[0]), f"**{REMEDY}** {prose(remedy)}"]
            parts += ["Stated by: " + ", ".join(f"`{one}`" for one in stated) + "."] if stated else []
            block = [f".. autoexception:: {module}.{name}"]
            parts += ["\n".join(["```{eval-rst}", *block, "```"])]
    return "\n\n".join(parts)


def stating(error: str) -> list[str]:
    """Returns the public methods and functions whose docstrings state this error."""
    found = []
    for name in sorted(name for names in PAGES.values() for name in names):
        owner = getattr(workbench, name)
        for method in public(name):
            doc = inherited_doc(owner, method) if inspect.isclass(owner) else method.doc
            if states(doc, error):
                found.append(f"{name}.{method.name}" if inspect.isclass(owner) else name)
    return found


def states(doc: str, error: str) -> bool:
    """Whether a sentence of this docstring says that the error is raised."""
    return any(re.search(rf"\b{error}\b", said) for said in RAISES.findall(" ".join(doc.split())))


def part(name: str) -> str:
    """Returns the generated text of a page."""
    others = {"members": members, "errors": errors, "results": lambda: "\n\n".join(map(entry, HOMES))}
    return others[name]() if name in others else "\n\n".join(map(entry, PAGES[name]))
