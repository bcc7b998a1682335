"""How a rank goes on after a peer is lost: it leaves its generation, votes, and begins the next.

The session's thread does all of this, between two loops of its `RankTraining`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from functools import partial
from pathlib import Path

from workbench.engine.collectives.wire import connect_store, is_own_error, is_peer_loss
from workbench.engine.control import membership
from workbench.engine.control.membership import REPORT_TIMEOUT, LeftBehind, NotNeeded
from workbench.engine.rank.forming import release_wires
from workbench.engine.rank.session_state import SessionState, check_leaving
from workbench.host.checkpoint.whole_state import RecoveryCheckpoint, open_images
from workbench.host.elastic import leaving
from workbench.host.elastic.reentry import Membership
from workbench.host.elastic.shrink_plan import RemainingRank, mark_end_reason, plan_shrink
from workbench.host.elastic.voting import NextGeneration, Quorum, RankReport
from workbench.host.loop import generation
from workbench.rank import Rank
from workbench.record import checkpoints
from workbench.settings.describe_error import text_of

PATIENCE_STEPS = 5.0  # a vote's patience, in longest steps of a rank


def can_outlive(session: SessionState, error: BaseException, broke: bool = False) -> bool:
    """Whether `error` comes from a lost peer, and this rank goes on after it.

    broke: whether a generation did not form because of it

    Raises LeftBehind if the other ranks have gone on without this one.
    """
    training = session.training
    if training is None or not training.has_begun or session.is_ending:
        return False
    met = broke or (is_peer_loss(error, text_of(error)) and not is_own_error(error))
    if met and session.undone is not None and not _has_lost_rank(session):
        return True  # only a joining rank is lost, and all ranks stand at a boundary
    if session.rank.size == 1:
        return False
    if met and not _is_counted(session):
        raise LeftBehind(f"the other ranks went on without rank {session.member}, because it had not answered in time")
    if not met or (training.experiment.on_death == "end" and not session.outlives_next):
        return False
    if reason := explain_refusal(session, alive=True):
        mark_end_reason(session.mark, reason)
    return not reason


def _is_counted(session: SessionState) -> bool:
    """Whether the other ranks still wait for this one."""
    with contextlib.suppress(RuntimeError):  # the store's host may be gone
        store = connect_store(*session.store_address, session.voting, timeout=1.0)
        return membership.is_counted(store, session.rank.id)
    return True


def explain_refusal(session: SessionState, alive: bool = False) -> str:
    """Returns why the remaining ranks could not go on without one; "" if they could.

    alive: see `leaving.explain_refusal`
    """
    if session.training is None or not session.training.has_begun:
        return "not all ranks have begun to train"
    return leaving.explain_refusal(session.training, list_saved(session), alive)


def _has_lost_rank(session: SessionState) -> bool:
    try:
        for store in {session.generation, session.voting}:
            membership.require_alive(connect_store(*session.store_address, store), range(session.rank.size))
    except ConnectionError:
        return True
    return False


def leave_generation(session: SessionState) -> RankReport:
    """Gives back the generation's wires and shared memory. Returns this rank's report."""
    training = session.set_up_already
    training.leaving.set()
    session.cut_connections()
    training.close()
    training.shared.take_own_copy()
    parts = leaving.return_to_boundary(training)
    release_wires(session)
    asked = training.unheeded_requests, dict(training.known_answers), training.paused, training.credit
    return leaving.make_rank_report(
        training, session.member, parts, list_saved(session) if parts else (), asked, membership.describe_process()
    )


def vote_with_rest(session: SessionState, mine: RankReport) -> Quorum:
    """Raises Aborted if this rank must leave, LeftBehind if the other ranks went on."""
    store, training, rank = connect_store(*session.store_address, session.voting), session.set_up_already, session.rank
    patience = max(REPORT_TIMEOUT, PATIENCE_STEPS * max(training.longest_evaluation, *training.step_seconds))
    return membership.hold_vote(store, rank.id, rank.size, mine, patience, partial(check_leaving, session))


def plan_generation(session: SessionState) -> NextGeneration:
    """Waits until all ranks have reported."""
    assert session.report is not None
    return plan_shrink(make_survivor(session), vote_with_rest(session, session.report))


def begin_generation(session: SessionState, to: NextGeneration) -> Membership:
    """Gathers the ranks of the next generation and opens their wires; `confirm_formed` ends what begins here.

    Another rank waits until the generation has formed, because it may hold a part that a member loses. Then it raises
    NotNeeded. After any other error, `undo_forming` takes back what was begun.
    """
    forming = session.begin_forming(to)
    forming.await_ranks(session, "meet")
    if forming.place is None:
        forming.await_ranks(session, "formed")
        session.end_forming()
        count = len(to.membership.members)
        raise NotNeeded(f"the others went on from step {to.membership.step} as {count} ranks, without this one")
    before = session.training
    came = to.membership
    rank = Rank(
        forming.place, len(came.members), to.experiment.seed, step=came.step, lr=session.rank.lr, members=came.members
    )
    if before is not None:
        forming.keep_state(before)
        leaving.hand_down_state(before, rank, to)
    salvaged = to.membership.salvaged
    back = open_former(salvaged.checkpoint) if salvaged and salvaged.checkpoint else None
    session.enter_generation(forming, rank, back.used if back else to.examples_used)
    training = session.make_training(before)
    training.continue_run(to, before, back)
    generation.begin_generation(training)
    return to.membership


def make_survivor(session: SessionState) -> RemainingRank:
    """Returns this rank's view, from which the remaining ranks plan how they go on."""
    folder = Path(session.run_dir or ".") / checkpoints.FOLDER
    return RemainingRank(
        member=session.member, place=session.rank.id, size=session.rank.size, run=session.set_up_already,
        mark=session.mark, find_missing=partial(find_missing, session),
        checkpoint_path=lambda step: str(folder / checkpoints.name(step)),
    )  # fmt: skip


def list_saved(session: SessionState) -> list[int]:
    """Returns the steps before which this rank sees complete checkpoints."""
    if session.run_dir is None:
        return []
    return [
        checkpoints.step_of(path) for path in checkpoints.list_checkpoints(Path(session.run_dir) / checkpoints.FOLDER)
    ]


def find_missing(session: SessionState, here: Collection[int]) -> tuple[list[int], list[int]]:
    """Returns the counted ranks that are not `here`: lost ranks, and new ranks that still run."""
    store = connect_store(*session.store_address, session.run_id)
    away = [m for m in session.counted_members if m not in here]
    left_out = [m for m in away if m not in session.members and membership.is_process_alive(store.get(f"member {m}"))]
    return [m for m in away if m not in left_out], left_out


def open_former(path: str) -> RecoveryCheckpoint:
    """All ranks go back to it. Raises RunError if it cannot be read."""
    checkpoint = checkpoints.Checkpoint.open(path)
    return open_images(checkpoint, checkpoints.CheckpointFiles(checkpoint))
