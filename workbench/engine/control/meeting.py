"""How ranks that do not meet in every round come together, so that a change still acts on all of them.

[Note: Two ways of hearing] Some ranks exchange with their neighbours only (`propagation` > 0). Then every message
carries the step at which all ranks meet. Rank 0 chooses it so late that every rank knows it by then. Other ranks keep
no common step (`lockstep` = False). Then rank 0 calls, and each rank comes at its next boundary. At a meeting the steps
stand still. The backgrounds receive what was sent and end. They begin again when the ranks go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.engine.control.background import Background
from workbench.engine.control.canonical import all_equal, gathered
from workbench.engine.wire.collectives import Aborted
from workbench.engine.wire.shaping import Shaper
from workbench.host.loop import meeting

if TYPE_CHECKING:
    from workbench.engine.rank.setup import Parts

IDLE = "a meeting"  # an idle rank's operation
UNFROZEN = "unfrozen"  # the message to rank 0 after a parameter was unfrozen
LOOK = 0.05  # seconds between two looks of an idle rank


class Meeting:
    """One rank's meetings, and its background between them.

    latest: the highest step of any rank at the last meeting
    over:   whether the run has ended
    """

    def __init__(self, run: Parts) -> None:
        self.run = run
        self.latest, self.over = 0, False
        self.background: Background | None = None
        self._number = 0  # meetings so far
        self.due = 0  # planned changes that are due on rank 0
        self._stays = 0  # strategies with a background so far
        self._done: set[int] = set()  # ranks that have reported to rank 0 that they are done
        self._told = False
        self._asks = False  # whether this rank has asked for a meeting, after its model unfroze a parameter
        self._asked = False  # on rank 0: whether any rank has

    @property
    def strategy(self) -> Any:
        return self.run.experiment.strategy

    @property
    def propagation(self) -> int:
        """Steps until all ranks know through messages what rank 0 announces; 0: no such messages."""
        return int(self.strategy.propagation_in(self.run.rank.size, self.run.rank.step))

    @property
    def trains(self) -> bool:
        return bool(self.strategy.trains(self.run.rank.id, self.run.rank.size))

    def enter(self) -> None:
        """Voids the previous strategy's messages, and gives the new strategy's background its thread and wire."""
        run = self.run
        self.leave()
        run.mailbox.turn_page()
        if self.run.apart:
            run.mailbox.open()
        if not self.strategy.lockstep and run.rank.id == 0:
            run.mailbox.reach(range(1, run.rank.size))  # to call them, and to notice when one is gone
        if not self.strategy.has_background:
            return
        self._stays += 1
        name = f"background {self._stays}"
        wire = run.peers.open(name) if run.rank.size > 1 else None
        self.background = Background(run, name, wire, Shaper(run.port, run.peers.arrival_table(f"-{self._stays}")))

    def leave(self) -> None:
        """Gives back the thread and the wire of the background, which has ended."""
        background, self.background = self.background, None
        if background is not None:
            background.close()

    def retire(self) -> None:
        """Ends this rank's part after a failure: cuts its connections, and ends the background's round if possible."""
        self.run.mailbox.cut()
        if self.background is not None:
            self.background.retire()

    def go_on(self) -> None:
        """Lets the ranks go on, each at its own pace."""
        run = self.run
        if self.background is not None and not run.session.stopping and not self.over:
            self.background.go(self.strategy.background(run.rank, run.state))

    def check(self) -> None:
        """Raises the error of this rank's background, if any."""
        if self.background is not None:
            self.background.check()

    def called(self) -> bool:
        """Returns whether there is a meeting now. An idle rank waits for one."""
        run = self.run
        if self.background is not None:
            self.background.moved()
        self._ask()
        while True:
            if run.leaving.is_set():
                raise Aborted("told to leave")
            self.check()
            if not self.strategy.lockstep and run.mailbox.gone:
                raise ConnectionError(f"Connection closed by peer: rank {run.rank.number(min(run.mailbox.gone))}")
            if not self.strategy.lockstep and run.peers.parted():  # a peer that had sent this rank no message yet
                raise ConnectionError("Connection closed by peer")
            if self._wanted():
                return True
            if not self._idle:
                return False
            self._say_done()
            if run.host.op != IDLE:
                run.host.at(IDLE, waits=True)
            run.mailbox.pause(LOOK)

    def assemble(self) -> None:
        """Waits for all ranks, and for their backgrounds to end."""
        run = self.run
        facts = [run.rank.step, self.run.due, self.over, run.mailbox.meet, run.paused]
        table = gathered(run.control, facts)
        self.latest, self.due, self.over = max(row[0] for row in table), table[0][1], bool(table[0][2])
        if self.propagation and not self.trains:  # this rank may have stood here since the previous meeting
            run.rank.step = self.latest
        run.mailbox.meet = max(row[3] for row in table)  # now all ranks know of a meeting that some knew
        run.paused = bool(table[0][4])
        run.credit = 0 if run.paused else run.credit
        if self.background is not None:
            self.background.drain(run.control)
            all_equal(run.control, 0)  # no rank goes on, and sends, before all backgrounds have ended
        self._number += 1
        self._done.clear()
        self._told = self._asks = self._asked = False

    @property
    def _idle(self) -> bool:
        return meeting.idle(self.run.experiment, self.run.rank)

    def _wanted(self) -> bool:
        run, step = self.run, self.run.rank.step
        if self.propagation and (step == run.mailbox.meet or (not self.trains and step < run.mailbox.meet)):
            run.rank.step = max(step, run.mailbox.meet)
            return True
        if run.credit and not self._idle and not self.strategy.lockstep:
            return False  # requested single steps come first
        if run.rank.id == 0:
            return self._call()
        if any(number == self._number for _, number in run.mailbox.said("come")):
            return True
        return run.paused or bool(self.strategy.lockstep and self.run.due)

    def _call(self) -> bool:
        """On rank 0: returns whether a meeting is wanted now, and tells the ranks that would not know."""
        run = self.run
        self._done |= {who for who, number in run.mailbox.said("done") if number == self._number}
        self._asked |= any(number == self._number for _, number in run.mailbox.said(UNFROZEN))
        ended = self._idle and self._done >= {r for r in range(1, run.rank.size) if self._trains(r)}
        self.over = ended
        if self.propagation and not ended and not run.paused:
            planned = bool(run.due)
            if run.mailbox.meet < run.rank.step and (self._wants or (planned and not self.strategy.lockstep)):
                with run.host.alone:  # so a server lets no rank on before it knows the step
                    run.mailbox.meet = meeting.named(run.experiment, run.rank, run.state)
            return planned and bool(self.strategy.lockstep)
        if not (ended or run.paused or self.run.due or self._wants):
            return False
        if not self.strategy.lockstep:
            for other in range(1, run.rank.size):
                run.mailbox.say(self._number, other, "come")
        return True

    @property
    def _wants(self) -> bool:
        """On rank 0: whether a person or a rank asks for a meeting."""
        return self._asked or not self.run.inbox.empty()

    def _ask(self) -> None:
        """Asks rank 0 for a meeting if this rank's model has unfrozen a parameter."""
        if self._asks or not self.run.usage.found():
            return
        self._asks = True
        if self.run.rank.id:
            self.run.mailbox.say(self._number, 0, UNFROZEN)
        else:
            self._asked = True

    def _trains(self, rank: int) -> bool:
        return bool(self.strategy.trains(rank, self.run.rank.size))

    def _say_done(self) -> None:
        if self._told:
            return
        self._told = True
        if self.background is not None:
            self.background.idle()
        if self.run.rank.id and self.trains:
            self.run.mailbox.say(self._number, 0, "done")
