"""The engine's part of a requested resize: present ranks prepare it and invite the new ranks.

All ranks obey the request at the same boundary. They assemble the state that is spread over ranks
(`host/elastic/resizing.py`). The first rank writes an invitation for each new rank into the store. Then the generation
ends for all ranks.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from workbench.engine.control import membership
from workbench.engine.wire.collectives import Aborted, connect_store
from workbench.experiment import Experiment
from workbench.host.core.answers import Answer
from workbench.host.core.dealing import used_up
from workbench.host.elastic.reentry import Came, fewer
from workbench.host.elastic.resizing import come_together
from workbench.host.elastic.voting import Next, Resized, are, named
from workbench.settings import Change, Json, KnobError

if TYPE_CHECKING:
    from workbench.engine.rank.session import Session
    from workbench.engine.rank.training import Training


async def resize(training: Training, members: tuple[int, ...], number: str) -> None:
    """Goes on with `members`, old and new. Raises Resized. If it is refused, a Mark gives the reason."""
    session = training.session
    stay = [m for m in session.members if m in members]
    new = [m for m in members if m not in stay]
    try:
        _require_there(session, new, len(members))
        wanted = _wanted(training, session.members, stay, members)
    except KnobError as error:
        refusal: dict[str, Json] = {"path": "ranks", "value": len(members), "id": number, "reason": str(error)}
        training.answer = Answer("refused", training.rank.step, training.now, refusal)
        if training.rank.id == 0:
            training.mark("refused", refusal)
        return
    places = tuple(session.members.index(m) for m in stay)
    await part(training, places, (*stay, *new), wanted, number)


async def part(training: Training, stay: tuple[int, ...], members: tuple[int, ...], wanted: Experiment, number: str,
               preempted: tuple[int, ...] = ()) -> None:  # fmt: skip
    """Assembles the state on the ranks that stay, and ends the generation. Raises Resized.

    Until all ranks have met for it, they can go back.

    stay: the places that go on; see Resized for the other arguments
    """
    with training.undoable(True):
        if training.rollback is not None:
            training.rollback.coming = True
        await come_together(training, stay)
        if training.rollback is not None:
            training.rollback.has_all(training.rank.id in stay)
        raise Resized(members, wanted, number, await used_up(training), preempted)


def _require_there(session: Session, new: list[int], ranks: int) -> None:
    """Raises KnobError if a new rank has not reported that it waits, or was invited before: then it is lost.

    All ranks find the same, because a new rank reports before the request is made.
    """
    store = connect_store(*session.where, session.base)
    if lost := [m for m in new if not store.check([f"member {m}"]) or store.check([f"join {m}"])]:
        raise KnobError(f"ranks={ranks}: {named(lost)} {are(lost)} not there any more; ask again")


def _wanted(training: Training, now: tuple[int, ...], stay: list[int], members: tuple[int, ...]) -> Experiment:
    if not stay:
        raise KnobError(f"ranks={len(members)}: at least one of those who train now must stay, to hand the model on")
    few = fewer(training.experiment, tuple(now.index(m) for m in stay), len(members))
    return training.able(few)


def arranged(session: Session, asked: Resized) -> Next:
    """Waits until all ranks have come together, invites the new ranks, and returns the plan.

    Raises ConnectionError if a rank does not come: it is lost, or has lost another rank and votes. Then all other ranks
    go back to the boundary. No rank has passed, because the missing rank never reports in the store.
    """
    training, members = session.set_up_already, asked.members
    stay = [m for m in members if m in session.members]
    places = tuple(session.members.index(m) for m in stay)
    came = Came(members, places, tuple(range(len(stay))), tuple(range(len(stay))), session.rank.step)
    store, base = connect_store(*session.where, session.generation), connect_store(*session.where, session.base)
    if session.rank.size == 1:  # a single rank has met no rank in the store
        membership.come(store, 0)
    there = [json.loads(store.get(f"process {place}")) for place in range(session.rank.size)]
    look = partial(_look, session, store)
    membership.gather(store, "together", session.rank.id, there, look, session.members)
    processes = [there[place] for place in places]
    processes += [json.loads(base.get(f"member {m}")) for m in members[len(stay) :]]
    rest = training.unheeded[1:]
    mark = _told(came, [m for m in session.members if m not in members], members[len(stay) :], asked)
    mark |= {"settings": asked.experiment.plain(), "id": asked.number}
    made = Answer("resized", came.step, training.now, {"id": asked.number, "text": mark["text"]})
    done = {**training.done, asked.number: made}
    to = Next(came, asked.experiment, training.obeyed, done, training.paused, training.credit, rest,
              processes, mark, asked.used)  # fmt: skip
    if session.rank.id == 0:
        for m in members[len(stay) :]:
            base.set(f"join {m}", json.dumps(_invitation(session, training, to)))
    if training.rollback is not None:
        training.rollback.past()
    return to


def _look(session: Session, store: Any = None) -> None:
    if session.ends:
        raise Aborted("told to leave while ranks were coming and going")
    if store is not None and membership.voting(store, session.rank.size):
        raise ConnectionError("Connection closed by peer: others have lost a rank while ranks were coming and going")


def _invitation(session: Session, training: Training, to: Next) -> dict[str, Any]:
    planned = [change.plain() for change in training.planned if type(change) is Change]
    steps = [change.at_step for change in training.planned if type(change) is Change]
    return {**to._asdict(), "came": to.came._asdict(), "experiment": to.experiment.plain(), "turn": session.turn,
            "asked": [], "planned": planned, "steps": steps}  # fmt: skip


def invited(session: Session) -> Next:
    """Waits until the training ranks invite this rank."""
    store = connect_store(*session.where, session.base)
    store.set(f"member {session.member}", json.dumps(membership.here()))
    session.phase = "waiting"
    while not store.check([f"join {session.member}"]):
        _look(session)
        time.sleep(membership.LOOK)
    session.phase = "starting"  # from now on the other ranks count on this one
    said = json.loads(store.get(f"join {session.member}"))
    session.turn = said.pop("turn")
    planned, steps = said.pop("planned"), said.pop("steps")
    session.planned = [Change.read(plain, step) for plain, step in zip(planned, steps, strict=True)]
    came = Came(*(tuple(x) if isinstance(x, list) else x for x in said.pop("came").values()))  # type: ignore[arg-type]
    return Next(came=came, experiment=Experiment.read(said.pop("experiment"), session.began_with.task), **said)


def _told(came: Came, gone: list[int], new: tuple[int, ...], asked: Resized) -> dict[str, Any]:
    left = asked.preempted
    out = [m for m in gone if m not in left]
    said = [f"{named(left)} {'were' if len(left) > 1 else 'was'} preempted and left"] if left else []
    said += [f"{named(out)} {are(out)} {'not needed then' if left else 'taken out'}"] if out else []
    said += [f"{named(new)} {are(new)} added"] if new else []
    go = "train" if len(came.members) > 1 else "trains"
    text = f"{', '.join(said)}; {named(came.members)} {go} from step {came.step}"
    spare = out if left else []
    return {"members": came.members, "gone": gone, "spare": spare, "new": new, "preempted": left, "step": came.step,
            "text": text}  # fmt: skip
