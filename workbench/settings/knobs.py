"""Knobs: the settings that a user may change, with their checks.

A frozen dataclass declares a knob with `knob(...)`. Controls, the command line and the engine read that description.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from workbench.settings.discovery import KnobError, members, short


@dataclass(frozen=True)
class Knob:
    """One setting with its type, range, unit and description.

    name:       the field's name
    kind:       bool, int, float, str, tuple or the base class of a family
    default:    the value without a user's choice
    low, high:  the allowed range of a number, both included. None: no limit
    unit:       such as "MB" or "steps". "": none
    doc:        the description in a line
    live:       whether it may change while training runs
    log:        whether its slider is logarithmic
    choices:    the allowed values. (): any in the range
    element:    the type of a tuple's elements
    """

    name: str
    kind: type  # bool, int, float, str, tuple or the base class of a family
    default: Any
    low: float | None = None
    high: float | None = None
    unit: str = ""
    doc: str = ""
    live: bool = True
    log: bool = False
    choices: tuple[Any, ...] = ()
    element: type | None = None  # of a tuple's elements

    @property
    def family(self) -> type | None:
        """The family that this knob takes members of, or None."""
        base = self.element or self.kind
        return base if getattr(base, "__family__", False) else None

    @property
    def allowed(self) -> str:
        """The allowed values for errors and hints."""
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        if self.kind in (int, float) and self.low is not None:
            what = "an integer" if self.kind is int else "a number"
            return f"{what} in [{self.low:g}, {self.high:g}]{' ' + self.unit if self.unit else ''}"
        if self.kind is tuple:
            if self.element is int:
                return "a list of integers, such as 2, 5"
            return f"a list of {self.element.__name__}s" if isinstance(self.element, type) else "a list"
        plain = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
        if self.kind in plain or not self.family:
            return plain.get(self.kind, f"a {self.kind.__name__}")
        return f"{a_member(self.kind)}, such as {next(iter(members(self.kind)), 'one')}()"

    def _allowed_instead(self, value: Any) -> str:
        """Returns `allowed` with the probable meaning of `value`: a class without (), or another family."""
        cls = value if isinstance(value, type) else type(value)
        if not (self.family and self.kind is self.family):
            return self.allowed
        every: dict[str, type] = members(self.kind)
        if same := every.get(cls.__name__):
            return f"{a_member(self.kind)}, such as {same.__name__}()"
        other = next((base for base in cls.__mro__ if "home" in vars(base)), None)
        return f"{self.allowed}; {cls.__name__} is {a_member(other)}" if other else self.allowed

    def check(self, value: Any, path: str = "") -> Any:
        """Returns `value` in this knob's type.

        value:  a user's value, also as text
        path:   the name for the error. "": the knob's own

        Raises KnobError with field, value and range if it is invalid.

        >>> Knob("every", int, 8, 1, 256, unit="steps").check(0)
        Traceback (most recent call last):
            ...
        workbench.KnobError: every=0: must be an integer in [1, 256] steps
        """
        try:
            good = self._coerce(value)
        except (TypeError, ValueError, OverflowError):
            raise self._refuse(value, path) from None
        if self.choices and good not in self.choices:
            raise self._refuse(value, path)
        if self.low is not None and not (self.low <= good <= typing.cast(float, self.high)):
            raise self._refuse(value, path)
        return good

    def _coerce(self, value: Any) -> Any:
        if self.kind is bool:
            words = {"true": True, "false": False, "1": True, "0": False, "on": True, "off": False}
            if isinstance(value, bool):
                return value
            return words[value.lower()] if isinstance(value, str) and value.lower() in words else _no()
        if self.kind is int:
            number = float(value) if not isinstance(value, bool) else _no()
            return int(number) if number == int(number) else _no()
        if self.kind is float:
            return float(value) if not isinstance(value, bool) and float(value) == float(value) else _no()
        if self.kind is str:
            return value if isinstance(value, str) else _no()
        if self.kind is tuple and self.element is int:
            return _integers(value)
        if self.kind is tuple:
            held = value if isinstance(value, list | tuple) else _no()
            fits = not isinstance(self.element, type) or all(isinstance(v, self.element) for v in held)
            return tuple(held) if fits else _no()
        return value if isinstance(value, self.kind) else _no()

    def _refuse(self, value: Any, path: str) -> KnobError:
        return KnobError(f"{path or self.name}={short(value)}: must be {self._allowed_instead(value)}")


def a_member(family: type) -> str:
    """Returns the words for a family's member: "a strategy"."""
    word = family.__name__.removesuffix("Base").lower()
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _integers(value: Any) -> tuple[int, ...]:
    """Returns the integers of a list or of a text such as `2, 5` or `[2, 5]`."""
    if isinstance(value, str):
        value = [n for n in value.strip().strip("[]()").split(",") if n.strip()]
    held = value if isinstance(value, list | tuple) else _no()
    return tuple(int(n) if not isinstance(n, bool) and int(n) == float(n) else _no() for n in held)


