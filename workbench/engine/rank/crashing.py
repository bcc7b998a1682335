"""Ends a rank on purpose, as if its machine were lost."""

from __future__ import annotations

import os
import signal
import time

from workbench.engine.collectives.wire import Aborted, connect_store
from workbench.engine.control.membership import POLL_SECONDS, is_rank_alive
from workbench.engine.rank.session_state import SessionState


def crash_rank(session: SessionState, mine: bool) -> None:
    """Ends this rank if it is `mine`, once all ranks have made the change that brought the fault.

    If it ended earlier, the remaining ranks might repeat the change and lose the rank that then has its number. A
    process of this lab is killed, with its record on disk. In any other process the rank only leaves.
    """
    if session.rank.size > 1:
        _pass_change(session, mine)
    if not mine:
        return
    if session.owns_process:
        session.record.close()
        os.kill(os.getpid(), signal.SIGKILL)
    session.abort()
    raise Aborted("a fault has ended this rank")


def _pass_change(session: SessionState, waits: bool) -> None:
    """waits: for all living ranks to be past the change, too"""
    store = connect_store(*session.store_address, session.generation)
    what, ranks = f"past {session.set_up_already.queue.obeyed}", range(session.rank.size)
    store.set(f"{what} {session.rank.id}", "1")
    while waits and any(is_rank_alive(store, other) and not store.check([f"{what} {other}"]) for other in ranks):
        if session.leaving.is_set():
            raise Aborted("told to leave")
        time.sleep(POLL_SECONDS)
