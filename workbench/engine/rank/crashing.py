"""A rank that a fault ends on purpose: without a word, as one whose machine is lost."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from workbench.engine.control.membership import LOOK, lives
from workbench.engine.wire.collectives import Aborted, connect_store

if TYPE_CHECKING:
    from workbench.engine.rank.session import Session


def crash(session: Session, mine: bool) -> None:
    """This rank, if it is `mine`, or another crashes, once all have made the change that brought the fault.

    Else those who are left might make it again, and lose the one that has its number by then. The process is ended
    where this lab has started it, with all that it has recorded on the disk; elsewhere the rank leaves it.
    """
    if session.rank.size > 1:
        _come_past(session, mine)
    if not mine:
        return
    if session.ours:
        session.record.close()
        os.kill(os.getpid(), signal.SIGKILL)
    session.abort()
    raise Aborted("a fault has ended this rank")


def _come_past(session: Session, waits: bool) -> None:
    """Says that this rank has come past the change; one that `waits` does so until all who live have."""
    store = connect_store(*session.where, session.generation)
    what, ranks = f"past {session.set_up_already.obeyed}", range(session.rank.size)
    store.set(f"{what} {session.rank.id}", "1")
    while waits and any(lives(store, other) and not store.check([f"{what} {other}"]) for other in ranks):
        if session.leaving.is_set():
            raise Aborted("told to leave")
        time.sleep(LOOK)
