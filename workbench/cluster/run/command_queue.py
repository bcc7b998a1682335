"""Sends the kernel's commands to the first rank or to every rank, in sequence."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workbench.cluster.processes.uninterruptible import without_interrupts
from workbench.cluster.run import last_rows
from workbench.cluster.run.run_state import RunState

if TYPE_CHECKING:
    from workbench.cluster.run.run_changes import PendingChange

RESEND = "ask again"
RESEND_INTERVAL = 0.2  # seconds, if there is no first rank


class CommandQueue:
    """One run's commands, in sequence. leader: the first rank, which takes requests for all ranks

    Each command names its run and ranks, because these may change for the engine.
    """

    def __init__(self, live: RunState) -> None:
        self.live = live
        self.leader = 0
        self.dismissed: set[int] = set()  # before they joined
        self._queue: queue.Queue[tuple[str, bool, Sequence[int], dict[str, Any]]] = queue.Queue()

    def put_command(self, what: str, everyone: bool = False, to: Sequence[int] = (), **rest: Any) -> None:
        """Queues a command for the first rank, `everyone`, or the ranks `to`. It waits for the sessions."""
        self._queue.put((what, everyone, to, rest))

    def put_change(self, change: PendingChange) -> None:
        self._queue.put(("request", False, (), {"pending": change}))

    def dismiss_ranks(self, ranks: Sequence[int]) -> None:
        """Frees the engines of ranks that have not joined."""
        if ranks:
            with without_interrupts():
                self.dismissed |= set(ranks)
                self.live.ending.note_removed(ranks, self.live.step)
                self.put_command("abort", to=ranks)

    def send_next_command(self) -> None:
        try:
            command = self._queue.get(timeout=0.5)
        except queue.Empty:
            return
        if command[0] == RESEND:
            return self._resend_unanswered(command[3]["gone"])
        self._send_command(*command)

    def _send_command(self, what: str, everyone: bool, to: Sequence[int], rest: dict[str, Any]) -> None:
        live, rpc, change = self.live, self.live.cluster.rpc, rest.get("pending")
        arguments = rest if change is None else {"request": change.request}
        try:
            if everyone or to:
                ranks = list(to or live.ending.living_ranks)
                rpc.ask_all(what, timeout=1.0, ranks=ranks, of=(live.run_id, ranks), **arguments)
            else:
                rpc.ask_rank(self.leader, what, timeout=1.0, of=(live.run_id, [self.leader]), **arguments)
                if change is not None:
                    change.sent = True
        except Exception as failure:  # must not block the next command
            if not (everyone or to) and self._lacks_leader and not live.over.wait(RESEND_INTERVAL):
                return self._queue.put((what, everyone, to, rest))
            live.note_error(failure)
            if rest.get("request", {}).get("kind") == "stop":  # no other rank would learn of the stop
                live.abort_ranks()

    @property
    def _lacks_leader(self) -> bool:
        """Whether the first rank is dead and the remaining ranks will choose another."""
        return self.leader in self.live.ending.dead_ranks and self.live.ending.survives_loss()

    def follow_leader(self, rank: int, gone: Sequence[int]) -> None:
        """Makes `rank` the first rank. Repeats requests that the ranks `gone` may have lost."""
        self.leader = rank
        if gone:
            self.put_command(RESEND, gone=gone)

    def _resend_unanswered(self, gone: Sequence[int]) -> None:
        """Repeats unanswered requests, after reading the records of the ranks `gone`.

        Their reports may be lost. The remaining ranks apply the requests or repeat the results.
        """
        for one in gone:
            if self.live.cluster.describe_death(one):  # otherwise its rows come by themselves
                last_rows.read_silent_rows(self.live, "marks", one)
        for change in self.live.changes.list_unanswered():
            if change.sent:  # otherwise it still queues
                self._send_command("request", False, (), {"pending": change})
        if self.live.state == "stopping":
            self._send_command("request", False, (), {"request": {"id": "stop", "kind": "stop"}})
