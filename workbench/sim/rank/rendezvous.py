"""Meetings of virtual ranks that do not meet in every round.

The rules are the engine's, see [Note: Two ways of hearing] in engine/control/rendezvous.py. Here rank 0 announces a
meeting at once, without messages.
"""

from __future__ import annotations

from workbench.host.loop import asynchronous
from workbench.rank import Op
from workbench.sim.clock.fiber import Fiber
from workbench.sim.rank.changes import Reconfigurable


class Rendezvous:
    """A rank's meetings, and its background and workers between them."""

    def __init__(self, run: Reconfigurable) -> None:
        self.run = run
        self.background: Fiber | None = None
        self._awaiting: Fiber | None = None  # waits for workers or the background
        self._workers = 0

    async def run_workers(self) -> None:
        run, strategy, rank = self.run, self.run.experiment.strategy, self.run.rank
        self._workers = strategy.workers
        for worker in range(strategy.workers):
            mine = type(rank)(rank.id, rank.size)
            mine.__dict__.update(rank.__dict__, worker=worker, _groups={})
            name = f"worker {worker}"
            Fiber(run.host, strategy.step(mine, run.state), name, f"{name} ").resume(None)
        if self._workers:
            await Op("park", self._store_waiting, "its workers")

    async def check_meeting(self) -> bool:
        """Whether a meeting takes place now. An idle rank waits for one."""
        world, strategy, step = self.run.world, self.run.experiment.strategy, self.run.rank.step
        if world.missed:
            await Op("park", lambda fiber: None, "those who are left")
        due = bool(self.run.due_count)
        if strategy.lockstep:
            return due
        idle = asynchronous.is_idle(self.run.experiment, self.run.rank)
        propagation = strategy.propagation_in(self.run.rank.size, step)
        if idle:
            self.run.host.rounds.note_idle()
            world.note_idle(self.run.rank.id, step)
        if not world.wanted and self.run.usage.list_unfrozen():
            world.request_meeting()
        while True:
            if self.run.rank.id == 0 and (due or world.wanted) and world.meets < 0:
                world.call_meeting(asynchronous.choose_meeting_step(self.run.experiment, self.run.rank, self.run.state))
            if world.meets >= 0 and (not propagation or step == world.meets or idle):
                return True
            if not idle:
                return False
            await Op("park", world.add_listener, "a meeting or the end")

    async def assemble_ranks(self) -> None:
        """Waits for all ranks and the end of their backgrounds."""
        world = self.run.world

        def joint(steps: list[int]) -> list[None]:
            world.begin_meeting(max(steps), self.run.queue.count_due(steps[0]))
            return [None] * len(steps)

        propagation = self.run.experiment.strategy.propagation_in(world.size, self.run.rank.step)
        await Op("together", "meet between steps", self.run.rank.step, joint, 0.0)
        if propagation and self.run.rank.role == "server":  # a server makes no steps
            self.run.rank.step = world.latest
        await self.await_background()
        await self.run.gather(0)

    async def await_background(self) -> None:
        self.run.host.begin_leaving()
        if self.background is not None:
            await Op("park", self._store_waiting, "its background")
        self.run.host.end_leaving()

    def start_background(self) -> None:
        strategy = self.run.experiment.strategy
        if self.background is not None or not strategy.has_background or self.run.world.over:
            return
        host = self.run.host
        host.begin_background()
        coro, lane = strategy.background(self.run.rank, self.run.state), host.open_lane("background ")
        self.background = Fiber(host, coro, "background", "background ", lane=lane)
        host.clock.resume_at(host.clock.now, self.background)

    def _store_waiting(self, fiber: Fiber) -> None:
        self._awaiting = fiber

    def handle_end(self, fiber: Fiber) -> None:
        if fiber.waiter is not None:
            return fiber.waiter.answer(fiber.value, self.run.host.clock.now)
        if fiber is self.background:
            self.background = None
        elif fiber.origin.startswith("worker"):
            self._workers -= 1
        if self._awaiting is not None and not self._workers and (not self.run.host.leaving or self.background is None):
            waiting, self._awaiting = self._awaiting, None
            waiting.wake()
