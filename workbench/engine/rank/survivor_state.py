"""Finds out which checkpoints exist and which ranks are missing after a loss."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.engine.collectives.wire import connect_store
from workbench.engine.control import membership
from workbench.host.checkpoint.whole_state import RecoveryCheckpoint, open_images
from workbench.host.elastic.shrink_plan import RemainingRank
from workbench.record import checkpoints

if TYPE_CHECKING:
    from workbench.engine.rank.session import Session


def make_survivor(session: Session) -> RemainingRank:
    """Returns this rank's view, from which the remaining ranks plan how they go on."""
    folder = Path(session.run_dir or ".") / checkpoints.FOLDER
    return RemainingRank(
        member=session.member, place=session.rank.id, size=session.rank.size, run=session.set_up_already,
        mark=session.mark, find_missing=partial(find_missing, session),
        checkpoint_path=lambda step: str(folder / checkpoints.name(step)),
    )  # fmt: skip


def list_saved(session: Session) -> list[int]:
    """Returns the steps before which this rank sees complete checkpoints of this run."""
    if session.run_dir is None:
        return []
    return [
        checkpoints.step_of(path) for path in checkpoints.list_checkpoints(Path(session.run_dir) / checkpoints.FOLDER)
    ]


def find_missing(session: Session, here: Collection[int]) -> tuple[list[int], list[int]]:
    """Returns the counted ranks that are not `here`: lost ranks, and new ranks that still run."""
    store, away = connect_store(*session.where, session.base), [m for m in session.counted_members if m not in here]
    left_out = [m for m in away if m not in session.members and membership.is_process_alive(store.get(f"member {m}"))]
    return [m for m in away if m not in left_out], left_out


def open_former(path: str) -> RecoveryCheckpoint:
    """Returns the checkpoint to which all ranks go back. Raises RunError if it cannot be read."""
    checkpoint = checkpoints.Checkpoint.open(path)
    return open_images(checkpoint, checkpoints.CheckpointFiles(checkpoint))
