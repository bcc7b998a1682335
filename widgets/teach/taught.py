"""A lesson about one member of a family: description, algorithm, source and timeline.

    lesson(LocalSGD)       # or lesson("LocalSGD")

The text is the docstring and the source is the running code. The runs are simulated on demand.
"""

from __future__ import annotations

import re
import textwrap
from html import escape
from typing import Any

import ipywidgets

from widgets.charts.board import Board
from widgets.views import all_views
from workbench.analysis import break_down, last_steps
from workbench.entrypoints.member_comparison import MemberComparison, compare_member, find_member
from workbench.settings import KnobError, knobs, to_plain
from workbench.settings.parsed_docstring import ParsedDocstring, is_code, parse_docstring, source
from workbench.settings.plain import in_words

LAST_STEPS = 8  # steps in the mean step time
STYLE = """<style>
.twb-taught { --jp-widgets-font-size: 14px; max-width: 1400px; }
.twb-taught .widget-html-content { line-height: 1.5; white-space: normal; overflow: visible; }
.twb-taught h2 { margin: 0 0 4px; } .twb-taught h3 { margin: 14px 0 4px; }
.twb-taught p { margin: 4px 0; max-width: 90ch; }
.twb-taught pre { margin: 0; padding: 8px 10px; overflow: auto; max-height: 460px; font-size: 14px; line-height: 1.4;
  white-space: pre !important;
  background: var(--jp-layout-color1); border: 1px solid var(--jp-border-color2); }
.twb-taught .twb-columns { display: grid; gap: 12px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
.twb-taught .twb-columns > div { min-width: 0; }
.twb-taught code { font-size: 14px; }
.twb-taught table { border-collapse: collapse; } .twb-taught th, .twb-taught td { text-align: left; vertical-align: top;
  padding: 2px 14px 2px 0; border-bottom: 1px solid var(--jp-border-color2); }
</style>"""


def lesson(member: type[Any] | str) -> ipywidgets.VBox:
    """Shows a strategy, compressor, partition, schedule, optimizer, fault, policy or algorithm.

    Simulates 4 ranks with it and 4 with its usual alternative. Raises KnobError for an unknown member.
    """
    kind = find_member(member)
    said = parse_docstring(kind)
    parts = [ipywidgets.HTML(STYLE + _make_head(kind, said))]
    try:
        parts += _show_runs(compare_member(kind))
    except KnobError as refusal:
        parts.append(ipywidgets.HTML(f"<h3>On a timeline</h3><p>{escape(str(refusal))}</p>"))
    parts.append(ipywidgets.HTML(_knob_table(kind) + _remaining_parts(said)))
    shown = ipywidgets.VBox(parts)
    shown.add_class("twb-taught")
    return shown


def _make_head(kind: type[Any], said: ParsedDocstring) -> str:
    formula = textwrap.dedent(said.formula).strip("\n")
    columns = [("The algorithm", formula)] if formula else []
    columns += [("The source", code)] if (code := source(kind)) else []
    told_apart = "".join(f"<div><h3>{head}</h3><pre>{escape(text)}</pre></div>" for head, text in columns)
    when = f"<p><b>When to use it:</b> {_format_prose(said.when)}</p>" if said.when else ""
    return (f"<h2>{escape(kind.__name__)}</h2><p>{_format_prose(said.what)}</p>{when}"
            f'<div class="twb-columns">{told_apart}</div>')  # fmt: skip


def _show_runs(pair: MemberComparison) -> list[ipywidgets.Widget]:
    views = tuple(v for v in all_views().values() if v.name == pair.view)
    parts: list[ipywidgets.Widget] = [ipywidgets.HTML("<h3>On four simulated ranks</h3>")]
    for run in (pair.usual, pair.shown):
        words = f"{pair.path} = {_format_setting(run, pair.path)}"
        parts.append(ipywidgets.HTML(f"<p><b>{escape(words)}</b>{_describe_outcome(run, pair.view)}</p>"))
        parts.append(Board(run, views=views))
    return parts


def _describe_outcome(run: Any, view: str) -> str:
    """Describes a run's result as its view shows it. "" if ranks made no common step."""
    if view == "loss":
        rows = run.timeline.samples.rows()
        held_out = rows[rows.equal("name", "held_out")]
        return f": a held-out loss of {held_out.value[-1]:.4g} after {int(held_out.step[-1])} steps."
    found = break_down(run.timeline, *last_steps(run.timeline, LAST_STEPS))
    step, exposed = (float(seconds.mean()) * 1e3 for seconds in (found.seconds, found.exposed))
    return f": {step:.0f} ms per step, {exposed:.0f} ms of it waiting for communication." if step else ""


def _format_setting(run: Any, path: str) -> str:
    value: Any = run.experiment
    for name in path.split("."):
        value = getattr(value, name)
    return in_words(to_plain(value)) if value != () else "none"


def _knob_table(kind: type[Any]) -> str:
    rows = "".join(f"<tr><td><code>{k.name}</code></td><td>{escape(in_words(to_plain(k.default)))}</td>"
                   f"<td>{escape(k.unit)}</td><td>{_format_prose(k.doc)}</td></tr>" for k in knobs(kind))  # fmt: skip
    head = "<tr><th>knob</th><th>default</th><th>unit</th><th>what it is</th></tr>"
    return f"<h3>Knobs</h3><table>{head}{rows}</table>" if rows else "<h3>Knobs</h3><p>It has none.</p>"


def _remaining_parts(said: ParsedDocstring) -> str:
    rest = (
        f"<pre>{escape(textwrap.dedent(p))}</pre>" if is_code(p) else f"<p>{_format_prose(p)}</p>" for p in said.rest
    )
    more = "".join(rest)
    folded = f"<details><summary>More about it</summary>{more}</details>" if more else ""
    return folded + (f"<h3>Reference</h3><p>{_format_prose(said.paper)}</p>" if said.paper else "")


def _format_prose(text: str) -> str:
    text = escape(" ".join(text.split()))
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"https?://[^\s,;)&<]*[^\s,;).&<]", r'<a href="\g<0>" target="_blank" rel="noopener">\g<0></a>', text)
