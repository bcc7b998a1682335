"""A run's settings at each step, from plain JSON. Needs neither knobs nor torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.settings import each, fold, in_words

if TYPE_CHECKING:
    from workbench.record.run import Run

Plain = dict[str, Any]
ENDLESS = 2**31
EXACT = ("Dense", "ErrorFeedback")  # lossless


class Stretch(NamedTuple):
    """Steps `[first, stop)` between 2 changes, and their settings."""

    first: int
    stop: int
    settings: Plain

    @property
    def compressor(self) -> str:
        """The lossy compressor in words: `TopK(density=0.01)`, or ""."""
        plain = self.settings.get("compressor")
        return _name_member(plain) if set(_list_members(plain)) - set(EXACT) else ""


def list_stretches(run: Run) -> list[Stretch]:
    """Returns the stretches in order. The last has no end yet."""
    found: list[Stretch] = []
    for step, settings in fold(run.settings, run.changes, with_value):
        first = max(step, found[-1].first if found else 0)
        if found:
            last = found.pop()
            found += [last._replace(stop=first)] if first > last.first else []
        found.append(Stretch(first, ENDLESS, settings))
    return found


def settings_words(settings: Plain, longest: int = 500) -> dict[str, str]:
    """Returns settings as texts of at most `longest` characters.

    >>> settings_words({"ranks": 2, "strategy": {"LocalSGD": {"every": 8}}})
    {'ranks': '2', 'strategy': 'LocalSGD(every=8)'}
    """
    return {name: in_words(value)[:longest] for name, value in settings.items()}


def with_value(settings: Plain, path: str, value: Any) -> Plain:
    """Sets the value at `path`; returns `settings` unchanged if nothing matches.

    path: as much of it as is unique

    >>> with_value({"compressor": {"TopK": {"density": 0.01}}}, "density", 0.1)
    {'compressor': {'TopK': {'density': 0.1}}}
    """
    if len(several := each(path, value)) > 1:  # outer settings first
        for one in sorted(several, key=lambda one: one.count(".")):
            settings = with_value(settings, one, several[one])
        return settings
    every = list(_list_paths(settings))
    short = path.split(".")
    hits = [p for p in every if p == short] or [p for p in every if _is_within(short, p)]
    return _put_value(settings, hits[0], value) if len(hits) == 1 else settings


def _list_paths(settings: Plain, before: tuple[str, ...] = ()) -> Iterator[list[str]]:
    for name, value in settings.items():
        yield [*before, name]
        if _is_member(value):
            yield from _list_paths(next(iter(value.values())), (*before, name))


def _is_within(short: list[str], path: list[str]) -> bool:
    rest = iter(path)
    return short[-1] == path[-1] and all(part in rest for part in short)


def _put_value(settings: Plain, path: list[str], value: Any) -> Plain:
    head, *rest = path
    present = settings[head]
    if rest:
        ((name, knobs),) = present.items()
        return {**settings, head: {name: _put_value(knobs, rest, value)}}
    named = isinstance(value, str) and _is_member(present)  # `value` names a member without knobs
    return {**settings, head: {value: {}} if named else value}


def _is_member(value: Any) -> bool:
    """Whether it is a member with knobs, such as {"TopK": {"density": 0.01}}."""
    return isinstance(value, dict) and len(value) == 1 and isinstance(next(iter(value.values())), dict)


def _list_members(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif _is_member(value):
        ((name, knobs),) = value.items()
        yield name
        for inner in knobs.values():
            if _is_member(inner):
                yield from _list_members(inner)


def _name_member(plain: Any) -> str:
    if _is_member(plain):
        ((name, knobs),) = plain.items()
        if name in EXACT and set(knobs) == {"of"}:
            return _name_member(knobs["of"])
        return in_words(plain) if knobs else name
    return str(plain)
