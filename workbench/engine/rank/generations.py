"""Runs a rank from one generation to the next, as ranks are lost, leave or join."""

from __future__ import annotations

from workbench.engine.rank.forming import undo_forming
from workbench.engine.rank.resizing import arrange_generation, await_invitation
from workbench.engine.rank.session_state import SessionState
from workbench.engine.rank.surviving import begin_generation, can_outlive, leave_generation, plan_generation
from workbench.host.elastic.voting import NextGeneration, ResizeSignal


def run_generations(session: SessionState) -> None:
    """Runs from the first step to the last. Raises the error that ends this rank's part before."""
    to = await_invitation(session) if session.joins else None
    while True:
        try:
            if (to := _run_generation(session, to)) is None:
                return
        except Exception as error:
            broke = undo_forming(session, error) if session.forming is not None else False
            if not can_outlive(session, error, broke):
                raise
            error.__traceback__ = None  # it would keep the dead group's sockets open
            if session.report is None:
                session.keep_report(leave_generation(session))
            to = plan_generation(session)


def _run_generation(session: SessionState, to: NextGeneration | None) -> NextGeneration | None:
    """Runs one generation; `to` is None for the first.

    Returns the next generation if ranks leave or join; None at the end of the run.
    """
    try:
        if to is None:
            training = session.set_up()
            training.host.drive_coroutine(training.train_from_start())
        else:
            came = begin_generation(session, to)
            session.set_up_already.host.drive_coroutine(session.set_up_already.train_in_generation(came))
    except ResizeSignal as asked:
        made = arrange_generation(session, asked)
        del session.set_up_already.pending_requests[0]  # done, or answered if the next generation does not form
        session.keep_report(leave_generation(session))
        return made
    return None
