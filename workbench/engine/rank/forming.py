"""How a generation forms: its ranks meet, receive the full state, and confirm that they hold it.

[Note: Formed or not] A new rank meets the old ranks without any state of the run. It has no vote and enters no average
until the new generation has formed. That is when each rank has reported in the store that it holds the full state, and
all digests are equal. A rank that has met an error never reports this. Each old rank keeps its former state until then.
If a rank dies or a connection is cut, the old ranks go back to that state and vote again in the previous generation,
and the new ranks leave. So either all ranks go on in the new generation or none does.
"""

from __future__ import annotations

import contextlib
import json
import threading

from workbench.engine.collectives.wire import Aborted, Wire, connect_store, is_own_error, is_peer_loss
from workbench.engine.control import membership
from workbench.engine.control.membership import NotNeeded
from workbench.engine.rank.session_state import FormingGeneration, SessionState
from workbench.engine.rank.training import RankTraining
from workbench.host.core.data_positions import NO_INDEX_TEXT, describe_repeats
from workbench.host.core.request_answers import KNOWN_KIND, RequestAnswer
from workbench.host.elastic.voting import NextGeneration
from workbench.host.placement.canonical_state import RankDisagreement
from workbench.settings.describe_error import text_of
from workbench.settings.rank_text import format_ranks


def confirm_formed(session: SessionState) -> None:
    """Reports that this rank holds the full state, and waits until all ranks do. Raises as `await_ranks` does."""
    forming = session.forming
    assert forming is not None
    forming.await_ranks(session, "formed")
    undone = session.note_formed()
    if forming.place == 0:
        about = {**forming.to.mark, "turn": session.generation_number}
        session.mark("members", about, forming.began)
        _answer_undone(session, undone)
        if not session.set_up_already.learner.indexed:
            session.mark("data", describe_repeats(NO_INDEX_TEXT))
        for what in forming.to.requests:
            session.inbox.put(what)
    for row in forming.marks:
        session.record.mark(*row)


def undo_forming(session: SessionState, error: BaseException) -> bool:
    """Puts this rank back into the previous generation with its former state.

    Returns whether a rank or a connection was lost, so that the old ranks can vote again. If so, a new rank raises
    NotNeeded.
    """
    forming = session.end_forming()
    assert forming is not None
    broke = _has_broken(session, forming, error)
    with contextlib.suppress(RuntimeError):  # the store's host may be gone
        if forming.place is not None:
            membership.report_gone(forming.open_store(session, 1.0), forming.place)
    session.leaving.set()
    session.cut_connections()
    before, after = forming.former_fields["training"], session.training
    if before is None:
        if broke:
            raise NotNeeded(_explain_leaving(forming)) from None
        return False
    if after is not before and after is not None:
        _close_failed(after)
    release_wires(session)
    session.restore_generation(forming)
    if forming.state is not None:
        forming.state.restore_state()
    _vote_again(session, forming)
    return broke


def _has_broken(session: SessionState, forming: FormingGeneration, error: BaseException) -> bool:
    """Whether a rank or a connection was lost, or a new rank received another state."""
    if not isinstance(error, Exception) or isinstance(error, Aborted | NotNeeded) or is_own_error(error):
        return False
    if is_peer_loss(error, text_of(error)):
        return True
    if isinstance(error, RankDisagreement) and len(forming.to.membership.members) > len(forming.to.membership.places):
        return True
    try:  # while wires open, and after a peer has left, the error can have any text
        membership.require_alive(forming.open_store(session, 1.0), range(len(forming.to.processes)))
    except (ConnectionError, RuntimeError):
        return True
    return False


def _close_failed(training: RankTraining) -> None:
    """Gives back the failed generation's parts; the model computes as it did before."""
    training.close()
    training.shared.take_own_copy()
    training.release_state(training.experiment.seed)


def release_wires(session: SessionState) -> None:
    """Closes wires on a thread of its own, because a wire that was cut may take seconds."""
    threading.Thread(
        target=_close_wires, args=(session.take_wires(),), name=f"rank {session.member} giving wires back", daemon=True
    ).start()


def _close_wires(wires: list[Wire]) -> None:
    for wire in wires:
        wire.close()


def _vote_again(session: SessionState, forming: FormingGeneration) -> None:
    before = session.begin_vote(forming.to)
    with contextlib.suppress(RuntimeError):
        again = connect_store(*session.store_address, session.voting)
        membership.prepare_vote(again, connect_store(*session.store_address, before), session.rank.size)


def _explain_leaving(forming: FormingGeneration) -> str:
    came = forming.to.membership
    old = range(len(came.places))
    if not any(membership.is_process_alive(json.dumps(forming.to.processes[place])) for place in old):
        return (
            f"{format_ranks([came.members[place] for place in old])} died while this rank joined, and no other rank "
            f"held the trained state"
        )
    return "a rank or a connection was lost while this rank joined; the others go on without it"


def _answer_undone(session: SessionState, undone: NextGeneration | None) -> None:
    """Answers a request for ranks that did not come because a rank was lost in the join."""
    if undone is None or "id" not in undone.mark or undone.mark["preempted"]:
        return
    ranks = len(undone.membership.members)
    reason = f"ranks={ranks}: a rank or a connection was lost in the join; ask again"
    refusal = {"path": "ranks", "value": ranks, "id": undone.mark["id"], "reason": reason}
    session.mark("refused", refusal)
    answer = RequestAnswer("refused", session.rank.step, session.set_up_already.now, refusal)
    session.inbox.put({"kind": KNOWN_KIND, "id": refusal["id"], "answer": answer})
