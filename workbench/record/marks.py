"""Checks the details of marks, because a record may be hand-made."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.record.check_run_json import count, number, shallow

Rules = Mapping[str, Callable[[Any], bool]]
MAX_COUNT = 32767  # ranks, and pieces of a rank's state


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _place(value: Any) -> bool:
    """Checks a rank, or a number of ranks."""
    return count(value) and value <= MAX_COUNT


def _size(value: Any) -> bool:
    return count(value) and value < 2**53


def _some(value: Any) -> bool:
    return _place(value) and value >= 1


def _each(good: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) <= MAX_COUNT and all(map(good, value))


def _or_none(good: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or good(value)


ASKED: Rules = {"path": _text, "id": _text, "by": _text, "reason": _text, "requested_at": _or_none(number)}
MUST: dict[str, tuple[str, ...]] = {
    "change": ("path",), "refused": ("path", "reason"), "policy": ("text",), "state": ("state",), "end": ("state",),
    "error": ("rank", "step", "op", "type", "text"), "stood still": ("seconds",), "buckets": ("nbytes",),
    "roles": ("serve",), "mesh": ("dims", "ranks"), "pace": ("met",), "no effect": ("texts",),
}  # fmt: skip
FIELDS: dict[str, Rules] = {
    "change": {**ASKED, "nbytes": _size, "seconds": number},
    "refused": ASKED,
    "state": {"state": _text, "detail": _text},
    "end": {"state": _text, "rank": _place},
    "error": {"rank": _place, "step": count, "op": _text, "type": _text, "traceback": _text},
    "nan": {"loss": _text, "rank": _place},
    "start": {
        "parameters": _size,
        "nbytes": _size,
        "stands_for": _some,
        "clock_error": _or_none(number),
        "clock_offset": _or_none(number),
    },
    "stood still": {"seconds": number},
    "spool": {"error": _text, "lost": _size},
    "buckets": {"nbytes": _each(_size)},
    "partition": {"stages": _some, "slices": _some},
    "roles": {"serve": _each(_place)},
    "mesh": {
        "dims": lambda dims: isinstance(dims, dict) and all(map(_some, dims.values())),
        "ranks": _each(_place),
        "inside": _each(_text),
    },
    "pace": {"met": lambda v: isinstance(v, bool), "takes_ms": number, "asked_ms": number},
    "no effect": {"texts": _each(_text)},
    "profile": {"path": _text, "steps": count, "first": count},
}


def once(details: Sequence[dict[str, Any]]) -> list[bool]:
    """Returns which marks count. A repeated mark of a known request does not."""
    known = {d.get("id") for d in details if "again" not in d}
    count = []
    for d in details:
        count.append("again" not in d or d.get("id") not in known)
        known.add(d.get("id"))
    return count


def well_formed(name: str, detail: str) -> bool:
    """Whether `detail` is valid for a mark `name`. Unknown names may have any fields."""
    try:
        found = json.loads(detail)
    except (ValueError, RecursionError):
        return False
    if not isinstance(found, dict) or not shallow(found) or not _text(found.get("text", "")):
        return False
    whole = all(k in found for k in MUST.get(name, ()))
    return whole and all(k not in found or good(found[k]) for k, good in FIELDS.get(name, {}).items())
