"""Results of requests. All ranks keep them, because the recording rank may be lost first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from workbench.settings import Json


class RequestAnswer(NamedTuple):
    """The result of a request: the Mark's name, step, time and detail."""

    name: str
    step: int
    t: float
    detail: Mapping[str, Json]


Done = dict[str, Sequence[Any] | None]  # the last completed requests by name, some with their RequestAnswers
KNOWN_KIND = "known"  # the kind of a request that carries another request's RequestAnswer
NAMES, ANSWERS = 256, 16  # how many names are kept, and how many of the newest have RequestAnswers


def remember_answer(done: Done, name: str, answer: RequestAnswer | None) -> None:
    """Notes a completed request, and forgets old ones."""
    done.pop(name, None)
    done[name] = answer
    names = list(done)
    if len(names) > ANSWERS:
        done[names[-ANSWERS - 1]] = None
    for old in names[:-NAMES]:
        del done[old]
