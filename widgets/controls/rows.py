"""Generates an experiment's controls as plain rows: dicts for the page's JSON."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, cast

from widgets.controls.options import DropdownOption, describe_member, find_chosen, is_covered, list_options
from widgets.controls.stops import format_number, list_stops, nearest_stop
from workbench.settings import Knob, KnobError, knobs

FIRST = ("strategy", "partition", "compressor", "bucket_mb", "fabric.link.bandwidth", "fabric.link.latency", "pace")
PAIR = ("strategy", "partition")  # either may refuse a value of the other
LATER = "can be set only before Start; stop this run first"

Row = dict[str, Any]
Asks = Callable[[Any], str]  # returns why the task's model refuses an experiment, or ""


@dataclass(frozen=True, kw_only=True)
class ControlState:
    """What the controls show in addition to the experiment."""

    live: bool = False  # whether a run is under way
    ranks: int = 4096  # number of engines
    waiting: frozenset[str] = frozenset()  # paths of requested changes, not yet applied
    errors: tuple[tuple[str, str], ...] = ()  # (path, why the request was refused)
    drafts: tuple[tuple[str, Any], ...] = ()  # (path of a tuple knob, the next member)
    asks: Asks | None = None  # None: cannot be called now


def make_rows(experiment: Any, now: ControlState) -> list[Row]:
    """Returns every control of `experiment`: the most used first, then the groups."""
    every = _rows_under(experiment, experiment, "", 0, True, now)
    first = [r for head in FIRST for r in every if r["path"] == head or r["path"].startswith(head + ".")]
    for row in first:
        row["group"] = ""
    return first + sorted((r for r in every if r not in first), key=lambda r: GROUPS.index(r["group"]))


GROUPS = ["faults", "network", "memory", "learning", "before the run"]
MEMORY = ("memory_mb", "fabric.host", "fabric.disk")


def _find_group(path: str, live: bool) -> str:
    if path in MEMORY:
        return "memory"
    head, *rest = path.split(".")
    if rest:
        return "faults" if rest[0] == "faults" else _find_group(head, live) if head != "fabric" else "network"
    return "learning" if live else "before the run"


def _rows_under(whole: Any, thing: Any, prefix: str, level: int, settled: bool, now: ControlState) -> list[Row]:
    out = []
    for k in knobs(thing):
        path = prefix + k.name
        turnable = settled and k.live
        if k.element and k.family:
            out += _fault_rows(whole, path, k, now)
        elif k.family:
            out += _member_rows(whole, path, k, level, turnable, now)
        elif is_dataclass(k.default):
            out += _rows_under(whole, k.default, path + ".", level, turnable, now)
        else:
            k = replace(k, high=now.ranks) if path == "ranks" else k
            out.append(_knob_row(path, k, level, turnable, now))
    return out


def _member_rows(whole: Any, path: str, k: Knob, level: int, turnable: bool, now: ControlState) -> list[Row]:
    nested = level > 0
    found = list_options(cast(type, k.family), bare=nested, present=k.default)
    row = _knob_row(path, k, level, turnable, now)
    index = find_chosen(found, k.default)
    offered = [_option_row(whole, path, o, i == index, now) for i, o in enumerate(found)]
    row |= {"kind": "choice", "options": offered, "index": index, "value": type(k.default).__name__}
    inside = _rows_under(whole, k.default, path + ".", level + 1, turnable, now)
    if not nested and is_covered(found, k.default):
        inside = [r | {"level": level + 1} for r in inside if not (r["kind"] == "choice" and r["family"])]
    row |= {"family": True, "doc": f"{k.doc}. {found[index].doc}", "allowed": ""}
    return [row, *inside]


def _option_row(whole: Any, path: str, option: DropdownOption, present: bool, now: ControlState) -> Row:
    """Returns one line of a dropdown. If refused now, its doc says why."""
    why, text = "", option.text
    if not present and path:
        try:
            asked = at_once(whole, path, option.value)
            why = refused_anew(whole, asked, now.asks)
            text += "".join(f", with {type(value).__name__}" for name, value in asked.items() if name != path)
        except KnobError as error:
            why = str(error)
    offered = {"text": text, "value": option.value, "group": option.group}
    return offered | {"doc": why or option.doc, "refused": bool(why)}


def at_once(whole: Any, path: str, value: Any) -> dict[str, Any]:
    """Returns the settings that set a knob: it alone, or with the other `PAIR` knob's default.

    Raises KnobError if neither is possible.
    """
    try:
        whole.set(path, value)
    except KnobError as error:
        if path not in PAIR:
            raise
        other = next(k for k in knobs(type(whole)) if k.name in PAIR and k.name != path)
        both = {path: value, other.name: other.default}
        with suppress(KnobError):
            whole.set(both)
            return both
        raise error from None
    return {path: value}


def refused_anew(whole: Any, settings: dict[str, Any], asks: Asks | None) -> str:
    """Returns the model's reason to refuse the new values if it accepts the present ones, or "".

    Raises KnobError if the experiment itself refuses them.
    """
    wanted = whole.set(settings)
    if asks is None or wanted.task != whole.task or not (why := asks(wanted)):
        return ""
    return why if why != asks(whole) else ""


def _knob_row(path: str, k: Knob, level: int, turnable: bool, now: ControlState) -> Row:
    why = "" if turnable or not now.live else LATER
    row: Row = {
        "path": path,
        "label": _make_label(k),
        "unit": k.unit if k.unit != _make_label(k) else "",
        "doc": k.doc,
        "allowed": _describe_allowed(k),
        "level": level,
        "group": _find_group(path, k.live and turnable),
        "why": why,
        "disabled": bool(why),
        "family": False,
        "waiting": _is_waiting(path, now),
        "error": dict(now.errors).get(path, ""),
    }
    return row | _choose_form(k)


def _describe_allowed(k: Knob) -> str:
    if k.kind in (int, float) and k.low is not None and k.high is not None:
        return f"{format_number(k.low)} to {format_number(k.high)} {k.unit}".strip()
    return k.allowed


def _choose_form(k: Knob) -> Row:
    if k.kind is bool:
        return {"kind": "check", "value": k.default}
    if k.choices:
        offered = [{"text": str(c), "value": c, "doc": "", "refused": False} for c in k.choices]
        return {"kind": "choice", "options": offered, "index": k.choices.index(k.default)}
    if k.kind in (int, float):
        found = list_stops(k)
        at = {"stops": [format_number(v) for v in found], "at": nearest_stop(found, k.default)}
        return {"kind": "number", "value": format_number(k.default)} | at
    value = ", ".join(map(str, k.default)) if k.kind is tuple else str(k.default)
    return {"kind": "text", "value": value}


def _fault_rows(whole: Any, path: str, k: Knob, now: ControlState) -> list[Row]:
    def line(name: str, kind: str, doc: str, **more: Any) -> Row:
        return _button_row(f"{path}.{name}", kind, _find_group(path + ".", True), doc) | more

    doc = "Removes this fault."
    out = [line(str(i), "button", doc, text=describe_member(f), button="Clear") for i, f in enumerate(k.default)]
    found = list_options(cast(type, k.element), bare=True)
    draft = dict(now.drafts).get(path)
    index = find_chosen(found, draft) if draft is not None else -1
    offered = [{"text": o.text, "value": o.value, "doc": o.doc, "refused": False} for o in found]
    doc = found[index].doc if index >= 0 else k.doc
    out.append(line("new", "choice", doc, label="fault", options=offered, index=index))
    if draft is None:
        return out
    out += [_knob_row(f"{path}.new.{d.name}", _bound_rank(d, whole), 1, True, now) for d in knobs(draft)]
    asked = {"waiting": _is_waiting(path, now), "error": dict(now.errors).get(f"{path}.inject", "")}
    return [*out, line("inject", "button", "Injects this fault into the run.", text="", button="Inject", **asked)]


def _button_row(path: str, kind: str, group: str, doc: str) -> Row:
    empty = {"label": "", "unit": "", "allowed": "", "why": "", "error": "", "level": 0}
    no = {"disabled": False, "waiting": False, "family": False}
    return {"path": path, "kind": kind, "group": group, "doc": doc} | empty | no


def _bound_rank(k: Knob, whole: Any) -> Knob:
    return replace(k, high=whole.ranks - 1) if k.name == "rank" else k


def _is_waiting(path: str, now: ControlState) -> bool:
    return any(path == w or path.startswith(w + ".") for w in now.waiting)


def _make_label(k: Knob) -> str:
    """Removes the unit from a name: `bucket_mb` in MB is labelled "bucket"."""
    words = k.name.split("_")
    return " ".join(words[:-1] if len(words) > 1 and words[-1].lower() == k.unit.lower() else words)
