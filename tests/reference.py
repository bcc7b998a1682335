"""Generates the Markdown of docs/reference/ from docstrings and knobs.

The pages list families, settings, verbs and views. Every text is one that `help` shows. `tests/tables.py` puts it
between a page's markers.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from widgets.views import all_views
from workbench.compressors import Compressor
from workbench.experiment import Experiment, partition_rules
from workbench.experiment.recipes import recipes
from workbench.fabric import Algorithm, Fabric, Fault, Link
from workbench.optimizers import Optimizer
from workbench.partitions import Partition, Pipeline, Tensor, Whole
from workbench.partitions.schedules import Schedule
from workbench.policies import PolicyBase
from workbench.rank import Rank
from workbench.settings import Family, Knob, KnobError, describe, knobs, members, to_plain
from workbench.settings.parsed_docstring import PAPER, TERM, WHEN, is_code, paragraphs, parse_docstring, terms
from workbench.settings.plain import in_words
from workbench.strategies import Strategy, ZeRO1
from workbench.tasks import TaskBase

ROOT = Path(__file__).parent.parent
FAMILIES: dict[str, tuple[type[Family], tuple[str, ...]]] = {
    "strategies": (Strategy, ("exact", "lockstep", "periodic")),
    "compressors": (Compressor, ("linear", "unbiased", "contraction")),
    "optimizers": (Optimizer, ()),
    "partitions": (Partition, ()),
    "schedules": (Schedule, ()),
    "policies": (PolicyBase, ()),
    "faults": (Fault, ()),
    "algorithms": (Algorithm, ()),
    "tasks": (TaskBase, ()),
}
SECTIONS = ("faults", "algorithms")  # of one page, with other things


def part(name: str) -> str:
    """Returns the text between the markers of this name."""
    others = {"settings": settings, "fabric": fabric, "verbs": verbs, "views": views, "pairs": pairs,
              "combinations": combinations}  # fmt: skip
    return others[name]() if name in others else family(name)


def pairs() -> str:
    """Lists the strategies that work between replicas of several ranks each, and why the other strategies do not."""
    rows = []
    for m in shipped(Strategy):
        why = partition_rules.explain_unfit_strategy(m(), 4)
        rows.append([f"[{m.__name__}](strategies.md#{m.__name__.lower()})", "no: " + why if why else "yes"])
    return table(["strategy", "between replicas on several ranks each"], rows)


def combinations() -> str:
    """Lists what a partition or sharding refuses: schedules, compressors, optimizers and strategies."""
    asked: list[tuple[str, type[Any], Callable[[Any], dict[str, Any]]]] = [
        ("`Pipeline(of=Tensor())`, schedule", Schedule, lambda m: {"partition": Pipeline(schedule=m(), of=Tensor())}),
        ('`Pipeline(of=Whole(checkpoint="units"))`, schedule', Schedule,
         lambda m: {"partition": Pipeline(schedule=m(), of=Whole(checkpoint="units"))}),
        *((f"`Pipeline(stages=4, micros={n})`, schedule", Schedule,
           lambda m, n=n: {"partition": Pipeline(stages=4, micros=n, schedule=m())}) for n in (2, 6)),
        ("`Pipeline()`, activations", Compressor, lambda m: {"partition": Pipeline(activations=m.usual())}),
        ("`Tensor()`, activations", Compressor, lambda m: {"partition": Tensor(activations=m.usual())}),
        ("`ZeRO1()`, compressor", Compressor, lambda m: {"strategy": ZeRO1(), "compressor": m.usual()}),
        ("`ZeRO1()`, optimizer", Optimizer, lambda m: {"strategy": ZeRO1(), "optimizer": m.usual()}),
        ("`Tensor()`, optimizer", Optimizer, lambda m: {"partition": Tensor(), "optimizer": m.usual()}),
        ('`Whole(checkpoint="units")`, strategy', Strategy,
         lambda m: {"partition": Whole(checkpoint="units"), "strategy": m()}),
    ]  # fmt: skip
    found: dict[tuple[str, str], list[str]] = {}
    for text, base, settings_of in asked:
        for m in shipped(base):
            if why := _refused(settings_of(m)):
                found.setdefault((text, why), []).append(m.__name__)
    return table(["with", "refused", "why"], [[text, ", ".join(names), why] for (text, why), names in found.items()])


def _refused(asked: dict[str, Any]) -> str:
    """Returns why such an experiment is invalid, without advice and names. "" if it is invalid for another reason."""
    why = _why(asked)
    if why and "partition" in asked and _why({**asked, "partition": Whole()}):
        return ""
    return re.sub(r", and [A-Z]\w+\(.*\) (?=\w)", ", and it ", why.partition(": ")[2].partition(";")[0])


def _why(asked: dict[str, Any]) -> str:
    try:
        Experiment(**{"ranks": 8, "batch": 24, **asked}).checked()
    except KnobError as error:
        return str(error)
    return ""


def shipped(base: type[Any]) -> list[type[Any]]:
    """Returns the members of a family that the workbench ships, by name."""
    return [m for m in members(base).values() if m.__module__.startswith("workbench.")]


def family(name: str) -> str:
    """Describes a family: its claims, a list of its members, then each member, by kind if it has kinds."""
    base, claims = FAMILIES[name]
    docs = [inspect.cleandoc(kind.__doc__ or "") for kind in base.__mro__ if kind.__module__.startswith("workbench.")]
    meaning = {term: said for doc in reversed(docs) for term, said in terms(doc)}
    parts = ["\n".join(f"- **{claim}**: {prose(meaning[claim])}" for claim in claims)] if claims else []
    kinds = getattr(base, "kinds", ())
    of = {kind: [m for m in shipped(base) if (m.kind or kinds[-1]) == kind] for kind in kinds} or {"": shipped(base)}
    rows = [[kind, link(m), prose(describe(m)["doc"])] for kind, every in of.items() for m in every]
    head = ["kind", "name", "what it is"]
    parts.append(table(head, rows) if kinds else table(head[1:], [row[1:] for row in rows]))
    for kind, every in of.items():
        parts += [f"## Kind: {kind}"] if kind else []
        parts += [member(m, claims, "###" if kind or name in SECTIONS else "##") for m in every]
    return "\n\n".join(parts)


def link(m: type[Any]) -> str:
    """Links to a member. Members for beginners are bold."""
    name = f"[{m.__name__}](#{m.__name__.lower()})"
    return f"**{name}**" if getattr(m, "starter", False) else name


def member(m: type[Any], claims: tuple[str, ...], heading: str) -> str:
    """Describes one member: text, use, formula, knobs and paper. The rest is folded away."""
    said = parse_docstring(m)
    parts = [f"{heading} {m.__name__}", prose(said.what)]
    if (ROOT / "docs" / "project" / "strategies" / f"{m.__name__}.svg").exists():
        parts.append(f"![{m.__name__} and DDP on four simulated ranks](../project/strategies/{m.__name__}.svg)")
    parts.append(f"**{WHEN}** {linked(prose(said.when))}")
    parts += [text for text in (shown(said.formula) if said.formula else "", standing(m, claims)) if text]
    given = [p for p in said.rest if TERM.match(p)]  # not knobs, but functions of a Task, which the page lists, too
    rest = [p for p in said.rest if p not in given]
    parts += [knob_table(knobs(m))] if knobs(m) else list(map(shown, given)) or ["No knobs."]
    if said.paper:
        parts.append(f"**{PAPER}** {linked(prose(said.paper))}")
    if rest:
        parts.append("\n\n".join(["<details><summary>More</summary>", *map(shown, rest), "</details>"]))
    return "\n\n".join(parts)


def standing(m: type[Any], claims: tuple[str, ...]) -> str:
    """Lists a member's claims and exchanged kind, and the meaning of its bare name, if there is any."""
    held = [claim for claim in claims if getattr(m, claim)]
    said = [f"Claims: {', '.join(held) or 'none'}."] if claims else []
    if issubclass(m, Strategy):
        said.append(f"Exchanges {m.exchanges}.")
    if issubclass(m, Strategy | Compressor):
        said.append(f"Element types: {', '.join(m.dtypes)}.")
    if issubclass(m, Compressor) and type(usual := m.usual()) is not m:
        said.append(f"Its bare name means `{type(usual).__name__}(of={m.__name__}())`.")
    return " ".join(said)


