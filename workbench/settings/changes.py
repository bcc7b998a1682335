"""Change, which sets knobs. The settings in force after several changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, TypeVar

from workbench.settings.discovery import KnobError, short
from workbench.settings.paths import AND, each, joined, resolve, with_value
from workbench.settings.plain import in_words, to_plain

T = TypeVar("T")
NEXT = -1  # the next possible step
FIELDS = ("id", "path", "value", "requested_at", "by", "reason")  # of its JSON form


@dataclass(frozen=True)
class Change:
    """Sets one knob or several together, on every rank before step `at_step`. Checks them together.

    at_step:           the step before which it applies, from 0. -1: the next possible step
    path:              the knob's path. For several knobs a dict of values by path. `path` then becomes the paths joined
                       by ", " and `value` the dict
    value:             a setting, or its plain JSON
    id, requested_at:  identify the change in the answer. requested_at is in seconds since 1970
    by, reason:        the deciding policy and why; empty for a person

    >>> Change(8, "strategy.every", 4)
    Change(at_step=8, path='strategy.every', value=4)
    >>> Change(8, {"strategy": "DDP", "partition": "Pipeline"})
    Change(at_step=8, path='strategy, partition', value={'strategy': 'DDP', 'partition': 'Pipeline'})
    """

    at_step: int
    path: Any  # text, or a dict when the caller passes several
    value: Any = None
    id: str = field(default="", compare=False, repr=False)
    requested_at: float | None = field(default=None, compare=False, repr=False)
    by: str = field(default="", compare=False, repr=False)
    reason: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.path, Mapping):
            path, value = joined(each(self.path, self.value))
            object.__setattr__(self, "path", path)
            object.__setattr__(self, "value", value)

    @property
    def settings(self) -> dict[str, Any]:
        """Its values by path."""
        return each(self.path, self.value)

    def plain(self) -> dict[str, Any]:
        """Returns it as JSON without the step."""
        number = self.id or f"planned {self.at_step}"
        decided = {"by": self.by, "reason": self.reason} if self.by else {}
        found = {path: to_plain(value) for path, value in self.settings.items()}
        value = found if len(found) > 1 else to_plain(self.value)
        about = {"id": number, "path": self.path, "value": value, "requested_at": self.requested_at}
        return about | decided

    @classmethod
    def read(cls, plain: Mapping[str, Any], at_step: int = NEXT) -> Change:
        """Reads what `plain` wrote.

        plain:    the JSON form
        at_step:  the step, which the JSON form lacks
        """
        rest = {name: plain[name] for name in FIELDS if plain.get(name) is not None}
        return cls(at_step, **{"path": "", "value": None} | rest)

    @property
    def text(self) -> str:
        """The change as a person writes it: `compressor = TopK(density=0.01)`."""
        return AND.join(f"{path} = {in_words(to_plain(value))}" for path, value in self.settings.items())


def resolved(now: Any, change: Change, would: str = "") -> tuple[Change, Any]:
    """Returns `change` with full paths and plain values, and `now` with the change applied.

    would: the remedy in the error

    Raises KnobError if the change is invalid or if a knob cannot change while a run is live.
    """

    def found(thing: Any, path: str, value: Any) -> str:
        full, knob = resolve(thing, path)
        if not knob.live:
            raise KnobError(f"{full}={short(value)}: cannot change while a run is live{would}")
        return full

    if len(change.settings) == 1:
        found(now, change.path, change.value)
    after = now.set(change.path, change.value)
    every = {found(after, path, value): value for path, value in change.settings.items()}
    path, value = joined({full: to_plain(reduce(getattr, full.split("."), after)) for full in every})
    return replace(change, path=path, value=value), after


def fold(
    start: T, changes: Iterable[Change], made: Callable[[T, str, Any], T] = with_value, skips: bool = False
) -> list[tuple[int, T]]:  # fmt: skip
    """Returns a list of (step, settings in force from it): `start` at step 0 and one per change.

    made: applies one change to the settings in force
    skips: ignore an invalid change instead of raising KnobError
    """
    found: list[tuple[int, T]] = [(0, start)]
    for change in changes:
        try:
            found.append((change.at_step, made(found[-1][1], change.path, change.value)))
        except KnobError:
            if not skips:
                raise
    return found
