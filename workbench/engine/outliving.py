"""How a rank outlives another: it leaves its generation, hears who is left, and begins the next with them.

The session's thread does all of it, between two lives of its `Training`.
"""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING

from workbench.engine import membership
from workbench.engine.collectives import Aborted, Leaving, Wire, connect_store, of_own, peer_left
from workbench.engine.membership import PATIENCE, Late, Spare
from workbench.engine.salvaging import former, saved, survivor
from workbench.engine.training import Training
from workbench.host import leaving
from workbench.host.answers import KNOWN, Answer
from workbench.host.dealing import NO_INDEX, may_come_again
from workbench.host.reentry import Came
from workbench.host.settling import fewer, say_why_not
from workbench.host.voting import Heard, Next, Said
from workbench.rank import Rank
from workbench.settings.said import text_of

if TYPE_CHECKING:
    from workbench.engine.session import Session

TIMES = 5.0  # a rank's longest step that others wait for its word


def outlives(session: Session, error: BaseException) -> bool:
    """Is `error` what a rank meets whose peer is gone, and is this run to go on then?

    Raises Late where it has gone on without this rank.
    """
    training = session.training
    if training is None or not training.begun or session.ends:
        return False
    met = peer_left(error, text_of(error)) and not of_own(error)
    if met and session.undone is not None and not _lost(session):
        return True  # only one is lost who was to come, and all stand at a boundary
    if session.rank.size == 1:
        return False
    if met and not _counted(session):
        raise Late(f"the others went on without rank {session.member}, which they had left behind")
    met = met or (session.forming and isinstance(error, RuntimeError) and _lost(session))
    if not met or (training.experiment.on_death == "end" and not session.outlives_next):
        return False
    if reason := refused(session, alive=True):
        say_why_not(session.mark, reason)
    return not reason


def _counted(session: Session) -> bool:
    """Have the others not gone on already?"""
    with contextlib.suppress(RuntimeError):  # whose host keeps the store may be gone
        return membership.counted(connect_store(*session.where, session.voting, timeout=1.0), session.rank.id)
    return True


def refused(session: Session, alive: bool = False) -> str:
    """Why the ranks that are left could not go on without one, in words; "" where they could. alive: as there."""
    if session.training is None or not session.training.begun:
        return "not all ranks have begun to train"
    return leaving.refused(session.training, saved(session), alive)


def _lost(session: Session) -> bool:
    """Is a rank of this generation seen to be gone? While wires are opened the error may say anything."""
    try:
        for store in {session.generation, session.voting}:
            membership.require(connect_store(*session.where, store), range(session.rank.size))
    except ConnectionError:
        return True
    return False


def leave_generation(session: Session, training: Training) -> Said:
    """Gives back what was the generation's; what this rank has then."""
    training.leaving.set()
    session.cut()
    training.close()
    if training.shared.held:
        training.layout.lie_in([w.clone() for w in training.layout.weights])
        training.shared.held = False
    parts = leaving.went_back(training)
    wires, session.wires = session.wires, []
    threading.Thread(target=_close, args=(wires,), name=f"rank {session.member} giving wires back", daemon=True).start()
    asked = training.unheeded, dict(training.done), training.paused, training.credit
    return leaving.said(training, session.member, parts, saved(session) if parts else (), asked, membership.here())


def _close(wires: list[Wire]) -> None:
    for wire in wires:
        wire.close()


def _look(session: Session) -> None:
    if session.ends:
        raise Aborted("told to leave while the ranks that are left were looking for each other")


def hear(session: Session, mine: Said) -> Heard:
    """What all who are left have. Raises Aborted when this rank must leave, Late where the others went on."""
    store, training, rank = connect_store(*session.where, session.voting), session.set_up_already, session.rank
    patience = max(PATIENCE, TIMES * max(training.evaluated, *training.lengths))
    return membership.vote(store, rank.id, rank.size, mine, patience, partial(_look, session))


def settled(session: Session) -> Next:
    """How those go on who are left, once all of them have said what they have."""
    assert session.words is not None
    return fewer(survivor(session), hear(session, session.words))


def _meet(session: Session, to: Next) -> int:
    """Waits until all of the next generation have come to it; this rank's place there.

    Who is not among them waits, too, for it may have what others lose with one who is; then raises Spare.
    Raises ConnectionError where one is lost before, and the next vote is another one of those who voted.
    """
    members, where = to.came.members, session.where
    session.turn += 1
    store = connect_store(*where, f"{session.base}+{session.turn}")
    place = members.index(session.member) if session.member in members else None
    try:
        membership.gather(store, "meet", place, to.processes, partial(_look, session))
    except BaseException as error:
        if place is not None:
            membership.gone(store, place)
        if session.training is None and isinstance(error, ConnectionError):
            raise Spare("a rank was lost before this one had come in; the others go on without both") from None
        before, session.voting = session.voting, f"{session.generation} after {session.turn}"
        if isinstance(error, ConnectionError):
            again = connect_store(*where, session.voting)
            membership.hand_down(again, connect_store(*where, before), session.rank.size)
            session.undone = session.undone if session.undone and "id" in session.undone.mark else to
        raise
    if place is None:
        raise Spare(f"the others went on from step {to.came.step} as {len(members)} ranks, without this one")
    return place


def begin_generation(session: Session, to: Next) -> Came:
    """Those of the next generation meet, and it begins. Raises as `_meet` does, and has changed nothing then."""
    came, before, old = to.came, session.training, session.rank
    place = _meet(session, to)
    rank = Rank(place, len(came.members), to.experiment.seed)
    rank.step, rank.lr = came.step, old.lr
    if before is not None:
        leaving.hand_down(before, rank, to)
    session.rank, session.members, session.leaving = rank, came.members, Leaving()
    session.outlives_next, session.words = False, None
    session.generation = session.voting = f"{session.base}+{session.turn}"
    session.began_with, session.forming = to.experiment, True
    back = former(came.salvaged.saved) if came.salvaged and came.salvaged.saved else None
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
    if place == 0:
        session.mark("members", {**to.mark, "turn": session.turn})
        _answer(session)
        if not training.learner.indexed:
            session.mark("data", may_come_again(NO_INDEX))
        for what in to.asked:
            session.inbox.put(what)
    session.undone = None
    training.begin_again()
    session.forming = False
    return came


def _answer(session: Session) -> None:
    """Who asked for other ranks, one of whom was lost before they had met, is told so."""
    if session.undone is not None and "id" in session.undone.mark and not session.undone.mark["preempted"]:
        ranks = len(session.undone.came.members)
        reason = f"ranks={ranks}: a rank was lost before they had met; ask again"
        refusal = {"path": "ranks", "value": ranks, "id": session.undone.mark["id"], "reason": reason}
        session.mark("refused", refusal)
        session.inbox.put({"kind": KNOWN, "id": refusal["id"], "answer": Answer("refused", session.rank.step,
                           session.set_up_already.now, refusal)})  # fmt: skip
