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
from workbench.engine.membership import PATIENCE, Heard, Late, Next, Said, Spare, are, lost, named
from workbench.engine.salvaging import (
    beside,
    boundary_of,
    former,
    lie_whole,
    memory_of,
    missed,
    nowhere,
    saved,
    say_unread,
    settled,
)
from workbench.engine.training import Training
from workbench.experiment import Experiment
from workbench.host.boundary import Boundary
from workbench.host.dealing import NO_INDEX, may_come_again
from workbench.host.reentry import Came, fitting
from workbench.host.salvage import in_parts
from workbench.rank import Memory, Rank
from workbench.settings import KnobError
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
    if reason := refused(session):
        _says_why_not(session, reason)
    return not reason


def _counted(session: Session) -> bool:
    """Have the others not gone on already?"""
    with contextlib.suppress(RuntimeError):  # whose host keeps the store may be gone
        return membership.counted(connect_store(*session.where, session.voting, timeout=1.0), session.rank.id)
    return True


def refused(session: Session) -> str:
    """Why the ranks that are left could not go on without one, in words; "" where they could."""
    training = session.training
    if training is None or not training.begun or training.rollback is None:
        return "not all ranks have begun to train"
    e = training.experiment
    if e.task.leads:
        return "the loop that makes its steps goes on only with the ranks that it began with"
    if in_parts(e) and training.rollback.copies == 1 and not (training.rollback.coming or saved(session)):
        return nowhere(e)
    if training.rollback.open or not (training.rollback.wanted or training.rollback.free):
        name = type(e.strategy).__name__
        return (f"with on_death='end' and on_hang='wait' no rank keeps a way back to the last boundary under {name} "
                f"with {type(e.compressor).__name__}; stop the run, and begin with on_death='go on'")  # fmt: skip
    return ""


def _says_why_not(session: Session, why: object) -> None:
    lost = "a rank, or a wire to it, is lost"
    session.mark("members", {"text": f"{lost}, and the run cannot go on without it: {why}"})


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
    parts, bounds = False, list[Boundary]()
    if (rollback := training.rollback) is not None:
        session.rank.step += rollback.back()
        training.outer = rollback.outer
        parts, bounds = rollback.void or in_parts(training.experiment), rollback.bounds()
    training.bounds = bounds
    training.optimizer.zero_grad(set_to_none=True)  # of a step that does not count
    wires, session.wires = session.wires, []
    threading.Thread(target=_close, args=(wires,), name=f"rank {session.member} giving wires back", daemon=True).start()
    e, rank = training.experiment, session.rank
    return Said(session.member, rank.step, training.obeyed, e.strategy.trains(rank.id, rank.size),
                training.unheeded, list(training.done), training.paused, training.credit,
                e.plain(), membership.here(), parts, [b.bound for b in bounds],
                bool(rollback and rollback.remembers), saved(session) if parts else (),
                bool(rollback and rollback.void and rollback.together is not None),
                training.batches.used_before(rank.step))  # fmt: skip


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


def fewer(session: Session, heard: Heard) -> Next:
    """How those go on who are left. Raises KnobError where so few cannot train as they did; the record says so, too."""
    try:
        parts = any(said.parts for said in heard.by_place.values())
        return (settled if parts else _whole)(session, heard)
    except KnobError as error:
        if heard.first.member == session.member:
            _says_why_not(session, error)
        raise


def _whole(session: Session, heard: Heard) -> Next:
    """The same where each of them has all of the model."""
    before, first = session.set_up_already, heard.first
    same = first.settings == heard.by_place[session.rank.id].settings  # to read it may need files of every family
    known = before.experiment
    e, places = fitting(known if same else Experiment.read(first.settings, known.task), heard.left)
    came = heard.came(places)
    spare = [heard.by_place[other].member for other in heard.left if other not in places]
    gone, left_out = missed(session, (*came.members, *spare))
    processes = [heard.by_place[other].process for other in places]
    text = f"{lost(gone)}; {named(came.members)} went on from step {came.step}{beside(left_out)}"
    if spare:
        text += f", and {named(spare)} {are(spare)} not needed, for so many cannot train alike"
    mark = {"members": came.members, "gone": [*gone, *left_out, *spare], "spare": spare, "step": came.step,
            "text": text, "settings": e.plain()}  # fmt: skip
    say_unread(session, gone, first)
    return Next(came, e, first.changes, first.done, first.paused, first.credit, heard.asked(), processes, mark,
                heard.used(came.step))  # fmt: skip


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
        rank.memory = old.memory
        before.plan_again(to.changes)
        if came.salvaged is None:
            _adopt(before, to.experiment, rank)
        else:
            before.bounds = [b for b in (boundary_of(before, came.salvaged, place),) if b is not None]
            memory = memory_of(before, came.salvaged, place)
            rank.memory = Memory(rank.memory.seed)
            rank.memory.buffers.update(memory)
            lie_whole(before, to.experiment, came.step)
    session.rank, session.members, session.leaving = rank, came.members, Leaving()
    session.outlives_next, session.words = False, None
    session.generation = session.voting = f"{session.base}+{session.turn}"
    session.began_with, session.forming = to.experiment, True
    back = former(came.salvaged.saved) if came.salvaged and came.salvaged.saved else None
    session.used = back.used if back else to.used
    session.training = training = Training(session, before)
    training.obeyed, training.begun = to.changes, True
    training.paused, training.credit = to.paused, to.credit
    training.done.extend(to.done)
    if before is not None:
        training.bounds, before.bounds = before.bounds, []
        training.former = back
        training.outer, before.outer = before.outer, None
        training.lengths, training.evaluated = before.lengths, before.evaluated
    if place == 0:
        session.mark("members", to.mark)
        if not training.learner.indexed:
            session.mark("data", may_come_again(NO_INDEX))
        for what in to.asked:
            session.inbox.put(what)
        _answer(session)
    session.undone = None
    training.begin_again()
    session.forming = False
    return came


def _answer(session: Session) -> None:
    """Who asked for other ranks, one of whom was lost before they had met, is told so."""
    if session.undone is not None and "id" in session.undone.mark and not session.undone.mark["preempted"]:
        ranks = len(session.undone.came.members)
        reason = f"ranks={ranks}: a rank was lost before they had met; ask again"
        session.mark("refused", {"path": "ranks", "value": ranks, "id": session.undone.mark["id"], "reason": reason})


def _adopt(training: Training, e: Experiment, rank: Rank) -> None:
    """A change that the furthest has made is made here, too, as far as it is about what a rank keeps."""
    was = training.experiment
    training.rate.change(was, e, rank.step)
    if e.bucket_mb != was.bucket_mb:
        training.layout.rebucket(e.bucket_mb)
    if e.optimizer != was.optimizer:
        training.optimizer = training.make_optimizer(e)
    training.experiment = e

