"""What a dropdown offers for a knob that takes a member of a family (a strategy, a compressor, a task).

A member is offered as its bare name means it: `TopK` comes wrapped in error feedback, so it is called
"TopK + ErrorFeedback", and the unwrapped one is offered too. Where a family has `kinds`, its members are listed by
them, after the few that call themselves a `starter`. Nothing here names any member.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from workbench.settings import describe, knobs, members

Shape = tuple[Any, ...]
START, OTHERS = "to start with", "others"


class Option(NamedTuple):
    """One line of a dropdown: what it says, the value it sends, its doc, the shape it stands for, and its group."""

    text: str
    value: Any
    doc: str
    shape: Shape
    group: str = ""


def shape(value: Any) -> Shape:
    """The names of a member and of the members it holds: ErrorFeedback(of=TopK()) -> ("ErrorFeedback", ("TopK",))."""
    inner = tuple(shape(k.default) for k in knobs(value) if k.family and not k.element)
    return (type(value).__name__, *inner)


def options(base: type, *, bare: bool = False, present: Any = None) -> list[Option]:
    """Every member of the family `base` that can be made without arguments, and the one that is there.

    bare:     leave out what wraps others
    present:  the present value; listed also where it took arguments to make it (a task of the user's own)
    """
    found = []
    member: Any
    for name, member in sorted(members(base).items(), key=lambda item: _place(base, group(base, item[1], usual=False))):
        if not _ready(member):
            continue
        doc, of = describe(member)["doc"], group(base, member)
        usual = member.usual()
        if bare or type(usual) is member:
            found.append(Option(name, {name: {}}, doc, shape(member()), of))
        else:
            more = f"{doc} Without {type(usual).__name__}."
            found.append(Option(f"{name} + {type(usual).__name__}", name, doc, shape(usual), of))
            found.append(Option(f"{name} alone", {name: {}}, more, shape(member()), group(base, member, usual=False)))
    found.sort(key=lambda option: _place(base, option.group))
    if present is not None and chosen(found, present) < 0:
        own = type(present)
        found.append(Option(own.__name__, own.__name__, describe(own)["doc"], shape(present)))
    return found


def group(base: type, member: type, *, usual: bool = True) -> str:
    """Where `member` is listed: among those to start with, under its kind, or under OTHERS; "" in a family without.

    usual: as its bare name means it; else it is no starter
    """
    kinds: tuple[str, ...] = getattr(base, "kinds", ())
    if not kinds:
        return ""
    if usual and getattr(member, "starter", False):
        return START
    wraps = any(k.family is base for k in knobs(member))
    return kinds[-1] if wraps else getattr(member, "kind", "") or OTHERS


def _place(base: type, group: str) -> int:
    order = [START, *getattr(base, "kinds", ()), OTHERS]
    return order.index(group) if group in order else len(order)


def _ready(member: type) -> bool:
    needed = inspect.signature(member).parameters.values()
    return all(p.default is not p.empty for p in needed)


def chosen(found: list[Option], value: Any) -> int:
    """Which option `value` is: the one of the same shape, else the one of the same type; -1 if none is."""
    shapes = [o.shape for o in found]
    here = shape(value)
    if here in shapes:
        return shapes.index(here)
    names = [s[0] for s in shapes]
    return names.index(here[0]) if here[0] in names else -1


def covered(found: list[Option], value: Any) -> bool:
    """Whether the chosen option's text names the inner member too, so that no second dropdown is needed."""
    index = chosen(found, value)
    return index >= 0 and isinstance(found[index].value, str) and found[index].shape == shape(value)


def sentence(value: Any) -> str:
    """A member in a few words: `Slow: rank 2, factor 3, phase backward`."""
    said = [(k.name, f"{k.default:g}" if isinstance(k.default, float) else k.default) for k in knobs(value)]
    parts = [f"{name} {text}" for name, text in said]
    return f"{type(value).__name__}: {', '.join(parts)}" if parts else type(value).__name__
