"""What became of requests, as all ranks know it: the one that says it in the record may be lost before it is heard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """What became of one: the mark's name, its step, its time and its detail."""

    name: str
    step: int
    t: float
    detail: dict[str, Any]


Done = dict[str, Sequence[Any] | None]  # the last requests that were done, by name; for some whose Answer is awaited
LAST = 256


def remember(done: Done, name: str, answer: Answer | None) -> None:
    """A request was done; one of long ago is forgotten."""
    done[name] = answer
    while len(done) > LAST:
        del done[next(iter(done))]
