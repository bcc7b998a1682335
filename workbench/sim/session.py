"""One run on one virtual rank: the training loop as a coroutine, with the same rules as the engine's.

It takes the changes that are due before each step, steps, evaluates. What it cannot do itself it asks of its host
with the same kind of Op that a strategy uses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from workbench import changes
from workbench.canonical import check_same, state_hash
from workbench.experiment import Experiment
from workbench.fabric.load import pauses
from workbench.knobs import Change, KnobError, in_words, to_plain
from workbench.ops import Op
from workbench.sim.costs import Costs
from workbench.sim.fiber import Fiber
from workbench.sim.host import Host
from workbench.sim.tensors import evaluated, mean_evaluated

if TYPE_CHECKING:
    from workbench.sim.world import World


class Session:
    """A run as one virtual rank lives it. Part of it is what a change sees (workbench.changes.Changing)."""

    def __init__(self, world: World, index: int, experiment: Experiment, body: Any) -> None:
        self.world, self.body = world, body
        self.host = Host(world, index, experiment, body)
        self.rank = self.host.rank
        self.rank.lr = experiment.lr
        self.planned = list(world.planned)
        self.state: Any = None
        self.flushing = False
        self.pending_pause = 0.0
        self.background: Fiber | None = None
        self.host.ended = self._ended
        self._awaiting: Fiber | None = None  # waits for workers or for the background to end
        self._workers = 0
        self.set_fabric(None, experiment)
        changes.set_compressor(self, None, experiment)
        self.choose_lane()

    # -- the life of a rank --

    async def live(self) -> None:
        """The whole run on this rank."""
        self.mark("start", {"host": "simulated", "device": "sizes only" if self.body.layout.buckets[0].data.is_meta
                            else "cpu", "parameters": self.layout.numel, "nbytes": self.layout.nbytes})
        self.mark_buckets()
        self.enter(self.experiment.strategy)
        await self._evaluate()
        self._say("running")
        while True:
            await self._boundary()
            if self.rank.step >= self.experiment.steps:
                break
            await self._step()
            if self.experiment.eval_every and self.rank.step % self.experiment.eval_every == 0:
                await self._evaluate()
        if self.experiment.strategy.has_background:
            await self.leave(self.experiment.strategy)
        self._say("done")

    async def _step(self) -> None:
        host, strategy, clock = self.host, self.experiment.strategy, self.host.clock
        host.met = False
        if self.pending_pause:
            seconds, self.pending_pause = self.pending_pause, 0.0
            await Op("stand", seconds)
            self.mark("fault", {"text": f"stood still for {seconds:.1f} s"})
        began = clock.now
        if strategy.workers > 1:
            await self._all_workers()
        else:
            await strategy.step(self.rank, self.state)
        if (costs := self.world.costs) is not None and costs.between:
            await Op("stand", costs.between)
        host.span("step", type(strategy).__name__, began, began, clock.now, 0)
        if losses := self.body.losses:
            self.world.record.sample(self.rank.index, self.rank.step, "loss", clock.now, sum(losses) / len(losses))
            losses.clear()
        if self.flushing and host.met:
            changes.flushed(self)
        if self.body.learn():
            self.mark_buckets()
        self.rank.step += 1

    async def _all_workers(self) -> None:
        """Every worker of this rank makes the step; it is over when all have."""
        strategy, rank = self.experiment.strategy, self.rank
        self._workers = strategy.workers
        for worker in range(strategy.workers):
            mine = type(rank)(rank.index, rank.size)
            mine.__dict__.update(rank.__dict__, worker=worker)
            Fiber(self.host, strategy.step(mine, self.state), f"worker {worker}", f"worker {worker} ").resume(None)
        if self._workers:
            await Op("park", self._await, "its workers")

    async def _boundary(self) -> None:
        while self.planned and self.planned[0].at_step <= self.rank.step:
            await self._turn(self.planned.pop(0))

    async def _turn(self, change: Change) -> None:
        value = to_plain(change.value)
        about = {"id": f"planned {change.at_step}", "path": change.path, "value": value, "requested_at": None}
        try:
            wanted = self.experiment.turn(change.path, change.value)
            if reason := refused(wanted, self.world.costs):
                raise KnobError(reason)
        except KnobError as reason:
            if self.rank.index == 0:
                self.mark("refused", {**about, "reason": str(reason)})
            return
        await changes.apply(self, wanted)
        if self.rank.index == 0:
            self.mark("change", {**about, "text": f"{change.path} = {in_words(value)}"})

    async def _evaluate(self) -> None:
        """The held-out loss of the mean model, outside step time; with sizes only just the meeting."""
        began = self.host.clock.now
        if self.experiment.strategy.lockstep:
            numbers, drift = await Op("together", "evaluate", self.body, self._mean, self._costs_of_evaluation())
        else:
            numbers, drift = self._alone()
        record, step, now = self.world.record, self.rank.step, self.host.clock.now
        self.host.span("eval", "evaluate", began, began, now, 0)
        if self.world.real:
            record.sample(self.rank.index, step, "drift", now, drift)
        for name, value in numbers.items():
            record.sample(self.rank.index, step, "held_out" if name == "loss" else f"held_out:{name}", now, value)

    def _costs_of_evaluation(self) -> float:
        return self.world.costs.evaluate if self.world.costs else 0.0

    def _mean(self, bodies: list[Any]) -> list[Any]:
        if not self.world.real:
            return [({}, 0.0)] * len(bodies)
        numbers, drifts = mean_evaluated(bodies)
        return [(numbers if r == 0 else {}, drift) for r, drift in enumerate(drifts)]

    def _alone(self) -> tuple[dict[str, float], float]:
        if not self.world.real or self.rank.index:
            return {}, 0.0
        return evaluated(self.body.learner.evaluate, self.body.model), 0.0

    def _await(self, fiber: Fiber) -> None:
        self._awaiting = fiber

    def _ended(self, fiber: Fiber) -> None:
        """A worker or the background has returned."""
        if fiber is self.background:
            self.background = None
        elif fiber.origin.startswith("worker"):
            self._workers -= 1
        if self._awaiting is not None and not self._workers and (not self.host.leaving or self.background is None):
            waiting, self._awaiting = self._awaiting, None
            waiting.on = None
            waiting.resume(None)

    # -- what a change reaches into --

    @property
    def experiment(self) -> Experiment:
        return self.host.experiment

    @experiment.setter
    def experiment(self, wanted: Experiment) -> None:
        self.host.experiment = wanted

    @property
    def layout(self) -> Any:
        return self.body.layout

    @property
    def model(self) -> Any:
        return self.body.model

    @property
    def optimizer(self) -> Any:
        return self.body.optimizer

    def set_fabric(self, was: Experiment | None, wanted: Experiment) -> None:
        self.pending_pause += pauses(was.fabric.faults if was else (), wanted.fabric.faults, self.rank.index)

    def choose_lane(self) -> None:
        """Children run as on the engine's own thread; what their codec costs is looked up anew."""
        costs = self.world.costs
        self.host.kinds = costs.stretches(self.rank.compressor) if costs else ()

    def restart_data(self) -> None:
        self.body.restart_data(self.experiment.batch, self.experiment.seed, self.rank.step)

    def rebucket(self, bucket_mb: float) -> None:
        self.body.rebucket(bucket_mb)
        self.mark_buckets()

    async def leave(self, strategy: Any) -> None:
        self.host.leaving = True
        await strategy.leave(self.rank, self.state)
        if self.background is not None:
            await Op("park", self._await, "its background")
        self.host.leaving = False

    def enter(self, strategy: Any) -> None:
        self.rank.role = "trainer" if strategy.trains(self.rank.index, self.rank.size) else "server"
        self.state = strategy.init(self.rank)
        if strategy.has_background:
            self.background = Fiber(self.host, strategy.background(self.rank, self.state), "background", "background ")
            self.background.lane = self.host.lane("background ")
            self.host.clock.at(self.host.clock.now, self.background)

    def enter_opaque(self) -> None:
        raise AssertionError("refused before it starts")

    leave_opaque = enter_opaque

    @contextmanager
    def switching(self, was: Experiment, wanted: Experiment) -> Iterator[None]:
        began, sent = self.host.clock.now, self.host.sent
        yield
        name = type(wanted.strategy).__name__
        self.host.span("switch", name, began, began, self.host.clock.now, self.host.sent - sent)

    async def agree(self, number: int | None, what: str) -> None:
        """Raises Disagreement unless all ranks have the same number (None: hash of the parameters)."""
        if number is None:
            number = state_hash(self.layout) if self.world.real else 0

        def check(numbers: list[int]) -> list[None]:
            check_same(numbers, what)
            return [None] * len(numbers)

        await Op("together", what, number, check, 0.0)

    # -- saying --

    def mark(self, name: str, detail: dict[str, Any]) -> None:
        self.world.record.mark(self.rank.index, self.rank.step, name, self.host.clock.now, json.dumps(detail))

    def mark_buckets(self) -> None:
        if self.rank.index == 0:
            self.mark("buckets", {"nbytes": [b.nbytes for b in self.layout.buckets]})

    def _say(self, phase: str) -> None:
        if self.rank.index == 0:
            self.mark("state", {"state": phase, "detail": ""})


def refused(e: Experiment, costs: Costs | None) -> str | None:
    """Why `e` cannot be simulated, in a sentence that says what would do; or None."""
    name = type(e.strategy).__name__
    if e.strategy.opaque:
        return (
            f"strategy={name}: its exchange is torch's own and only the wall clock can tell what it takes; simulate "
            f"DDP, which sends the same bytes"
        )
    if not e.pace and costs is None:
        return (
            "pace=0: nothing says how long compute lasts; give costs=Costs.measured(run) of a run that was recorded, "
            "or an experiment with a pace in ms"
        )
    return None
