"""The reports of remaining ranks to each other at the end of a generation.

The furthest rank decides what counts. Each host exchanges the reports in its own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from workbench.experiment import Experiment
from workbench.host.core.request_answers import Done
from workbench.host.elastic.recovery_sources import find_agreed_step, find_newest
from workbench.host.elastic.reentry import Membership
from workbench.settings.rank_text import conjugate_be, format_ranks


class ResizeSignal(Exception):
    """Raised once the ranks have assembled, before a generation of other ranks begins.

    members: of that generation by place; number: the request's
    used:    examples used up; preempted: ranks that leave because of preemption
    """

    def __init__(self, members: tuple[int, ...], experiment: Experiment, number: str, used: int,
                 preempted: tuple[int, ...] = ()) -> None:  # fmt: skip
        super().__init__(f"members {members}")
        self.members, self.experiment, self.number = members, experiment, number
        self.used, self.preempted = used, preempted


class RankReport(NamedTuple):
    """One rank's report when its generation ends.

    step:     its next step
    changes:  how many changes it has made or refused
    trained:  whether its model is the run's; else it only served
    requests: requests received and not obeyed
    answers:  answers to its latest requests
    paused, credit: whether it makes no steps; how many it makes before it pauses again
    settings: the experiment as plain values
    process:  its host, its pid and when the process began
    holds_part: whether it holds only a part of the state (or did before it went back)
    boundaries: its boundaries, the newest last: (next step, changes before it, `Boundary.apart`)
    has_optimizer_state: whether its optimizer has any state
    checkpoint_steps: steps of the run's checkpoints that it sees
    holds_whole: whether it holds everything because ranks with parts were assembling
    examples_used: at its last boundaries: the next step and the examples used up
    """

    member: int
    step: int
    changes: int
    trained: bool
    requests: list[dict[str, Any]]
    answers: Done
    paused: bool
    credit: int
    settings: dict[str, Any]
    process: list[Any]
    holds_part: bool = False
    boundaries: Sequence[Sequence[int]] = ()
    has_optimizer_state: bool = False
    checkpoint_steps: Sequence[int] = ()
    holds_whole: bool = False
    examples_used: Sequence[Sequence[int]] = ()

    @property
    def agreed_step(self) -> int | None:
        """See `find_agreed_step`."""
        return find_agreed_step(self.boundaries[-1]) if self.boundaries else None

    @property
    def progress_key(self) -> tuple[int, int]:
        return self.step, self.changes


class Quorum(NamedTuple):
    """Reports by place in the ended generation."""

    by_place: dict[int, RankReport]

    @property
    def furthest_report(self) -> RankReport:
        """The report that counts."""
        return max(self.by_place.values(), key=lambda said: (*said.progress_key, -said.member))

    @property
    def remaining_places(self) -> list[int]:
        """The remaining ranks' places; the furthest ranks come first."""
        return sorted(
            self.by_place,
            key=lambda place: (self.by_place[place].progress_key != self.furthest_report.progress_key, place),
        )

    @property
    def vote_rows(self) -> list[list[int]]:
        """Rows of [member, its next step]."""
        return sorted([said.member, said.step] for said in self.by_place.values())

    @property
    def vote_text(self) -> str:
        """The ranks by their next step. The furthest come first."""
        steps = sorted({step for _, step in self.vote_rows}, reverse=True)
        who = [format_ranks([member for member, at in self.vote_rows if at == step]) for step in steps]
        return ", ".join(f"{one} before step {step}" for one, step in zip(who, steps, strict=True))

    def make_membership(self, places: tuple[int, ...]) -> Membership:
        said = [self.by_place[place] for place in places]
        furthest = tuple(i for i, one in enumerate(said) if one.progress_key == self.furthest_report.progress_key)
        trained = find_newest({i: one.agreed_step for i, one in enumerate(said) if one.trained})
        behind = sum(one.trained for one in said) - len(trained)
        return Membership(
            tuple(one.member for one in said),
            places,
            furthest,
            tuple(sorted(trained)),
            self.furthest_report.step,
            behind=behind,
        )

    def count_examples_used(self, step: int) -> int:
        return max((n for said in self.by_place.values() for at, n in said.examples_used if at <= step), default=0)

    def list_requests(self, first: RankReport | None = None) -> list[dict[str, Any]]:
        """Lists requests that the deciding rank has not obeyed."""
        found: dict[str, dict[str, Any]] = {}
        for said in self.by_place.values():
            found |= {what.get("id", ""): what for what in said.requests}
        return [what for name, what in found.items() if name not in (first or self.furthest_report).answers]


class NextGeneration(NamedTuple):
    """How the next generation begins, the same on all its ranks.

    experiment: for these ranks; changes, answers, paused, credit: as in RankReport, of the furthest rank
    requests:   not obeyed yet; processes: by place
    mark:       its Mark in the record
    examples_used: before its first step
    """

    membership: Membership
    experiment: Experiment
    changes: int
    answers: Done
    paused: bool
    credit: int
    requests: list[dict[str, Any]]
    processes: list[list[Any]]
    mark: dict[str, Any]
    examples_used: int


def describe_loss(gone: Sequence[int]) -> str:
    """Describes a loss of ranks, or of a connection if none is `gone`."""
    return f"{format_ranks(gone)} {conjugate_be(gone)} lost" if gone else "a connection between ranks was lost"