def knob_table(every: tuple[Knob, ...], is_live_told: bool = False) -> str:
    """Returns a table with a line for each knob, or "" without knobs."""
    head = ["knob", "default", "range", "unit", *(["live"] if is_live_told else []), "what it is"]
    rows = []
    for k in every:
        live = ["yes" if k.live else "no"] if is_live_told else []
        rows.append([f"`{k.name}`", default(k), span(k), k.unit, *live, prose(k.doc)])
    return table(head, rows) if rows else ""


def default(k: Knob) -> str:
    """Formats a knob's default for readers."""
    if isinstance(k.default, bool):
        return "true" if k.default else "false"
    if isinstance(k.default, int | float):
        return number(k.default)
    if not k.default:
        return "empty"
    plain = to_plain(k.default)
    bare = isinstance(plain, dict) and k.default == type(k.default)()
    return f"`{next(iter(plain))}()`" if bare else f"`{in_words(plain)}`" if isinstance(plain, dict) else str(plain)


def span(k: Knob) -> str:
    """Formats the values that a knob takes."""
    if k.choices:
        return ", ".join(str(c) if isinstance(c, str) else number(c) for c in k.choices)
    if k.low is not None and k.high is not None:
        return f"{number(k.low)} to {number(k.high)}"
    if k.kind is bool:
        return "true, false"
    if k.family:
        word = k.family.__name__.removesuffix("Base").lower()
        return f"a list of {word}s" if k.kind is tuple else f"{'an' if word[0] in 'aeiou' else 'a'} {word}"
    return "text" if k.kind is str else f"a {k.kind.__name__}"


