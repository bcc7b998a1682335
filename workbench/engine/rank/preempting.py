"""A rank leaves after the current step, because its machine is about to end.

[Note: Preemption] Slurm, Kubernetes and spot instances send SIGTERM some time before they end a process. A rank that
receives it writes that into the run's store. The first rank, or its successor, reads the store with every beat of its
StallDetector, so no kernel is needed. It makes an ordinary request, which all ranks obey before the same step. If no
rank can go on, the run keeps a checkpoint and ends with a reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from workbench.engine.collectives.wire import connect_store
from workbench.engine.rank.resizing import end_generation
from workbench.engine.rank.session_state import SessionState
from workbench.engine.rank.surviving import list_saved
from workbench.host.elastic.reentry import choose_survivors
from workbench.rank import Op
from workbench.settings import KnobError
from workbench.settings.rank_text import conjugate_be, format_ranks

PREEMPTED_KEY = "preempted"  # the store's key once any rank is preempted


class Preempted(RuntimeError):
    """Ranks must leave, and the other ranks cannot go on without them."""


def announce_preemption(session: SessionState) -> None:
    """Tells the other ranks that this rank leaves before one of their next steps. May run on any thread."""
    text = f"{format_ranks([session.member])} is preempted: it leaves after the current step"
    session.mark(PREEMPTED_KEY, {"ranks": [session.member], "step": session.rank.step, "text": text})
    store = connect_store(*session.store_address, session.run_id)
    store.set(f"{PREEMPTED_KEY} {session.member}", "1")
    store.set(PREEMPTED_KEY, "1")


class PreemptionWatch:
    """On the first rank: requests once per generation that preempted ranks leave."""

    def __init__(self, session: SessionState) -> None:
        self.session = session
        self._store: Any = None
        self._reported: set[tuple[str, int]] = set()

    def __call__(self) -> None:
        session, members, generation = self.session, self.session.members, self.session.generation
        if session.rank.id or session.training is None or not session.training.has_begun or session.is_ending:
            return
        with contextlib.suppress(RuntimeError, OSError):  # the store's host may be gone
            self._store = self._store or connect_store(*session.store_address, session.run_id)
            if not self._store.check([PREEMPTED_KEY]):
                return
            new = [m for m in members if (generation, m) not in self._reported]
            found = [m for m in new if self._store.check([f"{PREEMPTED_KEY} {m}"])]
            if found:
                self._reported |= {(generation, m) for m in found}
                name = f"preempt {', '.join(map(str, found))} of {generation}"
                session.request({"kind": "preempt", "members": found, "id": name})


async def remove_preempted(session: SessionState, members: Sequence[int], number: str) -> None:
    """Raises ResizeSignal; raises Preempted if the other ranks cannot go on."""
    training = session.set_up_already
    gone = [m for m in members if m in session.members]
    left = [place for place, m in enumerate(session.members) if m not in gone]
    if not gone:
        return
    try:
        if not left:
            raise KnobError("no rank is left to go on")
        wanted, places = choose_survivors(training.experiment, left, training.require_trainable)
    except KnobError as error:
        raise Preempted(await _save_and_explain(session, gone, str(error))) from None
    await end_generation(
        training, places, tuple(session.members[place] for place in places), wanted, number, tuple(gone)
    )


async def _save_and_explain(session: SessionState, gone: list[int], reason: str) -> str:
    """Keeps a checkpoint if there is a run directory. All ranks return the same text."""
    training, step = session.set_up_already, session.rank.step
    text = f"{format_ranks(gone)} {conjugate_be(gone)} preempted, and the run cannot go on: {reason}"
    if session.run_dir is None:
        return f"{text}; there is no run directory to keep a checkpoint in"
    await training.checkpointer.make_checkpoint(asked=True)
    await Op("do", training.checkpointer.end)
    kept = await training.gather(int(training.rank.id == 0 and step in list_saved(session)))
    then = f"a checkpoint before step {step} is kept; go on from it with lab.run(resume=...)"
    return f"{text}; {then if any(kept) else f'no checkpoint could be made before step {step}'}"