def _no() -> Any:
    raise ValueError


def knob(
    default: Any,
    low: float | None = None,
    high: float | None = None,
    *,
    doc: str,
    unit: str = "",
    live: bool = True,
    log: bool = False,
    choices: tuple[Any, ...] = (),
) -> Any:
    """Declares a dataclass field as a knob.

    default:    the value without a user's choice, or a function that makes it
    low, high:  the allowed range of a number, both included. None: no limit
    doc:        the description in a line
    unit:       such as "MB" or "steps"
    live:       whether it may change while training runs
    log:        whether its slider is logarithmic
    choices:    the allowed values. (): any in the range
    """
    rest = {"low": low, "high": high, "doc": doc, "unit": unit, "live": live, "log": log, "choices": choices}
    if callable(default) and not isinstance(default, type):
        return field(default_factory=default, metadata={"knob": rest})
    return field(default=default, metadata={"knob": rest})


def knobs(thing: Any) -> tuple[Knob, ...]:
    """Returns the knobs of a dataclass or an instance, in the order of the source.

    For an instance, `default` is the present value.
    """
    if isinstance(thing, type):
        return tuple(k if make is None else _with(k, make()) for k, make in _declared(thing))
    return tuple(_with(k, getattr(thing, k.name)) for k, _ in _declared(type(thing)))


def _declared(owner: type) -> list[tuple[Knob, Callable[[], Any] | None]]:
    """Returns a class's knobs, each with its default factory or None. Searches once per class."""
    found = _known.get(owner)
    if found is None:
        found, types = [], field_types(owner)
        for f in fields(owner):
            if "knob" in f.metadata:
                # no `is MISSING`: a pickled class holds a copy of dataclasses.MISSING
                make = f.default_factory if callable(f.default_factory) else None
                hint = types[f.name]
                element = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
                k = Knob(f.name, _plain_type(hint), f.default, element=element, **f.metadata["knob"])
                found.append((k, make))
        _known[owner] = found
    return found


_known: WeakKeyDictionary[type, list[tuple[Knob, Callable[[], Any] | None]]] = WeakKeyDictionary()


def _with(k: Knob, default: Any) -> Knob:
    """Does `replace(k, default=default)` 10 times as fast (for panels)."""
    if default is k.default:
        return k
    made = object.__new__(Knob)
    vars(made).update(vars(k), default=default)
    return made


def field_types(owner: type) -> dict[str, Any]:
    """Returns the types of a class's fields. Resolves them once per class because that is slow.

    The class stores them. So a notebook's class carries them to the engines. These cannot resolve names in annotations:
    only names that its functions use travel with the class.
    """
    if "_field_types" not in vars(owner):
        hints = typing.get_type_hints(owner)
        owner._field_types = {f.name: hints[f.name] for f in fields(owner)}  # type: ignore[attr-defined]
    return typing.cast("dict[str, Any]", vars(owner)["_field_types"])


def _plain_type(hint: Any) -> type:
    origin = typing.get_origin(hint)
    return origin if isinstance(origin, type) else hint


def checked(thing: Any, path: str = "") -> Any:
    """Returns `thing` with every knob checked. Includes nested settings. Raises KnobError."""
    found = {}
    for k in knobs(thing):
        where = f"{path}.{k.name}" if path else k.name
        value = k.check(k.default, where)
        found[k.name] = checked(value, where) if is_dataclass(value) and not isinstance(value, type) else value
    return replace(thing, **found) if found else thing


def walk(thing: Any, prefix: str = "") -> Iterator[tuple[str, Knob]]:
    """Yields (dotted path, knob) for all knobs of `thing` and of its settings."""
    for k in knobs(thing):
        path = prefix + k.name
        yield path, k
        if is_dataclass(k.default):
            yield from walk(k.default, path + ".")


def describe(member: type) -> dict[str, Any]:
    """Returns a member's name, first doc line and knobs."""
    doc = (member.__doc__ or "").strip().splitlines()
    return {"name": member.__name__, "doc": doc[0] if doc else "", "knobs": knobs(member)}
