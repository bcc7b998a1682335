"""The changes of a run as vertical marks in its charts."""

from __future__ import annotations

from typing import Any, NamedTuple

from workbench.settings import AND, each

EVENTS = ("asked", "hang", "preempted", "members", "rolled back")  # marked in addition to changes
SIGN = "!"  # in place of a number


class ChangeMark(NamedTuple):
    """An applied change or an event of ranks. step: the first affected step. t: when applied"""

    number: int | str
    label: str
    step: int
    t: float


def change_marks(run: Any) -> list[ChangeMark]:
    """Returns a run's changes in order, numbered from 1."""
    return [
        ChangeMark(n, label_change(detail), step, t)
        for n, (step, t, detail) in enumerate(run.details("change"), start=1)
    ]


def all_marks(run: Any) -> list[ChangeMark]:
    """Returns a run's changes and events in order."""
    events = [ChangeMark(SIGN, describe_event(name, detail), step, t) for name in EVENTS
              for step, t, detail in run.details(name) if describe_event(name, detail)]  # fmt: skip
    return sorted([*change_marks(run), *events], key=lambda mark: mark.t)


def describe_event(name: str, detail: dict[str, Any]) -> str:
    """Describes an event of ranks in a few characters; "" if charts do not show it.

    >>> describe_event("hang", {"ranks": [2], "text": "rank 2 is silent for 12 s"})
    'rank 2 hangs'
    >>> describe_event("members", {"members": [0, 1, 3], "gone": [2]})
    'without rank 2'
    >>> describe_event("preempted", {"ranks": [2], "text": "rank 2 is preempted: it leaves after this step"})
    'rank 2 is preempted'
    """
    match name:
        case "hang":
            ranks = detail["ranks"]
            return f"{_name_ranks(ranks)} hang{'' if len(ranks) > 1 else 's'}"
        case "preempted":
            return str(detail["text"]).partition(":")[0]
        case "asked":
            return str(detail["text"]).partition(",")[0]
        case "rolled back":
            return f"back to step {detail['to']}"
        case "members" if "members" in detail:
            parts = [f"{word} {_name_ranks(detail[key])}" for word, key in (("without", "gone"), ("with", "new"))
                     if detail.get(key)]  # fmt: skip
            return ", ".join(parts)
    return ""


def _name_ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def label_change(detail: dict[str, Any]) -> str:
    """Describes a change and its policy in a few characters.

    >>> label_change({"path": "strategy", "value": {"LocalSGD": {"every": 8}}})
    'LocalSGD(every=8)'
    >>> label_change({"path": "fabric.link.bandwidth", "value": 100})
    'bandwidth = 100'
    >>> label_change({"path": "partition", "value": {"Pipeline": {"stages": 2, "of": {"Tensor": {"ways": 2}}}}})
    'Pipeline of Tensor'
    >>> label_change({"path": "strategy.every", "value": 4, "by": "AdaComm"})
    'every = 4 by AdaComm'
    >>> both = {"strategy": {"DDP": {}}, "partition": {"Tensor": {"ways": 2}}}
    >>> label_change({"path": "strategy, partition", "value": both})
    'DDP(), Tensor'
    """
    if by := detail.get("by"):
        return f"{label_change({k: v for k, v in detail.items() if k != 'by'})} by {by}"
    value = detail.get("value")
    if len(settings := each(str(detail.get("path", "")), value)) > 1:
        return AND.join(label_change({"path": path, "value": one}) for path, one in settings.items())
    if detail.get("path") == "partition" and isinstance(value, dict):
        return " of ".join(_list_nested(value))
    if isinstance(value, dict):
        return format_value(value)
    path = str(detail.get("path", ""))
    last = path.rpartition(".")[2]
    if isinstance(value, list):
        return f"{last}: {', '.join(map(format_value, value)) or 'none'}"
    return str(value) if path in ("strategy", "compressor") else f"{last} = {format_value(value)}"


def _list_nested(value: dict[str, Any]) -> list[str]:
    ((name, knobs),) = value.items()
    inner = _list_nested(knobs["of"]) if isinstance(knobs.get("of"), dict) else []
    return [name, *(one for one in inner if one != "Whole")]


def format_value(value: Any) -> str:
    """Writes a settings value as a person types it."""
    if isinstance(value, dict) and len(value) == 1:
        ((name, knobs),) = value.items()
        if isinstance(knobs, dict):
            if set(knobs) == {"of"}:  # every biased compressor has a wrapper
                return format_value(knobs["of"])
            if "of" in knobs:
                return f"{format_value(knobs['of'])} + {name}"
            return f"{name}({', '.join(f'{k}={format_value(v)}' for k, v in knobs.items())})"
    return f"{value:g}" if isinstance(value, float) else str(value)
