"""Results of requests. All ranks keep them, because the recording rank may be lost first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from workbench.settings import Json


class RequestAnswer(NamedTuple):
    """The Mark's name, step, time and detail."""

    name: str
    step: int
    t: float
    detail: Mapping[str, Json]


Done = dict[str, Sequence[Any] | None]  # latest requests by name
KNOWN_KIND = "known"  # carries another request's RequestAnswer
MAX_NAMES, MAX_ANSWERS = 256, 16


def remember_answer(done: Done, name: str, answer: RequestAnswer | None) -> None:
    """Remembers an answer, and forgets old requests."""
    done.pop(name, None)
    done[name] = answer
    names = list(done)
    if len(names) > MAX_ANSWERS:
        done[names[-MAX_ANSWERS - 1]] = None
    for old in names[:-MAX_NAMES]:
        del done[old]
