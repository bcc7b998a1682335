"""What those who are left tell each other when a generation ends, and what follows from it; both hosts bring it about.

The furthest of those who are there decides what counts. How they hear of each other is their host's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from workbench.experiment import Experiment
from workbench.host.core.answers import Done
from workbench.host.elastic.reentry import Came
from workbench.host.elastic.salvage import alike, newest


class Resized(Exception):
    """The ranks have come together, and a generation of other ranks is to begin.

    members: theirs, by place; experiment: of so many; number: the request's; preempted: those who go because of that
    used:    how many examples of the data's order are used up
    """

    def __init__(self, members: tuple[int, ...], experiment: Experiment, number: str, used: int,
                 preempted: tuple[int, ...] = ()) -> None:  # fmt: skip
        super().__init__(f"members {members}")
        self.members, self.experiment, self.number = members, experiment, number
        self.used, self.preempted = used, preempted


class Said(NamedTuple):
    """What a rank has when its generation ends.

    step:     the one that it is to make next
    changes:  how many it has made or refused
    trained:  is its model the run's, or did it only serve?
    asked:    requests that it has heard and not done; done: the last that it did
    paused, credit: does it make no steps; but for so many
    settings: the experiment, plain
    process:  its host, pid and the time when that began
    parts:    does it hold a part only, or did it when it lost its way?
    bounds:   boundaries that it can go back to, the newest last: the step that comes next, how many changes were made
              before, and `Boundary.apart`
    remembers: does its optimizer remember anything?
    saved:    the steps before which it sees checkpoints of this run
    whole:    does it hold all, for ranks that held parts were coming together?
    used:     at its last boundaries: the step that came next, and how many examples of the data's order were used up
    """

    member: int
    step: int
    changes: int
    trained: bool
    asked: list[dict[str, Any]]
    done: Done
    paused: bool
    credit: int
    settings: dict[str, Any]
    process: list[Any]
    parts: bool = False
    bounds: Sequence[Sequence[int]] = ()
    remembers: bool = False
    saved: Sequence[int] = ()
    whole: bool = False
    used: Sequence[Sequence[int]] = ()

    @property
    def alike(self) -> int | None:
        """The step before which all ranks last had the same parameters, as its newest boundary has it."""
        return alike(self.bounds[-1]) if self.bounds else None

    @property
    def far(self) -> tuple[int, int]:
        return self.step, self.changes


class Heard(NamedTuple):
    """What all who are left know of each other, by place of the generation that is over."""

    by_place: dict[int, Said]

    @property
    def first(self) -> Said:
        """Of the furthest the one whose word counts."""
        return max(self.by_place.values(), key=lambda said: (*said.far, -said.member))

    @property
    def left(self) -> list[int]:
        """The places of those who are left, the furthest first."""
        return sorted(self.by_place, key=lambda place: (self.by_place[place].far != self.first.far, place))

    @property
    def voted(self) -> list[list[int]]:
        """The vote, as the record has it: who is left, and the step that it was to make next."""
        return sorted([said.member, said.step] for said in self.by_place.values())

    @property
    def text(self) -> str:
        """The vote in words, the furthest first."""
        steps = sorted({step for _, step in self.voted}, reverse=True)
        who = [named([member for member, at in self.voted if at == step]) for step in steps]
        return ", ".join(f"{one} {'' if n else 'stood '}before step {step}"
                         for n, (one, step) in enumerate(zip(who, steps, strict=True)))  # fmt: skip

    def came(self, places: tuple[int, ...]) -> Came:
        """How those who had these `places`, in their order, come to the next generation."""
        said = [self.by_place[place] for place in places]
        furthest = tuple(i for i, one in enumerate(said) if one.far == self.first.far)
        trained = newest({i: one.alike for i, one in enumerate(said) if one.trained})
        behind = sum(one.trained for one in said) - len(trained)
        return Came(tuple(one.member for one in said), places, furthest, tuple(sorted(trained)), self.first.step,
                    behind=behind)  # fmt: skip

    def used(self, step: int) -> int:
        """How many examples of the data's order all steps before `step` have used up."""
        return max((n for said in self.by_place.values() for at, n in said.used if at <= step), default=0)

    def asked(self, first: Said | None = None) -> list[dict[str, Any]]:
        """Requests that somebody has heard and that the one whose word counts has not done, each once."""
        found: dict[str, dict[str, Any]] = {}
        for said in self.by_place.values():
            found |= {what.get("id", ""): what for what in said.asked}
        return [what for name, what in found.items() if name not in (first or self.first).done]


class Next(NamedTuple):
    """How the next generation begins, the same for all who are in it.

    experiment: of so many ranks; changes, done, paused, credit: as in Said, of the furthest
    asked:      requests that are still to be done; processes: by place
    mark:       what the record says of it
    used:       how many examples of the data's order are used up
    """

    came: Came
    experiment: Experiment
    changes: int
    done: Done
    paused: bool
    credit: int
    asked: list[dict[str, Any]]
    processes: list[list[Any]]
    mark: dict[str, Any]
    used: int


def named(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0, 1, 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def are(ranks: Sequence[int]) -> str:
    """`is` or `are`."""
    return "are" if len(ranks) > 1 else "is"


def lost(gone: Sequence[int]) -> str:
    """What has ended a generation, in words: ranks that are `gone`, or, where all are there, a wire between them."""
    return f"{named(gone)} {are(gone)} lost" if gone else "a connection between ranks was lost"
