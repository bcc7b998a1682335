"""Converts settings to plain JSON and back."""

from __future__ import annotations

import difflib
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

from workbench.settings.discovery import KnobError, short
from workbench.settings.knobs import Knob, field_types, knobs
from workbench.settings.named import find

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"


def to_plain(value: Any) -> Any:
    """Returns a settings value as JSON: `{"LocalSGD": {"every": 8}}`; lists for tuples."""
    if is_dataclass(value) and not isinstance(value, type):
        return {type(value).__name__: {f.name: to_plain(getattr(value, f.name)) for f in fields(value) if f.init}}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    if callable(value):
        return f"<{getattr(value, '__qualname__', value)}>"
    return json.loads(json.dumps(value))


def from_plain(plain: Any, base: type, path: str = "") -> Any:
    """Reads what `to_plain` wrote. A bare name means that member of the family as its `usual()`."""
    if isinstance(plain, (list, tuple)):
        return tuple(from_plain(p, base, path) for p in plain)
    if not is_dataclass(base):
        return plain
    if isinstance(plain, str) and is_dataclass(base):
        member: Any = find(base, plain)
        return member.usual()
    if not isinstance(plain, dict):
        return plain
    if len(plain) != 1:
        raise KnobError(f"{path}={short(plain)}: must be one name with its settings, such as {{'TopK': {{...}}}}")
    ((name, settings),) = plain.items()
    member = find(base, name)
    types = field_types(member)
    own = [f.name for f in fields(member) if f.init]
    if not isinstance(settings, dict):
        told = f"must be one name with its settings, such as {{{name!r}: {{}}}}"
        raise KnobError(f"{path or name}={short(plain)}: {told}")
    if (unknown := set(settings) - set(own)) and unknown <= set(getattr(member, "old", ())):
        name, settings = member.formerly(settings)
        member = find(base, name)
        types, own = field_types(member), [f.name for f in fields(member) if f.init]
    if others := sorted(map(str, set(settings) - set(own))):
        near = difflib.get_close_matches(others[0], own, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(own) or 'none'}"
        raise KnobError(f"{path or name}: {name} has no knob {short(others[0])}; {hint}")
    return member(**{k: _field_from_plain(v, types[k], f"{path}.{k}") for k, v in settings.items()})


def normalise(thing: Any, path: str | None = None) -> None:
    """Checks the knobs of a new settings object and converts each to its type. Raises KnobError.

    A member of a family may be its name or the JSON of `to_plain`.
    """
    before = f"{type(thing).__name__}." if path is None else path
    for k in knobs(thing):
        object.__setattr__(thing, k.name, k.check(read_value(k, k.default, before + k.name), before + k.name))


def read_value(k: Knob, value: Any, path: str) -> Any:
    """Converts names and plain JSON into members for knob `k`; other values stay."""
    if k.element is not None and isinstance(value, (list, tuple)):
        return from_plain(value, k.element, path)
    return from_plain(value, k.kind, path) if isinstance(value, (str, dict)) and is_dataclass(k.kind) else value


def _field_from_plain(plain: Any, hint: Any, path: str) -> Any:
    if typing.get_origin(hint) is tuple:
        return from_plain(plain, typing.get_args(hint)[0], path)
    return from_plain(plain, hint, path) if isinstance(hint, type) and is_dataclass(hint) else plain


def in_words(plain: Any) -> str:
    """Returns a plain value as a person writes it: `TopK(density=0.01)`."""
    if isinstance(plain, dict) and len(plain) == 1:
        ((name, rest),) = plain.items()
        inner = ", ".join(f"{k}={in_words(v)}" for k, v in rest.items())
        return f"{name}({inner})"
    return f"[{', '.join(map(in_words, plain))}]" if isinstance(plain, list) else str(plain)
