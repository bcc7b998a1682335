"""Finds members by name and suggests the member or knob that the user probably meant.

Only refusals make hints. So these may import every file of a family.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from workbench.settings.discovery import KnobError, members, short
from workbench.settings.knobs import Knob, a_member, knobs

M = TypeVar("M")

MAX_LISTED_NAMES = 12
# the word for a member of a family -> the setting that holds one
HOLDERS = {word: word for word in ("task", "strategy", "partition", "compressor", "optimizer", "policy")}
HOLDERS |= {"algorithm": "fabric.algorithm", "schedule": "partition.schedule", "fault": "fabric.faults"}


def find(base: type[M], name: str) -> type[M]:
    """Returns the member called `name`. Raises KnobError with a suggestion for an unknown name."""
    every = members(base)
    word = word_of(base)
    if not isinstance(name, str):
        raise KnobError(f"{word}={short(name)}: must be a name; there are {', '.join(every)}")
    if name in every:
        return every[name]
    for cls in every.values():  # names in older records
        if name in getattr(cls, "formerly_called", ()):
            return cls
    raise KnobError(f"{word}={short(name)}: no such {word}; {hint_for_member(base, name[:100], every)}")


def word_of(family: type) -> str:
    """Returns the word for a member of `family`, which is also the setting's name: "strategy"."""
    return family.__name__.removesuffix("Base").lower()


def hint_for_member(base: type, name: str, every: Mapping[str, type]) -> str:
    """Returns a hint for `name`, which is no member of `base`. `every`: the members by name."""
    meant = [own for own in every if _plain(own) == _plain(name)] or _known_as(name, every)
    if not meant and (found := _family_of(name, base)):
        family, own = found
        word = word_of(family)
        said = f"{own} is {a_member(family)}"
        return f"{said}; set {HOLDERS[word]}={own}" if word in HOLDERS else said
    meant = meant or [own for own in every if min(len(name), len(own)) > 3 and _contains(own, name)]
    meant = meant or difflib.get_close_matches(name, every, n=1, cutoff=0.5)
    return f"did you mean {_either(meant)}?" if meant else f"there are {', '.join(every)}"


def hint_for_knob(path: str, every: Mapping[str, Knob]) -> str:
    """Returns a hint for `path`, which matches none of the knobs in `every` (by path)."""
    name = path.rsplit(".", 1)[-1]
    families = {full: k for full, k in every.items() if k.family and not k.element}
    if same := [full for full in every if full.rsplit(".", 1)[-1] == name]:
        return f"did you mean {_either(same)}?"
    for full, k in families.items():
        if own := next((own for own in _members(k.family) if _plain(own) == _plain(name)), ""):
            return f"{own} is {a_member(k.family or type)}; set {full}={own}"
    owners = {full: [own for own, names in _members(k.family).items() if name in names] for full, k in families.items()}
    found = {full: own for full, own in owners.items() if own}
    if found:
        ahead = {full: own for full, own in found.items() if path.startswith(f"{full}.")}
        return f"it is a knob of {_owned(ahead or found, families)}"
    if (holder := path.rpartition(".")[0]) in every:
        below = [full.removeprefix(f"{holder}.") for full in every if full.startswith(f"{holder}.")]
        near = difflib.get_close_matches(name, below, n=1, cutoff=0.65)
        return f"did you mean {holder}.{near[0]}?" if near else f"{holder} has {', '.join(below) or 'no knobs'}"
    words = [*every, *(full.rsplit(".", 1)[-1] for full in every)]
    if near := difflib.get_close_matches(path, words, n=3, cutoff=0.65):
        return f"did you mean {', '.join(dict.fromkeys(near))}?"
    known = {knob: own for k in families.values() for own, names in _members(k.family).items() for knob in names}
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.75):
        return f"did you mean {near[0]}, a knob of {known[near[0]]}?"
    return f"there are {', '.join([full for full in every if '.' not in full] or every)}"


def _owned(owners: Mapping[str, list[str]], families: Mapping[str, Knob]) -> str:
    """Names the members with the knob and the present members, and what to do."""
    have = " and of ".join(f"{full}={_either(own)}" for full, own in owners.items())
    now = ", ".join(f"{full} is {type(families[full].default).__name__}" for full in owners)
    return f"{have}; here {now}: set {_either(owners)} first, or both in one dict"


def _plain(name: str) -> str:
    """Drops case and punctuation: "ZeRO-3" and "zero3" are equal."""
    return re.sub(r"[\W_]", "", name).lower()


def _contains(own: str, name: str) -> bool:
    one, other = _plain(own), _plain(name)
    return bool(one and other) and (one in other or other in one)


def _known_as(name: str, every: Mapping[str, type]) -> list[str]:
    """Returns the members that the field also calls `name`."""
    return [own for own, cls in every.items() if _plain(name) in map(_plain, vars(cls).get("known_as", ()))]


def _family_of(name: str, base: type) -> tuple[type, str] | None:
    """Returns another family with a member `name` and the member's exact name; or None."""
    root = next((cls for cls in base.__mro__ if "__family__" in vars(cls)), None)
    families: list[Any] = root.__subclasses__() if root else []
    for family in families:
        if not getattr(family, "home", "") or issubclass(base, family):
            continue
        every = members(family)
        if own := [own for own in every if _plain(own) == _plain(name)] or _known_as(name, every):
            return family, own[0]
    return None


def _members(family: type | None) -> dict[str, set[str]]:
    """Returns the names of the knobs of each member of `family`."""
    every: dict[str, Any] = members(family) if family else {}
    return {name: {k.name for k in knobs(member)} for name, member in every.items()}


def _either(names: Iterable[str]) -> str:
    """Joins names: `A`, `A or B`, `A, B or C`. Lists at most `MAX_LISTED_NAMES`."""
    found = list(names)
    if len(found) > MAX_LISTED_NAMES:
        return f"{', '.join(found[:MAX_LISTED_NAMES])} or one of {len(found) - MAX_LISTED_NAMES} others"
    return " or ".join(filter(None, [", ".join(found[:-1]), found[-1]]))
