"""How a rank goes on after a peer is lost: it leaves its generation, votes, and begins the next.

The session's thread does all of this, between two loops of its `Training`.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from workbench.engine.control import membership
from workbench.engine.control.membership import PATIENCE, Late, Spare
from workbench.engine.rank.forming import Forming, give_back, look
from workbench.engine.rank.salvaging import former, saved, survivor
from workbench.engine.rank.training import Training
from workbench.engine.wire.collectives import Leaving, connect_store, of_own, peer_left
from workbench.host.elastic import leaving
from workbench.host.elastic.leaving import StateBefore
from workbench.host.elastic.reentry import Came
from workbench.host.elastic.settling import fewer, say_why_not
from workbench.host.elastic.voting import Heard, Next, Said
from workbench.rank import Rank
from workbench.settings.said import text_of

if TYPE_CHECKING:
    from workbench.engine.rank.session import Session

TIMES = 5.0  # the vote waits this many times a rank's longest step


def outlives(session: Session, error: BaseException, broke: bool = False) -> bool:
    """Whether `error` comes from a lost peer, and this rank goes on after it.

    broke: whether a generation did not form because of it
    Raises Late if the other ranks have gone on without this one.
    """
    training = session.training
    if training is None or not training.begun or session.ends:
        return False
    met = broke or (peer_left(error, text_of(error)) and not of_own(error))
    if met and session.undone is not None and not _lost(session):
        return True  # only a joining rank is lost, and all ranks stand at a boundary
    if session.rank.size == 1:
        return False
    if met and not _counted(session):
        raise Late(f"the others went on without rank {session.member}, which they had left behind")
    if not met or (training.experiment.on_death == "end" and not session.outlives_next):
        return False
    if reason := refused(session, alive=True):
        say_why_not(session.mark, reason)
    return not reason


def _counted(session: Session) -> bool:
    """Whether the other ranks still wait for this one."""
    with contextlib.suppress(RuntimeError):  # the store's host may be gone
        return membership.counted(connect_store(*session.where, session.voting, timeout=1.0), session.rank.id)
    return True


def refused(session: Session, alive: bool = False) -> str:
    """Returns why the remaining ranks could not go on without one; "" if they could. alive: see `leaving.refused`."""
    if session.training is None or not session.training.begun:
        return "not all ranks have begun to train"
    return leaving.refused(session.training, saved(session), alive)


def _lost(session: Session) -> bool:
    """Whether a rank of this generation is known to be gone."""
    try:
        for store in {session.generation, session.voting}:
            membership.require(connect_store(*session.where, store), range(session.rank.size))
    except ConnectionError:
        return True
    return False


def leave_generation(session: Session, training: Training) -> Said:
    """Gives back the generation's wires and shared memory. Returns this rank's report."""
    training.leaving.set()
    session.cut()
    training.close()
    if training.shared.held:
        training.layout.lie_in([w.clone() for w in training.layout.weights])
        training.shared.held = False
    parts = leaving.went_back(training)
    give_back(session)
    asked = training.unheeded, dict(training.done), training.paused, training.credit
    return leaving.said(training, session.member, parts, saved(session) if parts else (), asked, membership.here())


def hear(session: Session, mine: Said) -> Heard:
    """Votes, and returns the reports of all remaining ranks.

    Raises Aborted if this rank must leave, Late if the other ranks went on.
    """
    store, training, rank = connect_store(*session.where, session.voting), session.set_up_already, session.rank
    patience = max(PATIENCE, TIMES * max(training.evaluated, *training.lengths))
    return membership.vote(store, rank.id, rank.size, mine, patience, partial(look, session))


def settled(session: Session) -> Next:
    """Returns how the remaining ranks go on, once all of them have reported."""
    assert session.words is not None
    return fewer(survivor(session), hear(session, session.words))


def begin_generation(session: Session, to: Next) -> Came:
    """Gathers the ranks of the next generation and opens their wires; `confirm` ends what begins here.

    A rank that is not among them waits until the generation has formed, because it may hold a part that another rank
    loses. Then it raises Spare. After any other error, `undo` takes back what was begun.
    """
    session.turn += 1
    session.forming = forming = Forming(session, to)
    forming.gather(session, "meet")
    if forming.place is None:
        forming.gather(session, "formed")
        session.forming = None
        count = len(to.came.members)
        raise Spare(f"the others went on from step {to.came.step} as {count} ranks, without this one")
    before = session.training
    rank = Rank(forming.place, len(to.came.members), to.experiment.seed)
    rank.step, rank.lr, rank.members = to.came.step, session.rank.lr, to.came.members
    if before is not None:
        forming.state = StateBefore(before, to)
        leaving.hand_down(before, rank, to)
    session.rank, session.members, session.leaving = rank, to.came.members, Leaving()
    session.generation = session.voting = forming.name
    session.began_with = to.experiment
    back = former(to.came.salvaged.saved) if to.came.salvaged and to.came.salvaged.saved else None
    session.used = back.used if back else to.used
    session.training = training = Training(session, before)
    training.obeyed, training.begun = to.changes, True
    training.paused, training.credit = to.paused, to.credit
    training.done.update(to.done)
    if before is not None:
        training.bounds, before.bounds = before.bounds, []
        training.former = back
        training.outer, before.outer = before.outer, None
        training.lengths, training.evaluated = before.lengths, before.evaluated
    training.begin_again()
    return to.came
