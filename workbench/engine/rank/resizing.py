"""The engine's part of a requested resize: present ranks prepare it and invite the new ranks.

All ranks obey the request at the same boundary. They assemble the state that is spread over ranks
(`host/elastic/resizing.py`). The first rank stores an invitation for each new rank. Then the generation ends.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

from workbench.engine.collectives.wire import Aborted, connect_store
from workbench.engine.control import membership
from workbench.engine.rank.session_state import SessionState
from workbench.engine.rank.training import RankTraining
from workbench.experiment import Experiment
from workbench.host.core.data_positions import count_used_up
from workbench.host.core.request_answers import RequestAnswer
from workbench.host.elastic.reentry import Membership, resize_experiment
from workbench.host.elastic.resizing import gather_state
from workbench.host.elastic.voting import NextGeneration, ResizeSignal
from workbench.settings import Change, Json, KnobError
from workbench.settings.rank_text import conjugate_be, format_ranks


async def resize_run(session: SessionState, members: tuple[int, ...], number: str) -> None:
    """Goes on with `members`, old and new. Raises ResizeSignal. A Mark gives the reason of a refusal."""
    training = session.set_up_already
    stay = [m for m in session.members if m in members]
    new = [m for m in members if m not in stay]
    try:
        _require_waiting(session, new, len(members))
        wanted = _make_experiment(training, session.members, stay, members)
    except KnobError as error:
        refusal: dict[str, Json] = {"path": "ranks", "value": len(members), "id": number, "reason": str(error)}
        training.refuse_request(refusal)
        return
    places = tuple(session.members.index(m) for m in stay)
    await end_generation(training, places, (*stay, *new), wanted, number)


async def end_generation(
    training: RankTraining,
    stay: tuple[int, ...],
    members: tuple[int, ...],
    wanted: Experiment,
    number: str,
    preempted: tuple[int, ...] = (),
) -> None:
    """Assembles the state on the ranks that stay, and raises ResizeSignal. Until all ranks have met, they can go back.

    stay: the places that go on; see ResizeSignal for the other arguments
    """
    with training.guard_step(True):
        if training.rollback is not None:
            training.rollback.begin_gathering()
        await gather_state(training, stay)
        if training.rollback is not None:
            training.rollback.note_whole_state(training.rank.id in stay)
        raise ResizeSignal(members, wanted, number, await count_used_up(training), preempted)


def _require_waiting(session: SessionState, new: list[int], ranks: int) -> None:
    """Raises KnobError if a new rank has not reported that it waits, or was invited before: then it is lost.

    New ranks report before the request is made, so all ranks find the same.
    """
    store = connect_store(*session.store_address, session.run_id)
    if lost := [m for m in new if not store.check([f"member {m}"]) or store.check([f"join {m}"])]:
        raise KnobError(f"ranks={ranks}: {format_ranks(lost)} {conjugate_be(lost)} not there any more; ask again")


def _make_experiment(
    training: RankTraining, now: tuple[int, ...], stay: list[int], members: tuple[int, ...]
) -> Experiment:
    if not stay:
        raise KnobError(f"ranks={len(members)}: at least one rank that trains now must stay, to hand over the model")
    few = resize_experiment(training.experiment, tuple(now.index(m) for m in stay), len(members))
    return training.require_trainable(few)


def arrange_generation(session: SessionState, asked: ResizeSignal) -> NextGeneration:
    """Waits until all ranks have come together, invites the new ranks, and returns the plan.

    Raises ConnectionError if a rank does not come: it is lost, or has lost another rank and votes. Then all other ranks
    go back to the boundary, and none has passed it, because the missing rank never reports in the store.
    """
    training, members = session.set_up_already, asked.members
    stay = [m for m in members if m in session.members]
    places = tuple(session.members.index(m) for m in stay)
    came = Membership(members, places, tuple(range(len(stay))), tuple(range(len(stay))), session.rank.step)
    store = connect_store(*session.store_address, session.generation)
    run_store = connect_store(*session.store_address, session.run_id)
    if session.rank.size == 1:  # a single rank has met no rank in the store
        membership.store_process(store, 0)
    there = [json.loads(store.get(f"process {place}")) for place in range(session.rank.size)]
    look = partial(_check_leaving, session, store)
    membership.await_reports(store, "together", session.rank.id, there, look, session.members)
    processes = [there[place] for place in places]
    processes += [json.loads(run_store.get(f"member {m}")) for m in members[len(stay) :]]
    rest = training.unheeded_requests[1:]
    mark = _describe_resize(came, [m for m in session.members if m not in members], members[len(stay) :], asked)
    mark |= {"settings": asked.experiment.plain(), "id": asked.number}
    made = RequestAnswer("resized", came.step, training.now, {"id": asked.number, "text": mark["text"]})
    done = {**training.known_answers, asked.number: made}
    to = NextGeneration(came, asked.experiment, training.queue.obeyed, done, training.paused, training.credit, rest,
              processes, mark, asked.used)  # fmt: skip
    if session.rank.id == 0:
        for m in members[len(stay) :]:
            run_store.set(f"join {m}", json.dumps(_make_invitation(session, training, to)))
    if training.rollback is not None:
        training.rollback.end_guard()
    return to


def _check_leaving(session: SessionState, store: Any = None) -> None:
    if session.is_ending:
        raise Aborted("told to leave while ranks were coming and going")
    if store is not None and membership.has_vote_begun(store, session.rank.size):
        raise ConnectionError("Connection closed by peer: others have lost a rank while ranks were coming and going")


def _make_invitation(session: SessionState, training: RankTraining, to: NextGeneration) -> dict[str, Any]:
    planned = [change.plain() for change in training.queue.planned if isinstance(change, Change)]
    steps = [change.at_step for change in training.queue.planned if isinstance(change, Change)]
    return {**to._asdict(), "membership": to.membership._asdict(), "experiment": to.experiment.plain(),
            "turn": session.generation_number, "requests": [], "planned": planned, "steps": steps}  # fmt: skip


def await_invitation(session: SessionState) -> NextGeneration:
    """Waits until the training ranks invite this rank."""
    store = connect_store(*session.store_address, session.run_id)
    store.set(f"member {session.member}", json.dumps(membership.describe_process()))
    session.note_joining("waiting")
    while not store.check([f"join {session.member}"]):
        _check_leaving(session)
        time.sleep(membership.POLL_SECONDS)
    session.note_joining("starting")  # from now on the other ranks count on this one
    said = json.loads(store.get(f"join {session.member}"))
    planned, steps = said.pop("planned"), said.pop("steps")
    changes = [Change.read(plain, step) for plain, step in zip(planned, steps, strict=True)]
    session.accept_invitation(said.pop("turn"), changes)
    came = Membership(*(tuple(x) if isinstance(x, list) else x for x in said.pop("membership").values()))  # type: ignore[arg-type]
    return NextGeneration(
        membership=came, experiment=Experiment.read(said.pop("experiment"), session.began_with.task), **said
    )


def _describe_resize(came: Membership, gone: list[int], new: tuple[int, ...], asked: ResizeSignal) -> dict[str, Any]:
    left = asked.preempted
    out = [m for m in gone if m not in left]
    said = [f"{format_ranks(left)} {'were' if len(left) > 1 else 'was'} preempted and left"] if left else []
    said += [f"{format_ranks(out)} {conjugate_be(out)} {'not needed then' if left else 'taken out'}"] if out else []
    said += [f"{format_ranks(new)} {conjugate_be(new)} added"] if new else []
    go = "train" if len(came.members) > 1 else "trains"
    text = f"{', '.join(said)}; {format_ranks(came.members)} {go} from step {came.step}"
    spare = out if left else []
    return {"members": came.members, "gone": gone, "spare": spare, "new": new, "preempted": left, "step": came.step,
            "text": text}  # fmt: skip
