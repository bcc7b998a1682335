"""The options of a dropdown for a knob with a family, such as strategy or task.

An option means what its bare name means. `TopK` implies error feedback, so its text is "TopK + ErrorFeedback". `TopK`
alone is a second option. In a family with `kinds`, the kinds follow the starters.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from workbench.settings import describe, knobs, members

Shape = tuple[Any, ...]
START, OTHERS = "to start with", "others"


class DropdownOption(NamedTuple):
    """One line of a dropdown: text, value to send, doc, shape and group."""

    text: str
    value: Any
    doc: str
    shape: Shape
    group: str = ""


def nested_names(value: Any) -> Shape:
    """Returns nested names: `ErrorFeedback(of=TopK())` -> `("ErrorFeedback", ("TopK",))`."""
    inner = tuple(nested_names(k.default) for k in knobs(value) if k.family and not k.element)
    return (type(value).__name__, *inner)


def list_options(base: type, *, bare: bool = False, present: Any = None) -> list[DropdownOption]:
    """Returns an option for every member of `base` that needs no arguments.

    bare:     leaves out wrappers
    present:  the present value, listed even if it needs arguments
    """
    found = []
    member: Any
    for name, member in sorted(
        members(base).items(), key=lambda item: _order_of(base, find_group(base, item[1], usual=False))
    ):
        if not _needs_nothing(member):
            continue
        doc, of = describe(member)["doc"], find_group(base, member)
        usual = member.usual()
        if bare or type(usual) is member:
            found.append(DropdownOption(name, {name: {}}, doc, nested_names(member()), of))
        else:
            more = f"{doc} Without {type(usual).__name__}."
            found.append(DropdownOption(f"{name} + {type(usual).__name__}", name, doc, nested_names(usual), of))
            found.append(
                DropdownOption(
                    f"{name} alone", {name: {}}, more, nested_names(member()), find_group(base, member, usual=False)
                )
            )
    found.sort(key=lambda option: _order_of(base, option.group))
    if present is not None and find_chosen(found, present) < 0:
        own = type(present)
        found.append(DropdownOption(own.__name__, own.__name__, describe(own)["doc"], nested_names(present)))
    return found


def find_group(base: type, member: type, *, usual: bool = True) -> str:
    """Returns the group of `member`: START, its kind or OTHERS. "" in a family without kinds.

    usual: whether the bare name is meant; otherwise the member is no starter
    """
    kinds: tuple[str, ...] = getattr(base, "kinds", ())
    if not kinds:
        return ""
    if usual and getattr(member, "starter", False):
        return START
    wraps = any(k.family is base for k in knobs(member))
    return kinds[-1] if wraps else getattr(member, "kind", "") or OTHERS


def _order_of(base: type, group: str) -> int:
    order = [START, *getattr(base, "kinds", ()), OTHERS]
    return order.index(group) if group in order else len(order)


def _needs_nothing(member: type) -> bool:
    needed = inspect.signature(member).parameters.values()
    return all(p.default is not p.empty for p in needed)


def find_chosen(found: list[DropdownOption], value: Any) -> int:
    """Returns the index of the option of this shape or else of this type; else -1."""
    shapes = [o.shape for o in found]
    here = nested_names(value)
    if here in shapes:
        return shapes.index(here)
    names = [s[0] for s in shapes]
    return names.index(here[0]) if here[0] in names else -1


def is_covered(found: list[DropdownOption], value: Any) -> bool:
    """Whether the chosen option includes the inner member."""
    index = find_chosen(found, value)
    return index >= 0 and isinstance(found[index].value, str) and found[index].shape == nested_names(value)


def describe_member(value: Any) -> str:
    """Describes a member: `Slow: rank 2, factor 3, phase backward`."""
    said = [(k.name, f"{k.default:g}" if isinstance(k.default, float) else k.default) for k in knobs(value)]
    parts = [f"{name} {text}" for name, text in said]
    return f"{type(value).__name__}: {', '.join(parts)}" if parts else type(value).__name__
