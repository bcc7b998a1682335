"""One rank's training loop on the wall clock: the engine's part of workbench/host/loop/life.py.

A rank meets its peers once per step or round to receive changes (see control/ticket.py). Its session chooses the
thread, and decides how the rank ends.
"""

from __future__ import annotations

import json
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from workbench.engine.compute.cost import Cost
from workbench.engine.compute.workers import Workers
from workbench.engine.control.located import Place
from workbench.engine.rank.changes import Turnable
from workbench.engine.rank.crashing import crash
from workbench.engine.rank.evaluate import known_evaluated, mean_evaluated
from workbench.engine.rank.forming import confirm
from workbench.engine.rank.preempting import leave
from workbench.engine.rank.resizing import resize
from workbench.engine.record.growth import Growth
from workbench.engine.wire.collectives import Aborted
from workbench.host.core.answers import KNOWN, Answer, Done, remember
from workbench.host.elastic.reentry import Came
from workbench.host.observe.evaluating import Evaluated
from workbench.host.reconfigure import changes
from workbench.host.sharding.usage import Usage
from workbench.host.transfer import residual
from workbench.rank import Bucket, Op
from workbench.record.tidy import Tidy
from workbench.settings import Change

if TYPE_CHECKING:
    from workbench.engine.rank.session import Session

ANSWERED = ("change", "resize")  # kinds of requests whose sender waits for an answer
SHORT = 1e-3  # seconds; a shorter wait for the next step gets no row in the record


