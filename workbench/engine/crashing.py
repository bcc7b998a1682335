"""A rank that a fault ends on purpose: without a word, as one whose machine is lost."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from workbench.engine.collectives import Aborted

if TYPE_CHECKING:
    from workbench.engine.session import Session


def crash(session: Session) -> None:
    """Ends the process where this lab has started it; elsewhere the rank leaves it. Does not return.

    What it has recorded is on the disk before: else nobody would say that the change was made which brought the fault.
    """
    if session.ours:
        session.record.close()
        os.kill(os.getpid(), signal.SIGKILL)
    session.abort()
    raise Aborted("a fault has ended this rank")
