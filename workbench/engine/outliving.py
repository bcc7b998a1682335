"""How a rank outlives another: it leaves its generation, hears who is left, and begins the next with them.

The session's thread does all of it, between two lives of its `Training`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from workbench.engine import membership
from workbench.engine.collectives import Aborted, Leaving, Wire, connect_store, peer_left, text_of
from workbench.engine.membership import PATIENCE, Heard, Said
from workbench.engine.training import Training
from workbench.experiment import Experiment
from workbench.host.reentry import Came, fewer, unfit
from workbench.rank import Rank

if TYPE_CHECKING:
    from workbench.engine.session import Session

TIMES = 5.0  # a rank's longest step that others wait for its word


def outlives(session: Session, error: BaseException) -> bool:
    """Is `error` what a rank meets whose peer is gone, and does this run go on then? If not, a Mark says why."""
    training = session.training
    if training is None or not training.begun or session.ends or session.rank.size == 1:
        return False
    if training.experiment.on_death != "go on" or not peer_left(error, text_of(error)):
        return False
    if reason := unfit(training.experiment):
        session.mark("members", {"text": f"a rank is lost, and the run cannot go on without it: {reason}"})
    return not reason


def leave_generation(session: Session, training: Training) -> Said:
    """Gives back what was the generation's; what this rank has then."""
    training.leaving.set()
    session.cut()
    training.close()
    if training.shared.held:
        training.layout.lie_in([w.clone() for w in training.layout.weights])
        training.shared.held = False
    session.rank.step += training.rollback.back()
    wires, session.wires = session.wires, []
    threading.Thread(target=_close, args=(wires,), name=f"rank {session.member} giving wires back", daemon=True).start()
    e, rank = training.experiment, session.rank
    return Said(session.member, rank.step, training.obeyed, e.strategy.trains(rank.id, rank.size),
                [*training.asked, *(training.pocket or [])], list(training.done), training.paused, training.credit,
                e.plain())  # fmt: skip


def _close(wires: list[Wire]) -> None:
    for wire in wires:
        wire.close()


def hear(session: Session, training: Training, mine: Said) -> Heard:
    """What all who are left have. Raises Aborted when this rank must leave, Late where the others went on."""

    def look() -> None:
        if session.ends:
            raise Aborted("told to leave while the ranks that are left were looking for each other")

    store = connect_store(*session.where, session.generation)
    patience = max(PATIENCE, TIMES * max(training.evaluated, *training.lengths))
    return membership.vote(store, session.rank.id, session.rank.size, mine, patience, look)


def begin_generation(session: Session, before: Training, heard: Heard, mine: Said) -> tuple[Training, Came]:
    """Those who are left meet again. Raises KnobError where so few cannot train as they did."""
    came, first, old = heard.came(), heard.first, session.rank
    e = fewer(Experiment.read(first.settings), came.places)
    place = came.members.index(session.member)
    rank = Rank(place, len(came.members), e.seed)
    rank.step, rank.lr, rank.memory = came.step, old.lr, old.memory
    _adopt(before, e, rank)
    skip = first.changes - mine.changes
    before.planned = [*before.taken, *before.planned][skip:]
    gone = [member for member in session.members if member not in came.members]
    session.rank, session.members, session.leaving = rank, came.members, Leaving()
    session.generation = f"{session.generation}+{'.'.join(map(str, came.members))}"
    training = Training(session, before)
    session.training = training
    training.obeyed, training.evaluated = first.changes, before.evaluated
    training.paused, training.credit, training.begun = first.paused, first.credit, True
    training.lengths = before.lengths
    training.done.extend(first.done)
    training.begin_again()
    if place == 0:
        for what in heard.asked():
            session.inbox.put(what)
        session.mark("members", _told(came, gone))
    return training, came


def _adopt(training: Training, e: Experiment, rank: Rank) -> None:
    """A change that the furthest has made is made here, too, as far as it is about what a rank keeps."""
    was = training.experiment
    training.rate.change(was, e, rank.step)
    if e.bucket_mb != was.bucket_mb:
        training.layout.rebucket(e.bucket_mb)
    if e.optimizer != was.optimizer:
        training.optimizer = training.make_optimizer(e)
    training.experiment = e


def _told(came: Came, gone: list[int]) -> dict[str, object]:
    def named(ranks: list[int] | tuple[int, ...]) -> str:
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

    text = f"{named(gone)} {'is' if len(gone) == 1 else 'are'} lost; {named(came.members)} went on from step {came.step}"
    return {"members": came.members, "gone": gone, "step": came.step, "text": text}
