"""How ranks that do not meet in every round come together, so that a change acts on all of them.

[Note: Two ways of hearing] Some ranks exchange with their neighbours only (`propagation` > 0). Then every message
carries the step at which all ranks meet. Rank 0 chooses it so late that every rank knows it by then. Other ranks keep
no common step (`lockstep` = False). Then rank 0 calls, and each rank comes at its next boundary. At a meeting the steps
stand still. The backgrounds receive what was sent, end, and begin again afterwards.
"""

from __future__ import annotations

from typing import Any

from workbench.engine.collectives.shaping import LinkShaper
from workbench.engine.collectives.wire import Aborted
from workbench.engine.control.background import Background
from workbench.engine.control.canonical import gather_lists, gather_numbers
from workbench.engine.control.meeting_view import MeetingView
from workbench.host.loop import asynchronous

IDLE_OPERATION = "a meeting"  # an idle rank's operation
UNFROZEN_MESSAGE = "unfrozen"  # to rank 0 after a parameter was unfrozen
POLL_SECONDS = 0.05  # seconds between two looks of an idle rank


class Rendezvous:
    """One rank's meetings, and its background between them.

    latest_step: the highest step of any rank at the last meeting
    has_ended:   whether the run has ended
    """

    def __init__(self, run: MeetingView) -> None:
        self.run = run
        self.latest_step, self.has_ended = 0, False
        self.background: Background | None = None
        self._number = 0  # meetings so far
        self.due = 0  # planned changes that are due on rank 0
        self._stays = 0  # strategies with a background so far
        self._done_ranks: set[int] = set()  # ranks that have reported to rank 0 that they are done
        self._has_reported = False
        self._has_asked = False  # after its model unfroze a parameter
        self._is_unfrozen = False  # on rank 0: whether any rank has

    @property
    def strategy(self) -> Any:
        return self.run.experiment.strategy

    @property
    def propagation(self) -> int:
        """Steps until messages have brought rank 0's news to all ranks; 0: no such messages."""
        return int(self.strategy.propagation_in(self.run.rank.size, self.run.rank.step))

    @property
    def does_train(self) -> bool:
        return bool(self.strategy.trains(self.run.rank.id, self.run.rank.size))

    def enter_strategy(self) -> None:
        """Voids the previous strategy's messages, and begins the new strategy's background."""
        run = self.run
        self.close_background()
        run.mailbox.drop_old_messages()
        if self.run.is_asynchronous:
            run.mailbox.open_door()
        if not self.strategy.lockstep and run.rank.id == 0:
            run.mailbox.connect_ranks(range(1, run.rank.size))  # to call them, and to notice when one is gone
        if not self.strategy.has_background:
            return
        self._stays += 1
        name = f"background {self._stays}"
        wire = run.peers.open_wire(name) if run.rank.size > 1 else None
        self.background = Background(
            run, name, wire, LinkShaper(run.port, run.peers.make_arrival_table(f"-{self._stays}"))
        )

    def close_background(self) -> None:
        """The background has ended."""
        background, self.background = self.background, None
        if background is not None:
            background.close()

    def retire_rank(self) -> None:
        """After a failure: cuts this rank's connections, and tries to end the background's round."""
        self.run.mailbox.cut_connections()
        if self.background is not None:
            self.background.end_round()

    def start_background(self) -> None:
        run = self.run
        if self.background is not None and not run.session.stopping and not self.has_ended:
            self.background.start_coroutine(self.strategy.background(run.rank, run.state))

    def check_background(self) -> None:
        if self.background is not None:
            self.background.raise_error()

    def check_meeting(self) -> bool:
        run = self.run
        if self.background is not None:
            self.background.note_step()
        self._ask_rank_0()
        while True:
            if run.leaving.is_set():
                raise Aborted("told to leave")
            self.check_background()
            if not self.strategy.lockstep and run.mailbox.closed_ranks:
                closed = run.rank.number(min(run.mailbox.closed_ranks))
                raise ConnectionError(f"Connection closed by peer: rank {closed}")
            if (
                not self.strategy.lockstep and run.peers.has_lost_peer()
            ):  # a peer that had sent this rank no message yet
                raise ConnectionError("Connection closed by peer")
            if self._is_wanted():
                return True
            if not self._is_idle:
                return False
            self._report_done()
            if run.host.op != IDLE_OPERATION:
                run.host.at(IDLE_OPERATION, waits=True)
            run.mailbox.await_news(POLL_SECONDS)

    def note_step(self, step: int) -> None:
        self.latest_step = step

    def assemble_ranks(self) -> None:
        run = self.run
        facts = [run.rank.step, self.run.due_count, self.has_ended, run.mailbox.meet, run.paused]
        table = gather_lists(run.control, facts)
        self.latest_step, self.due, self.has_ended = max(row[0] for row in table), table[0][1], bool(table[0][2])
        if self.propagation and not self.does_train:  # this rank may not have moved since the previous meeting
            run.rank.step = self.latest_step
        run.mailbox.plan_meeting(max(row[3] for row in table))  # now all ranks know of it
        run.set_paused(bool(table[0][4]))
        if self.background is not None:
            self.background.end_exchanges(run.control)
            gather_numbers(run.control, 0)  # all backgrounds end before a rank goes on and sends
        self._number += 1
        self._done_ranks.clear()
        self._has_reported = self._has_asked = self._is_unfrozen = False

    @property
    def _is_idle(self) -> bool:
        return asynchronous.is_idle(self.run.experiment, self.run.rank)

    def _is_wanted(self) -> bool:
        run, step = self.run, self.run.rank.step
        if self.propagation and (step == run.mailbox.meet or (not self.does_train and step < run.mailbox.meet)):
            run.rank.step = max(step, run.mailbox.meet)
            return True
        if run.credit and not self._is_idle and not self.strategy.lockstep:
            return False  # requested single steps come first
        if run.rank.id == 0:
            return self._call_ranks()
        if any(number == self._number for _, number in run.mailbox.take_numbers("come")):
            return True
        return run.paused or bool(self.strategy.lockstep and self.run.due_count)

    def _call_ranks(self) -> bool:
        """On rank 0: returns whether a meeting is wanted now, and tells the ranks that would not know."""
        run = self.run
        self._done_ranks |= {who for who, number in run.mailbox.take_numbers("done") if number == self._number}
        self._is_unfrozen |= any(number == self._number for _, number in run.mailbox.take_numbers(UNFROZEN_MESSAGE))
        ended = self._is_idle and self._done_ranks >= {r for r in range(1, run.rank.size) if self._does_rank_train(r)}
        self.has_ended = ended
        if self.propagation and not ended and not run.paused:
            planned = bool(run.due_count)
            if run.mailbox.meet < run.rank.step and (self._has_requests or (planned and not self.strategy.lockstep)):
                with run.host.alone:  # so a server lets no rank on before it knows the step
                    run.mailbox.plan_meeting(asynchronous.choose_meeting_step(run.experiment, run.rank, run.state))
            return planned and bool(self.strategy.lockstep)
        if not (ended or run.paused or self.run.due_count or self._has_requests):
            return False
        if not self.strategy.lockstep:
            for other in range(1, run.rank.size):
                run.mailbox.send_number(self._number, other, "come")
        return True

    @property
    def _has_requests(self) -> bool:
        """On rank 0: whether a person or a rank asks for a meeting."""
        return self._is_unfrozen or not self.run.inbox.empty()

    def _ask_rank_0(self) -> None:
        if self._has_asked or not self.run.usage.list_unfrozen():
            return
        self._has_asked = True
        if self.run.rank.id:
            self.run.mailbox.send_number(self._number, 0, UNFROZEN_MESSAGE)
        else:
            self._is_unfrozen = True

    def _does_rank_train(self, rank: int) -> bool:
        return bool(self.strategy.trains(rank, self.run.rank.size))

    def _report_done(self) -> None:
        if self._has_reported:
            return
        self._has_reported = True
        if self.background is not None:
            self.background.note_idle()
        if self.run.rank.id and self.does_train:
            self.run.mailbox.send_number(self._number, 0, "done")
