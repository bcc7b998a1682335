"""Sends the kernel's orders to the first rank or to every rank, in sequence."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workbench.cluster.processes.uninterruptible import without_interrupts
from workbench.cluster.run import last_rows
from workbench.cluster.run.state import RunState

if TYPE_CHECKING:
    from workbench.cluster.run.changes import PendingChange

ASK_AGAIN = "ask again"
AGAIN = 0.2  # seconds until an order is sent again if there is no first rank


class CommandQueue:
    """One run's orders, in sequence. first: the rank that takes requests for all ranks

    Each order names its run and ranks, because these may change for the engine.
    """

    def __init__(self, live: RunState) -> None:
        self.live = live
        self.first = 0
        self.dismissed: set[int] = set()  # ranks dismissed before they joined
        self._queue: queue.Queue[tuple[str, bool, Sequence[int], dict[str, Any]]] = queue.Queue()

    def put_order(self, what: str, everyone: bool = False, to: Sequence[int] = (), **rest: Any) -> None:
        """Queues an order for the first rank, `everyone`, or the ranks `to`. It waits for the sessions."""
        self._queue.put((what, everyone, to, rest))

    def put_change(self, asked: PendingChange) -> None:
        self._queue.put(("request", False, (), {"pending": asked}))

    def dismiss_ranks(self, ranks: Sequence[int]) -> None:
        """Frees the engines of ranks that have not joined."""
        if ranks:
            with without_interrupts():
                self.dismissed |= set(ranks)
                self.live.ending.note_outlived(ranks, self.live.step)
                self.put_order("abort", to=ranks)

    def send_next(self) -> None:
        try:
            order = self._queue.get(timeout=0.5)
        except queue.Empty:
            return
        if order[0] == ASK_AGAIN:
            return self._ask_again(order[3]["gone"])
        self._send_order(*order)

    def _send_order(self, what: str, everyone: bool, to: Sequence[int], rest: dict[str, Any]) -> None:
        live, line, asked = self.live, self.live.cluster.rpc, rest.get("pending")
        said = rest if asked is None else {"request": asked.request}
        try:
            if everyone or to:
                ranks = list(to or live.ending.living_ranks)
                line.ask_all(what, timeout=1.0, ranks=ranks, of=(live.generation, ranks), **said)
            else:
                line.ask_rank(self.first, what, timeout=1.0, of=(live.generation, [self.first]), **said)
                if asked is not None:
                    asked.sent = True
        except Exception as failure:  # must not block the next order
            if not (everyone or to) and self._lacks_leader and not live.over.wait(AGAIN):
                return self._queue.put((what, everyone, to, rest))
            live.note_error(failure)
            if rest.get("request", {}).get("kind") == "stop":  # no other rank would learn of the stop
                live.free_ranks()

    @property
    def _lacks_leader(self) -> bool:
        """Whether the first rank is dead and the remaining ranks will choose another."""
        return self.first in self.live.ending.dead_ranks and self.live.ending.outlives()

    def follow_leader(self, rank: int, gone: Sequence[int]) -> None:
        """Makes `rank` the first rank. Repeats requests that the ranks `gone` may have lost."""
        self.first = rank
        if gone:
            self.put_order(ASK_AGAIN, gone=gone)

    def _ask_again(self, gone: Sequence[int]) -> None:
        """Repeats unanswered requests, after reading the records of the ranks `gone`.

        Their reports may be lost. The remaining ranks apply the requests or repeat the results.
        """
        for one in gone:
            if self.live.cluster.describe_death(one):  # otherwise its rows come by themselves
                last_rows.of_silent(self.live, "marks", one)
        for asked in self.live.changes.unanswered():
            if asked.sent:  # otherwise it still queues
                self._send_order("request", False, (), {"pending": asked})
        if self.live.state == "stopping":
            self._send_order("request", False, (), {"request": {"id": "stop", "kind": "stop"}})
