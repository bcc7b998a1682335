"""Makes checkpoints every `save_every` steps, and on request.

The next checkpoint is a planned change. All ranks reach it before the same step, or meet for it. They copy their state
with nothing in flight. A CheckpointWriter writes the copies while training goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from workbench.host.checkpoint.checkpoint_view import CheckpointView
from workbench.host.checkpoint.model_export import MODEL_KIND, make_model_image
from workbench.host.checkpoint.rank_image import RankImage, make_rank_image
from workbench.host.checkpoint.restore import RestoredState
from workbench.host.checkpoint.value_encoding import UnsavableValue
from workbench.host.core.planned_event import PlannedEvent
from workbench.host.observe.non_finite import is_finite
from workbench.host.passes.pipelining import drain_pipeline
from workbench.rank import Op
from workbench.settings import Change


@dataclass(frozen=True)
class CheckpointEvent(PlannedEvent):
    """Makes a checkpoint."""


@dataclass(frozen=True)
class GatherEvent(CheckpointEvent):
    """Gathers the state for another number of ranks. gather: called with each rank's loop"""

    gather: Callable[[Any], Awaitable[None]]


class WriterView(Protocol):
    """Writes images."""

    @property
    def is_busy(self) -> bool: ...
    def write_image(self, image: RankImage, about: dict[str, Any]) -> None: ...
    def close(self, patience: float | None = None) -> None: ...


class Checkpointer:
    """One rank's part in making checkpoints and in resuming.

    keeper: None without a directory for checkpoints
    saved:  the image to resume from, until then
    """

    def __init__(
        self, run: CheckpointView, keeper: WriterView | None = None, saved: RestoredState | None = None
    ) -> None:
        self.run, self.keeper, self.saved = run, keeper, saved
        self._every = 0  # the last `save_every`
        self._next: CheckpointEvent | None = None
        self._last, self._stays = -1, False  # the last step; whether requested

    # -- resuming --

    async def restore_order(self) -> None:
        """Call it before shards are cut."""
        if self.saved is not None:
            await self.saved.restore_order(self.run)

    async def restore_state(self) -> None:
        """Call it after all state is placed."""
        if self.saved is not None:
            await self.saved.restore_state(self.run)

    def finish_restore(self) -> None:
        """Call it last. Plans a checkpoint."""
        if self.saved is not None:
            self.saved.finish_restore(self.run)
            self.saved.close()
        self.saved = None
        self.plan_next()

    # -- saving --

    def plan_next(self, step: int | None = None) -> None:
        """Plans a checkpoint, behind the changes due by then. Call it after every change.

        step: rank 0's; None: this rank's, if ranks keep a common step
        """
        run, every = self.run, self.run.experiment.save_every
        if every == self._every and (self._next is not None or not every):
            return
        run.queue.drop_events(CheckpointEvent)
        self._every, self._next = every, None
        if not every:
            return
        step, steps = run.rank.step if step is None else step, run.experiment.steps
        at = (step // every + 1) * every
        if not steps or at <= steps:
            self._next = CheckpointEvent(at)
            run.queue.plan_event(self._next)

    def end(self, patience: float | None = None) -> None:
        """Waits for the writer, at most `patience` seconds."""
        if self.keeper is not None:
            self.keeper.close(patience)

    async def make_planned(self, save: CheckpointEvent) -> None:
        """Call it once all ranks have reached it."""
        if isinstance(save, GatherEvent):
            await save.gather(self.run)
        elif save is self._next:
            self._next = None
            await self.make_checkpoint(asked=False)
            self.plan_next((await self.run.gather(self.run.rank.step))[0] if self.run.is_asynchronous else None)

    async def make_checkpoint(self, asked: bool, last: bool = False) -> None:
        """Makes a checkpoint now, or records why not.

        asked: a person requested it, so it is never pruned
        last:  the run is over, so wait for an earlier one
        """
        run = self.run
        if run.layout.order[0].param.is_meta or (self.keeper is None and not asked):
            return
        step = (await run.gather(run.rank.step))[0]
        if step == self._last and (self._stays or not asked):
            return
        able = await run.gather(0 if self.keeper is None else 1 + self.keeper.is_busy)
        if 2 in able and 0 not in able and (asked or last or step == run.experiment.steps):  # wait for it
            await Op("do", self.end)
            able = [1]
        if self.keeper is None or set(able) != {1}:
            missing = "there is no run directory for it"
            busy = "the previous one is still being written; raise save_every"
            return self._mark_unsaved(missing if 0 in able else busy) if run.rank.id == 0 else None
        began = run.now
        image, reason = await self._make_image()
        refusing = await run.gather(int(image is None))
        if image is None or any(refusing):
            return (
                self._mark_unsaved(reason or "another rank's state cannot be written")
                if run.rank.id == refusing.index(1)
                else None
            )
        self._last, self._stays = step, asked
        run.sample("checkpoint_copied", run.now - began)
        run.sample("checkpoint_bytes", image.nbytes)
        self.keeper.write_image(image, self._describe_run(asked, step))

    async def _make_image(self) -> tuple[RankImage | None, str]:
        """Returns (None, reason) for state that cannot be written."""
        run = self.run
        strategy, replicas = run.experiment.strategy, run.rank.replicas
        if run.experiment.task.has_own_loop:
            try:
                return await make_model_image(run), ""
            except UnsavableValue as error:
                return None, str(error)
        await drain_pipeline(run.micros_in_flight)
        if strategy.in_flight:
            await strategy.drain(replicas, run.state)
        await strategy.recall(replicas, run.state)
        if strategy.opaque:
            await run.leave_opaque()
        try:
            if reason := run.usage.explain_change(run.model, run.layout):
                return None, reason
            image = make_rank_image(run)
            spoiled = next((name for name, n in image.entries["parameters"].items()
                            if not is_finite([image.items[n].values])), None)  # fmt: skip
            return (image, "") if spoiled is None else (None, f"{spoiled} is not finite")
        except UnsavableValue as error:
            return None, str(error)
        finally:
            if strategy.opaque:
                run.enter_opaque()

    def _describe_run(self, asked: bool, step: int) -> dict[str, Any]:
        run = self.run
        to_come = [change for change in run.queue.planned if isinstance(change, Change)]
        planned, made = (
            [change.plain() | {"at_step": change.at_step} for change in changes]
            for changes in (to_come, run.policy_runner.made)
        )
        kind = MODEL_KIND if run.experiment.task.has_own_loop else "ranks"
        trial = run.unsharder.trial if run.unsharder.sharded else None
        return {"kind": kind, "step": step, "ranks": run.rank.size, "experiment": run.experiment.plain(),
                "held_out": run.held_out, "asked": asked, "planned": planned, "made": made,
                "reads": None if trial is None else trial.to_json()}  # fmt: skip

    def _mark_unsaved(self, reason: str) -> None:
        text = f"no checkpoint was made before step {self.run.rank.step}: {reason}"
        self.run.mark("not saved", {"text": text})