def number(value: float) -> str:
    """Formats a number with commas between thousands: 1,048,576; 0.0001."""
    return f"{int(value):,}" if value == int(value) else f"{value:.7g}"


def settings() -> str:
    """Lists the settings of an experiment, and the recipes."""
    listed = [f"- `{name}`: {prose(paragraphs(inspect.getdoc(f) or '')[0])}" for name, f in recipes().items()]
    return "\n\n".join([knob_table(knobs(Experiment), True), "## Recipes", "\n".join(listed)])


def fabric() -> str:
    """Lists the settings of the network."""
    told = [[f"## {w.__name__}", prose(paragraphs(w.__doc__ or "")[0]), knob_table(knobs(w))] for w in (Fabric, Link)]
    return "\n\n".join(text for part in told for text in part)


def verbs() -> str:
    """Lists the verbs that a strategy may call on its rank, in the groups of the source, then those of families."""
    seen = dict(terms(inspect.cleandoc(Rank.__doc__ or "")))
    listed = [f"- `{names.replace(', ', '`, `')}`: {prose(text)}" for names, text in seen.items()]
    parts, group = ["## What it can look at", "\n".join(listed)], ""
    for heading, verb in grouped(Rank):
        parts += [f"## {heading[:1].upper()}{heading[1:]}"] if heading != group else []
        group = heading
        asked = ", ".join(map(written, [*inspect.signature(verb).parameters.values()][1:]))
        call = f"```python\nrank.{verb.__name__}({asked})\n```"
        parts += [f"### {verb.__name__}", call, *map(shown, paragraphs(inspect.getdoc(verb) or ""))]
    for family in list_verb_families():
        package = f"workbench.strategies.{family}"
        about = inspect.getdoc(importlib.import_module(package)) or ""
        parts += [f"## Verbs of `{family}`", prose(about), f"```python\nfrom {package}.verbs import ...\n```"]
        for name, verb in list_family_verbs(family).items():
            asked = ", ".join(["rank", *map(written, [*inspect.signature(verb).parameters.values()][1:])])
            call = f"```python\n{name}({asked})\n```"
            parts += [f"### {name}", call, *map(shown, paragraphs(inspect.getdoc(verb) or ""))]
    return "\n\n".join(parts)


def list_verb_families() -> list[str]:
    """Returns the packages of strategies that need verbs of their own."""
    return sorted(path.parent.name for path in (ROOT / "workbench" / "strategies").glob("*/verbs.py"))


def list_family_verbs(family: str) -> dict[str, Callable[..., Any]]:
    """Returns the functions of a family's table, by verb."""
    module = importlib.import_module(f"workbench.strategies.{family}.verbs")
    return {verb: getattr(module, verb) for verb in module.VERBS}


def written(p: inspect.Parameter) -> str:
    """Formats a parameter as in the source."""
    return f"{p.name}: {p.annotation}" + ("" if p.default is p.empty else f" = {p.default!r}")


def grouped(owner: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields (group, method) for each public method, inherited ones included. A comment in the class begins a group."""
    group = "verbs"
    for part in owner.__mro__[:-1]:
        for line in inspect.getsource(part).splitlines():
            if found := re.match(r"    # (?:-- )?([^;]+)", line):
                group = found[1]
            elif (found := re.match(r"    (?:async )?def ([a-z]\w*)", line)) and inspect.isfunction(
                method := vars(part).get(found[1])
            ):
                yield group, method


def views() -> str:
    """Describes the views of the dashboard, from top to bottom."""
    parts = []
    for view in (v for v in all_views().values() if v.__module__.startswith("widgets.")):
        parts += [f"## {view.title}", prose(view.about)]
        notes = ["Not on the page while there is nothing to show."] if view.quiet else []
        notes += ["Silent in a riddle."] if view.tells else []
        parts += [" ".join([*notes, f"Code: `{view.__module__.replace('.', '/')}.py`."])]
    return "\n\n".join(parts)


# -- docstrings as Markdown


def shown(paragraph: str) -> str:
    """Formats a docstring's paragraph as Markdown: code, a list of terms, or prose."""
    if is_code(paragraph):
        return f"```text\n{textwrap.dedent(paragraph)}\n```"
    if TERM.match(paragraph):
        return "\n".join(f"- `{term}`: {prose(text)}" for term, text in terms(paragraph))
    return linked(prose(paragraph))


def prose(text: str) -> str:
    """Returns the text in one line, with Markdown's markup characters escaped; `code` stays code."""
    pieces = " ".join(text.split()).split("`")
    for i in range(0, len(pieces), 2):
        pieces[i] = re.sub(r"([*<\[\]|])|((?<!\w)_|_(?!\w))", r"\\\g<0>", pieces[i])
    return "`".join(pieces)


def linked(text: str) -> str:
    """Turns addresses and pages into links."""
    text = re.sub(r"\bdocs/([\w/]+\.md)", r"[\g<0>](../\1)", text)
    return re.sub(r"https?://[^\s,;)]*[^\s,;).]", r"<\g<0>>", text)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
