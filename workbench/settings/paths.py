"""Finds knobs by path and returns settings with knobs changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass, replace
from typing import Any

from workbench.settings.discovery import KnobError, short
from workbench.settings.knobs import Knob, checked, walk
from workbench.settings.named import hint_for_knob
from workbench.settings.plain import from_plain, read_value, to_plain

AND = ", "  # between paths set at once


def each(path: Any, value: Any) -> dict[str, Any]:
    """Returns the values to set by path: one knob or several at once.

    For several, `path` is a dict of values by path. Or it names them all, and `value` maps each name to its value.
    Raises KnobError if `path` is not a path.

    >>> each("lr", 0.1), each("strategy, lr", {"strategy": "DDP", "lr": 0.1})
    ({'lr': 0.1}, {'strategy': 'DDP', 'lr': 0.1})
    """
    if isinstance(path, Mapping) and path and value is None and all(isinstance(name, str) for name in path):
        return dict(path)
    if not isinstance(path, str):
        raise KnobError(f"path={short(path)}: must be a knob's name as text, such as 'lr' or 'strategy.every', or a "
                        f"dict of values by such names")  # fmt: skip
    several = AND in path and isinstance(value, Mapping)
    return dict(value) if several and sorted(path.split(AND)) == sorted(map(str, value)) else {path: value}


def joined(settings: Mapping[str, Any]) -> tuple[str, Any]:
    """Returns `path` and `value` for `each`."""
    if len(settings) == 1:
        return next(iter(settings.items()))
    return AND.join(settings), dict(settings)


def resolve(thing: Any, path: str) -> tuple[str, Knob]:
    """Returns the full path and the knob that `path` means. A unique part of the dotted path is enough.

    `density` and `compressor.density` both find `compressor.of.density`. Raises KnobError.
    """
    every = dict(walk(thing))
    if not isinstance(path, str):
        raise KnobError(f"path={short(path)}: must be a knob's name as text, such as 'lr' or 'strategy.every'")
    if path in every:
        return path, every[path]
    hits = [full for full in every if _subsequence(path.split("."), full.split("."))]
    if len(hits) == 1:
        return hits[0], every[hits[0]]
    if hits:
        raise KnobError(f"{path}: is ambiguous between {', '.join(hits)}; give a longer path")
    raise KnobError(f"{path[:100]}: no such knob here; {hint_for_knob(path[:100], every)}")


def _subsequence(short: list[str], full: list[str]) -> bool:
    rest = iter(full)
    return short[-1] == full[-1] and all(part in rest for part in short)


def with_value(thing: Any, path: str, value: Any) -> Any:
    """Returns a checked copy of `thing` with the knob at `path` set to `value`."""
    if len(settings := each(path, value)) > 1:
        return with_values(thing, settings.items())
    try:
        full, k = resolve(thing, path)
    except KnobError:
        if isinstance(path, str) and (now := _formerly(thing, path, value)) is not None:
            return now
        raise
    value = k.check(read_value(k, value, full), full)
    if is_dataclass(value) and not isinstance(value, type):
        value = checked(value, full)
    return _put(thing, full.split("."), value)


def with_values(thing: Any, settings: Iterable[tuple[str, Any]]) -> Any:
    """Sets several knobs of `thing` at once in any order. Returns the result.

    Outer settings come first, so `density` may precede its compressor.
    """
    now, left = thing, list(settings)
    while len(left) > 1:
        found = {number: _depth(now, where) for number, (where, _) in enumerate(left)}
        known = {number: depth for number, depth in found.items() if depth}
        number = min(known, key=lambda n: (known[n], n)) if known else 0
        now = with_value(now, *left.pop(number))
    return with_value(now, *left[0]) if left else now


def _depth(now: Any, where: str) -> int:
    """Returns the depth of the knob at `where` from 1. 0 if it does not exist yet."""
    try:
        return resolve(now, where)[0].count(".") + 1
    except KnobError:
        return 0


def _formerly(thing: Any, path: str, value: Any) -> Any:
    """Returns `thing` with an earlier version's knob set to `value`; or None."""
    *holder, name = path.split(".")
    for full, k in walk(thing):
        held: Any = k.default
        if name not in getattr(held, "old", ()) or not _subsequence(holder or [full], full.split(".")):
            continue
        ((_, settings),) = to_plain(held).items()
        now, rest = held.formerly({**settings, name: value})
        return _put(thing, full.split("."), checked(from_plain({now: rest}, k.kind, full), full))
    return None


def _put(thing: Any, parts: list[str], value: Any) -> Any:
    if len(parts) > 1:
        value = _put(getattr(thing, parts[0]), parts[1:], value)
    return replace(thing, **{parts[0]: value})
