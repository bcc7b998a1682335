"""Who is there now: how those whom a rank has left come to know of each other, and of what each has done.

[Note: A vote] Whoever meets a peer's end says in the store what it has: its step, how many changes it has made, what
it was asked and has not done. It hears of the others until each has said so, has left or is dead. Then it writes down
who is there, but the first who does so is right (compare and set), and all go by what that one wrote. So nobody needs
a leader, and one who comes late finds that the others went on. The furthest of those who are there decides what counts.
What was settled holds once all who are to go on have met for it. If one of them is lost before, all who voted, also who
is not needed, vote again with what they had: nothing of it has been changed until then.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from workbench.experiment import Experiment
from workbench.host.reentry import Came
from workbench.record.process import alive, this_process

LOOK = 0.01  # seconds between two looks into the store
PATIENCE = 10.0  # seconds in which one who lives has to say something; or five of its steps


class Late(RuntimeError):
    """The others went on without this rank."""


class Spare(RuntimeError):
    """There are fewer ranks than before, and this one is not needed among them."""


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
    asked:    requests that it has heard and not done; done: the names of the last that it did
    paused, credit: does it make no steps; but for so many
    settings: the experiment, plain
    process:  its host, pid and the time when that began
    parts:    does it hold a part only, or did it when it lost its way?
    bounds:   boundaries that it can go back to: the step that comes next, and how many changes were made before
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
    done: list[str]
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
        trained = tuple(i for i, one in enumerate(said) if one.trained)
        return Came(tuple(one.member for one in said), places, furthest, trained, self.first.step)

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
    done: list[str]
    paused: bool
    credit: int
    asked: list[dict[str, Any]]
    processes: list[list[Any]]
    mark: dict[str, Any]
    used: int


def here() -> list[Any]:
    """This process, as others can see it: its host, its pid and when it began."""
    return [platform.node(), *this_process()]


def come(store: Any, place: int, process: list[Any] | None = None) -> None:
    """Says which process a rank is (none: this one), so that others can see whether it is there."""
    store.set(f"process {place}", json.dumps(process or here()))


def gather(
    store: Any, what: str, place: int | None, processes: list[list[Any]], look: Callable[[], None]
) -> None:
    """Waits until all have come to the same, `what`: to open wires, for one, which cannot be interrupted.

    place: None for one who only looks on; processes: theirs, by place
    Raises ConnectionError where one is gone before it has come, and what `look` raises.
    """
    for other, process in enumerate(processes):
        come(store, other, process)
    if place is not None:
        store.set(f"{what} {place}", "1")
    while missing := [other for other in range(len(processes)) if not store.check([f"{what} {other}"])]:
        look()
        lost = [other for other in missing if not _lives(store, other)]
        require(store, [other for other in lost if not store.check([f"{what} {other}"])])  # it may have come, then died
        time.sleep(LOOK)


def require(store: Any, places: Iterable[int]) -> None:
    """Raises ConnectionError where one who had these places is gone."""
    if lost := [other for other in places if not _lives(store, other)]:
        raise ConnectionError(f"Connection closed by peer: place {lost[0]} is gone before it had opened its end")


def gone(store: Any, place: int) -> None:
    """Says that this rank has left, for whoever waits for a word of it."""
    store.set(f"gone {place}", "1")


def hand_down(store: Any, before: Any, size: int) -> None:
    """Another vote of the same places begins, in `store`. Who was not counted in the one `before` is not waited for."""
    counted = json.loads(before.get("verdict")) if before.check(["verdict"]) else range(size)
    for place in range(size):
        if place not in counted or before.check([f"gone {place}"]):
            gone(store, place)
        elif before.check([f"process {place}"]):
            store.set(f"process {place}", before.get(f"process {place}"))


def vote(store: Any, place: int, size: int, mine: Said, patience: float, look: Callable[[], None]) -> Heard:
    """What those who are left of `size` places have. Raises Late where the others went on without this one.

    look: raises when this rank must leave. See [Note: A vote].
    """
    store.set(f"said {place}", json.dumps(mine._asdict()))
    until = time.monotonic() + patience
    while not store.check(["verdict"]):
        look()
        silent = [other for other in range(size) if not store.check([f"said {other}"])]
        if time.monotonic() > until or not any(_lives(store, other) for other in silent):
            present = [other for other in range(size) if store.check([f"said {other}"])]
            store.compare_set("verdict", "", json.dumps(present))
        else:
            time.sleep(LOOK)
    counted = json.loads(store.get("verdict"))
    if place not in counted:
        raise Late(f"the others went on without rank {mine.member}, which had said nothing for {patience:.0f} s")
    return Heard({other: Said(**json.loads(store.get(f"said {other}"))) for other in counted})


def counted(store: Any, place: int) -> bool:
    """Would a vote hear this place: none has been held, or it was counted?"""
    return not store.check(["verdict"]) or place in json.loads(store.get("verdict"))


def voting(store: Any, size: int) -> bool:
    """Has one of `size` places begun to vote on who is left?"""
    return any(store.check([f"said {place}"]) for place in range(size))


def _lives(store: Any, place: int) -> bool:
    """May a word of it still come? On another host nobody sees its process."""
    if store.check([f"gone {place}"]):
        return False
    if not store.check([f"process {place}"]):
        return True
    return runs(store.get(f"process {place}"))


def runs(process: str | bytes) -> bool:
    """May a process still run that said what it is, as JSON of `here`?"""
    host, *known = json.loads(process)
    return host != platform.node() or alive(known)


def named(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0, 1, 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def are(ranks: Sequence[int]) -> str:
    """`is` or `are`."""
    return "are" if len(ranks) > 1 else "is"


def lost(gone: Sequence[int]) -> str:
    """What has ended a generation, in words: ranks that are `gone`, or, where all are there, a wire between them."""
    return f"{named(gone)} {are(gone)} lost" if gone else "a connection between ranks was lost"
