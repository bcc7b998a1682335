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
KNOWN = "known"  # the kind of a request that says what became of another
NAMES, ANSWERS = 256, 16  # requests whose names are kept, and of the last of them what became of them


def remember(done: Done, name: str, answer: Answer | None) -> None:
    """A request was done; those of long ago are forgotten."""
    done.pop(name, None)
    done[name] = answer
    names = list(done)
    if len(names) > ANSWERS:
        done[names[-ANSWERS - 1]] = None
    for old in names[:-NAMES]:
        del done[old]
