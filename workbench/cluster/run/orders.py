"""What the kernel asks of a run's ranks: one order after the other, to the rank that hears for all, or to everyone."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workbench.cluster.processes.whole import whole
from workbench.cluster.run import last_rows

if TYPE_CHECKING:
    from workbench.cluster.run.changes import PendingChange
    from workbench.cluster.run.live import Live

ASK_AGAIN = "ask again"
AGAIN = 0.2  # seconds until an order is sent again for which no rank hears at the moment


class Orders:
    """The orders of one run, in the order asked. first: the rank that hears for all.

    Each names the run and the ranks it is meant for: it may come when the engine is in another run, or another rank.
    """

    def __init__(self, live: Live) -> None:
        self.live = live
        self.first = 0
        self.dismissed: set[int] = set()  # ranks that were to come and were told not to
        self._queue: queue.Queue[tuple[str, bool, Sequence[int], dict[str, Any]]] = queue.Queue()

    def put(self, what: str, everyone: bool = False, to: Sequence[int] = (), **rest: Any) -> None:
        """Asks the first rank, or everyone, or these to do something; done once the sessions are there."""
        self._queue.put((what, everyone, to, rest))

    def ask(self, asked: PendingChange) -> None:
        """Asks the first rank for a change, or for other ranks."""
        self._queue.put(("request", False, (), {"pending": asked}))

    def dismiss(self, ranks: Sequence[int]) -> None:
        """These were to come and do not: their sessions end, and their engines are free again."""
        if ranks:
            with whole():
                self.dismissed |= set(ranks)
                self.live.ending.outlived(ranks, self.live.step)
                self.put("abort", to=ranks)

    def carry(self) -> None:
        """Sends the next order, if there is one."""
        try:
            order = self._queue.get(timeout=0.5)
        except queue.Empty:
            return
        if order[0] == ASK_AGAIN:
            return self._ask_again(order[3]["gone"])
        self._send(*order)

    def _send(self, what: str, everyone: bool, to: Sequence[int], rest: dict[str, Any]) -> None:
        live, line, asked = self.live, self.live.cluster.line, rest.get("pending")
        said = rest if asked is None else {"request": asked.request}
        try:
            if everyone or to:
                ranks = list(to or live.ending.living)
                line.ask_all(what, timeout=1.0, ranks=ranks, of=(live.generation, ranks), **said)
            else:
                line.ask(self.first, what, timeout=1.0, of=(live.generation, [self.first]), **said)
                if asked is not None:
                    asked.sent = True
        except Exception as failure:  # one order that fails must not keep the next from going out
            if not (everyone or to) and self._leaderless and not live.over.wait(AGAIN):
                return self._queue.put((what, everyone, to, rest))
            live.note(failure)
            if rest.get("request", {}).get("kind") == "stop":  # nobody else would hear of it: they are told to leave
                live.free()

    @property
    def _leaderless(self) -> bool:
        """Is the rank that hears for all gone, and are the others about to find another?"""
        return self.first in self.live.ending.dead and self.live.ending.outlives()

    def hears(self, rank: int, gone: Sequence[int]) -> None:
        """From now on it is this rank that hears for all, and these are gone, with what they had not told."""
        self.first = rank
        if gone:
            self.put(ASK_AGAIN, gone=gone)

    def _ask_again(self, gone: Sequence[int]) -> None:
        """What still has no answer is asked again. Those who are left do what they have not done, and say of what was
        done what became of it: who was to say so may have been lost before that came to a disk that is seen here.
        """
        for one in gone:
            if self.live.cluster.death(one):  # else its rows come by themselves
                last_rows.of_silent(self.live, "marks", one)
        for asked in self.live.changes.unanswered():
            if asked.sent:  # else it is still to go out, behind what it needs
                self._send("request", False, (), {"pending": asked})
        if self.live.state == "stopping":
            self._send("request", False, (), {"request": {"id": "stop", "kind": "stop"}})
