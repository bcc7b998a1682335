"""Ranks added to a run that is live, and taken out of it: the kernel's side.

Who comes has an engine of this lab that is in no run, or one that is started for it. Its session begins, says that it
waits, and only then those who train are asked; they invite it (`engine/resizing.py`), so that a rank that cannot begin
changes nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from workbench.cluster.beginning import begin
from workbench.cluster.changes import PendingChange
from workbench.cluster.meeting import cannot_start, start_more
from workbench.cluster.place import ClusterError
from workbench.settings import KnobError

if TYPE_CHECKING:
    from workbench.cluster.live import Live

WAIT = 60.0  # seconds that a rank which is to come has to say that it waits
LOOK = 0.05  # seconds between two looks


def resize(live: Live, ranks: int) -> PendingChange:
    """`ranks` of the run go on together before one of its next steps. Raises KnobError where so many cannot be had."""
    here = list(live.members)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise KnobError(f"ranks={ranks!r}: must be an integer of at least 1")
    spare = idle(live)
    if ranks > len(here) + len(spare):
        with live.cluster.starting:  # one that is coming up is waited for
            spare = idle(live)
            return _resized(live, ranks, here, spare, max(0, ranks - len(here) - len(spare)))
    return _resized(live, ranks, here, spare, 0)


def _resized(live: Live, ranks: int, here: list[int], spare: list[int], wanting: int) -> PendingChange:
    if wanting and (why := cannot_start(live.cluster, wanting)):
        raise KnobError(
            f"ranks={ranks}: {len(here)} ranks train, {len(spare)} engines of this lab are idle, and more cannot be "
            f"started: {why}; take at most {len(here) + len(spare)}"
        )
    if live.state not in ("running", "paused"):
        raise ClusterError(f"ranks={ranks}: the run is {live.state}; ranks come and go while it trains")
    if wanting:
        spare += start_more(live.cluster, wanting)
    new = spare[: max(0, ranks - len(here))]
    if new:
        _invite(live, new)
    members = [*here[:ranks], *new]
    asked = live.changes.resizing(ranks)
    live.order("request", request={"kind": "resize", "members": members, "id": asked.id})
    return asked


def idle(live: Live) -> list[int]:
    """Ranks of this lab that were never in this run, and whose engines live."""
    been = live.been
    return [e.rank for e in live.cluster.engines if e.rank not in been and not live.cluster.death(e.rank)]


def _invite(live: Live, new: list[int]) -> None:
    """Their sessions begin and wait; raises RankError or ClusterError if one does not."""
    live.admit(new)
    live.spools |= begin(live.cluster, {**live.job, "joins": True}, live.blob, new, secret=live.secret)
    until = time.monotonic() + WAIT
    while True:
        said = live.cluster.line.ask_all("status", timeout=1.0, ranks=new)
        states = {rank: answer["state"] for rank, answer in said.items() if isinstance(answer, dict)}
        if set(states.values()) == {"waiting"} and len(states) == len(new):
            return
        if time.monotonic() > until or live.over.is_set():
            live.cluster.line.ask_all("abort", timeout=1.0, ranks=new)
            raise ClusterError(f"ranks {new} did not begin within {WAIT:.0f} s; the run goes on as it was")
        time.sleep(LOOK)