class Training(Turnable):
    """One rank that trains. The constructor waits for the other ranks, and refuses what cannot be trained here.

    begun: whether all state is in place, so that the other ranks could go on if one is lost
    """

    begun = False
    _stale = False  # whether all ranks have evaluated since the last ticket

    def __init__(self, session: Session, before: Training | None = None) -> None:
        super().__init__(session, before)
        self.lengths: deque[float] = deque([0.0], maxlen=16)  # of the last steps, in seconds
        self.workers = Workers(self)
        self.asked: list[dict[str, Any]] = []  # received and not obeyed yet
        self.done: Done = {}  # answers to recent requests
        self.cost, self.tidy = Cost(session.record, self.clock), Tidy()
        self.growth = Growth(session.member, lambda found: session.mark("memory grows", found))
        self._since: tuple[float, Any] | None = None  # when the wait for the next step began, on both watches

    def begin(self) -> None:
        """Enters the first strategy as a switch of strategy does."""
        self.set_fabric(None, self.experiment)
        residual.begin(self)
        changes.note_idle(self)
        if self.saving.saved is not None:
            self.saving.saved.begin(self)
        self.enter(None, self.experiment)
        if self.experiment.strategy.opaque:
            self.enter_opaque()
        self.choose_lane()
        self.mark_start()

    def locate_script(self) -> Place | None:
        """Returns where the user's own training loop is; None without one."""
        return None

    @property
    def ended(self) -> bool:
        return self.session.stopping or self.meeting.over

    @property
    def drawn(self) -> int:
        return self.batches.taken

    @property
    def met(self) -> bool:
        return self.host.met

    @property
    def called_for(self) -> int:
        return self.meeting.due

    async def live(self) -> None:
        self.cost.begin()
        await super().live()

    async def live_on(self, came: Came) -> None:
        self.cost.begin()
        await super().live_on(came)

    async def make(self) -> int:
        host, strategy = self.host, self.experiment.strategy
        self.lane.step = self.rank.step
        self.session.profiler.begin(self.rank.step)
        host.begin_step(strategy.opaque or self._hears_each_step)
        since, began = self.clock.now(), self._begun()
        made = await self.drive_step(strategy)
        if not made:
            return 0
        host.watch.write(self.rank.step, "step", type(strategy).__name__, began, began, host.watch.now(), 0)
        await Op("do", partial(host.timing.close_step, self.finite.told))
        self.lengths.append(self.clock.now() - since)  # includes the host's waits for its chip
        self.session.profiler.end(made)
        self.cost.due(self.rank.step)
        self.tidy.due()
        self.growth.look(self.rank.step)
        return made

    def _begun(self) -> Any:
        """Returns when this step began, including the wait for it."""
        return self.end_wait()

    def end_wait(self) -> Any:
        """Records how long this rank has waited for the next step. Returns when that step began."""
        now, since, self._since = self.host.watch.now(), self._since, None
        if since is None or self.clock.now() - since[0] < SHORT:
            return now
        self.host.watch.write(self.rank.step, "wait", "next step", since[1], since[1], now, 0)
        return since[1]

    @property
    def _hears_each_step(self) -> bool:
        """Whether ranks take a ticket each step, because no meeting of replicas brings requests."""
        size = self.rank.replicas.size
        return bool(self.rank.mesh.inside) and (size == 1 or self.experiment.strategy.propagation(size) > 0)

    @property
    def usage(self) -> Usage:
        return self.host.usage

    @property
    def reorders(self) -> bool:
        return self.host.hooks.knows_order

    async def learned(self) -> list[str]:
        return await self.agreed(self.host.hooks.take_order())

    async def agreed(self, names: list[str]) -> list[str]:
        found: list[str] = await Op("do", partial(self.said_by_first, names))
        return found

    async def relay_in(self, names: list[str]) -> None:
        await Op("do", partial(self.adopt, names))

    def moved(self, made: int) -> None:
        self.before_update()  # if the step made no update
        self.host.end_step()
        if self.credit:
            self.credit = max(0, self.credit - made)
            self.paused = self.credit == 0

    async def crash(self, mine: bool) -> None:
        await Op("do", partial(crash, self.session, mine))

    async def finish(self) -> None:
        await self.leave_opaque()
        await Op("do", partial(self.host.timing.catch_up, self.finite.told))
        await Op("do", self.saving.end)
        self.host.at("wait for all ranks to end", waits=True)
        await Op("do", self.peers.await_ends)
        self.say("stopped" if self.session.stopping else "done")

    def before_update(self) -> None:
        """Asks for the ticket if one is due, so that it overlaps the update."""
        if self.host.met and not self.tickets.asked:
            if self.tickets.raised(self.lane.completed) or self.host.lanes.aside:  # other lanes have no flag
                self.tickets.ask()

    async def evaluate(self, together: bool) -> None:
        began, self.lane.step = self.now, self.rank.step
        self.host.at("evaluate")
        fully = self.host.parts.fully
        if fully is not None:
            with self.reading.passing("evaluation"):
                await fully.fetch()
        await super().evaluate(together)
        if fully is not None:
            fully.let_go()
        self.evaluated = max(self.evaluated, self.now - began)
        self._stale = together  # requests made during evaluation are obeyed before the next step

    async def mean_evaluated(self) -> Evaluated:
        return await Op("do", partial(mean_evaluated, self))

    async def known_evaluated(self, known: list[Bucket]) -> Evaluated:
        return await Op("do", partial(known_evaluated, self, known))

    async def lay_out(self) -> None:
        await super().lay_out()
        self.begun = True

    async def formed(self) -> None:
        await Op("do", partial(confirm, self.session))

    async def boundary(self) -> None:
        self.host.at("between two steps")
        await super().boundary()

    async def called(self) -> bool:
        return await Op("do", self.meeting.called)

    async def assemble(self) -> None:
        await Op("do", self.meeting.assemble)

    def go_on(self) -> None:
        self.meeting.go_on()

    async def obey(self, change: Change) -> bool:
        self.lane.step = self.rank.step
        return await super().obey(change)

    async def listen(self, apart: bool) -> None:
        if self.pocket is not None:
            requests, self.pocket = self.pocket, None
            await self._heed(requests)
        elif apart or self.tickets.asked or self.rank.step == 0 or self.control is None:
            if not self.tickets.asked:
                self.tickets.ask()
            since, quiet = (self.clock.now(), self.host.watch.now()), not apart
            while self.tickets.waiting > self.experiment.partition.ahead(0):
                requests = await Op("do", self.tickets.take)
                quiet = quiet and not requests
                await self._heed(requests)
            self.tickets.asked = False
            self._since = since if quiet and self.rank.step else None
        if self._stale and not (apart or self.experiment.partition.ahead(0)):
            await self._heed(await Op("do", partial(self._hear, 0.0)))
        self._stale = False
        if self.paused and not self.session.stopping:
            await Op("do", partial(self.host.timing.catch_up, self.finite.told))
            self.say("paused")
            self._since = None
            while self.paused and not self.session.stopping:
                await self._heed(await Op("do", partial(self._hear, 0.5)))
            self.say("stopping" if self.session.stopping else "running")

    @property
    def unheeded(self) -> list[dict[str, Any]]:
        """The requests that have left the inbox and that this rank has not obeyed yet."""
        return [*self.asked, *(self.pocket or []), *self.tickets.unheard]

    def _hear(self, wait: float) -> list[dict[str, Any]]:
        """Returns the requests of the next ticket, equal on every rank. Rank 0 waits up to `wait` seconds for one."""
        if not self.tickets.asked:
            self.tickets.ask(wait)
        return self.tickets.take()

    async def _heed(self, requests: list[dict[str, Any]]) -> None:
        if self.leaving.is_set():  # a run of one rank has no wire that would raise this
            raise Aborted("told to leave")
        self.asked = requests
        self.asked = sorted(requests, key=lambda what: what["kind"] != KNOWN)
        while self.asked:
            what, self.answer = self.asked[0], None
            if what["kind"] in ANSWERED and what.get("id") in self.done:  # a repeated request
                self._answer_again(what["id"])
                del self.asked[0]
                continue
            match what["kind"]:
                case "change":
                    await self.obey(Change.read(what))
                case "pause":
                    self.paused, self.credit = True, 0
                case "resume":
                    self.paused, self.credit = False, 0
                    self.finite.forget()
                case "step":
                    self.paused, self.credit = False, int(what.get("n", 1))
                    self.finite.forget()
                case "resize":
                    await resize(self, tuple(what["members"]), what.get("id", ""))
                case "preempt" if not self.session.stopping:
                    await leave(self, what["members"], what.get("id", ""))
                case "roll back":
                    await Op("do", partial(self.host.timing.catch_up, self.finite.told))
                    if not await self.back.go(int(what.get("step", 0))):
                        self.paused, self.credit = True, 0
                    self.ledger.stir()
                case kind if kind == KNOWN:
                    self.answer = Answer(*what["answer"])
                case "checkpoint":
                    await self.saving.make(asked=True)
                case "stop":
                    self.session.stopping = True
            remember(self.done, what.get("id", ""), self.answer)
            del self.asked[0]
            if what["kind"] == "change":
                self.obeyed_one()
                await self._fall()

    def _answer_again(self, name: str) -> None:
        """Records an answer again, because the rank that recorded it may be lost with its last rows."""
        if self.rank.id == 0 and (known := self.done[name]):
            answer = Answer(*known)
            self.record.mark(answer.step, answer.name, answer.t, json.dumps({**answer.detail, "again": True}))

    def close(self) -> None:
        """Gives back all but the wires, which the session closes."""
        self.cost.tell(self.rank.step)
        self.host.watch.salvage(self.rank.step)
        self.leaving.set()  # for threads that still wait
        self.saving.end(patience=5.0)
        self.meeting.leave()
        self.host.hooks.detach()
        self.unwrap()
        self.host.lanes.close()
        self.tickets.close()
        self.host.usage.close()
        self.mailbox.close()
        self.peers.store = None
