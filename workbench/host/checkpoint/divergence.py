"""Takes a run back to a checkpoint after a loss that is not finite or has diverged.

Ranks restore the model and the state of optimizer, strategy and compressor. Step numbers and data continue, else the
same examples would bring the same loss.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from workbench.host.checkpoint.checkpoint_view import CheckpointView
from workbench.host.checkpoint.restore import MISFIT_ERRORS, RestoredState
from workbench.host.passes.pipelining import drain_pipeline
from workbench.rank import Op
from workbench.settings import KnobError

MAX_RETURNS = 3  # to one checkpoint
MAX_CHECKPOINTS = 4  # to try, newest first
FIXED_SETTINGS = (
    "strategy",
    "partition",
    "compressor",
    "optimizer",
    "bucket_mb",
    "ranks",
)  # must be unchanged


class StoreView(Protocol):
    """A run's checkpoints."""

    def list_steps(self) -> list[int]:
        """Lists complete checkpoints' steps, newest first."""

    def open_checkpoint(self, step: int, rank: int) -> tuple[dict[str, Any], RestoredState]:
        """Returns settings and a rank's image. Raises KnobError if unreadable."""


class DivergenceRecovery:
    """One rank's part in rollbacks."""

    def __init__(self, run: CheckpointView, kept: StoreView) -> None:
        self.run, self.kept = run, kept
        self._since = -1  # where it last went back
        self._to, self._times = -1, 0  # the last checkpoint; returns to it

    async def restore_checkpoint(self, met: int) -> bool:
        """Takes all ranks back after a loss in step `met`. Returns False, with a Mark, if it cannot."""
        run = self.run
        if met < self._since:
            return True
        await Op("do", run.checkpointer.end)
        listed = json.loads(
            await run.broadcast_text(json.dumps(self.kept.list_steps()[:MAX_CHECKPOINTS]) if run.rank.id == 0 else "")
        )
        reason = "there is no checkpoint yet; set save_every, or make one with lab.checkpoint()"
        for step in listed:
            if step == self._to and self._times >= MAX_RETURNS:
                reason = f"going back to the checkpoint before step {step} did not help in {MAX_RETURNS} attempts"
                break
            saved, mine = self._open_image(step)
            every = await run.gather(int(bool(mine)))
            if saved is not None and not any(every):
                await self._restore_image(saved, step)
                return True
            if any(every) and run.rank.id == 0:
                reason = mine or f"rank {every.index(1)} cannot resume from the checkpoint before step {step}"
            if saved is not None:
                saved.close()
        if run.rank.id == 0:
            text = f"no rank went back at step {run.rank.step}: {reason}"
            run.mark("not rolled back", {"text": text})
        return False

    def _open_image(self, step: int) -> tuple[RestoredState | None, str]:
        run, saved, which = self.run, None, f"the checkpoint before step {step}"
        try:
            then, saved = self.kept.open_checkpoint(step, run.rank.id)
            now = run.experiment.plain()
            other = [name for name in FIXED_SETTINGS if then.get(name) != now.get(name)]
            if other:
                raise KnobError(f"{which} was made with another {other[0]}")
            if run.flushing or saved.entries["flushing"]:
                raise KnobError(f"{which} or this step is one of the steps that still send a residual")
        except (KnobError, *MISFIT_ERRORS) as error:
            if saved is not None:
                saved.close()
            return None, str(error)
        return saved, ""

    async def _restore_image(self, saved: RestoredState, step: int) -> None:
        run = self.run
        strategy, replicas = run.experiment.strategy, run.rank.replicas
        await drain_pipeline(run.micros_in_flight)
        if strategy.in_flight or strategy.late_update:
            await strategy.drain(replicas, run.state)
        await saved.restore_order(run)
        await saved.restore_state(run, anew=False)
        saved.close()
        run.non_finite_guard.forget_losses()
        self._since = run.rank.step
        self._times = self._times + 1 if step == self._to else 1
        self._to = step
        if run.rank.id == 0:
            again = f", for the {('second', 'third')[self._times - 2]} time" if self._times > 1 else ""
            text = (
                f"all ranks went back to the checkpoint before step {step} and continued with step {self._since}{again}"
            )
            run.mark("rolled back", {"to": step, "step": self._since, "times": self._times, "text": text})
