"""Runs a rank from one generation to the next, as ranks are lost, leave or join."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.engine.rank.forming import undo
from workbench.engine.rank.outliving import begin_generation, leave_generation, outlives, settled
from workbench.engine.rank.resizing import arranged, invited
from workbench.host.elastic.voting import Next, Resized

if TYPE_CHECKING:
    from workbench.engine.rank.session import Session


def live_through(session: Session) -> None:
    """Runs from the first step to the last. Raises the error that ends this rank's part before that."""
    to = invited(session) if session.joins else None
    while True:
        try:
            if (to := _one(session, to)) is None:
                return
        except Exception as error:
            broke = undo(session, error) if session.forming is not None else False
            if not outlives(session, error, broke):
                raise
            error.__traceback__ = None  # a kept traceback keeps the dead group's sockets open
            session.words = session.words or leave_generation(session, session.set_up_already)
            to = settled(session)


def _one(session: Session, to: Next | None) -> Next | None:
    """Runs one generation to its end; `to` is None for the first.

    Returns the next generation if ranks leave or join; None at the end of the run.
    """
    try:
        if to is None:
            training = session.set_up()
            training.host.drive(training.live())
        else:
            came = begin_generation(session, to)
            session.set_up_already.host.drive(session.set_up_already.live_on(came))
    except Resized as asked:
        made = arranged(session, asked)
        del session.set_up_already.asked[0]  # done, or answered if the next generation does not form
        session.words = leave_generation(session, session.set_up_already)
        return made
    return None
