"""Leads the steps of a rank: its task does, or a user's own loop."""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from typing import Any

from workbench.engine.control.script_position import ScriptLine, locate_script
from workbench.engine.rank.model_view import ModelView, ScriptRankView
from workbench.engine.script.interception import LoopEnded, hook_name
from workbench.engine.script.loop import ScriptLoop
from workbench.experiment import Experiment
from workbench.host.checkpoint.model_export import average_model
from workbench.rank import Op
from workbench.settings import KnobError

REFUSED_REQUESTS = {
    "resize": "the script's loop keeps the ranks that it started with",
    "roll back": "the loop cannot go back",
    "preempt": "the script's loop keeps the ranks that it started with, so the run ends",
}


class TaskLead:
    """The rank makes the steps itself."""

    def __init__(self, run: ModelView) -> None:
        self._run = run

    def locate_script(self) -> ScriptLine | None:
        return None

    def require_followed(self, wanted: Experiment) -> None:
        """No loop limits the experiment."""

    def find_step_begin(self) -> Any:
        return self._run.end_wait()

    async def check_loop_end(self, over: bool) -> bool:
        return over

    async def drive_step(self, step: Coroutine[Op, Any, Any]) -> int:
        return await Op("drive", step) or 1

    def accept_requests(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return requests

    async def finish_loop(self) -> None:
        """There is no loop."""

    def close(self) -> None:
        """There is no loop."""


class ScriptLead:
    """A user's loop makes the steps. See [Note: Hand in hand] in engine/script/loop.py."""

    def __init__(self, run: ScriptRankView, loop: ScriptLoop) -> None:
        self._run, self.loop = run, loop

    def locate_script(self) -> ScriptLine | None:
        return locate_script(self.loop.thread_id)

    def require_followed(self, wanted: Experiment) -> None:
        """Raises KnobError if the script's communication hook would not exchange the gradients under `wanted`."""
        if self.loop.ddp_shim is None or self.loop.ddp_shim.comm_hook is None:
            return
        hook = hook_name(self.loop.ddp_shim.comm_hook)
        name, said = type(wanted.strategy).__name__, f"{self.loop.loop_name} registers the communication hook {hook}"
        if not wanted.strategy.opaque:
            raise KnobError(f"strategy={name}: {said}, and {name} would exchange gradients without it; take TorchDDP, "
                            f"or leave register_comm_hook out of the script")  # fmt: skip
        if wanted.fabric.shaped:
            raise KnobError(f"fabric: {said}, and an emulated Link cannot carry what it sends; take Fabric(), or leave "
                            f"register_comm_hook out of the script")  # fmt: skip
        if self._run.peers.data is None:
            raise KnobError(f"ranks=1: {said}, which a run of one rank does not call; take 2 ranks or more")

    def find_step_begin(self) -> Any:
        """The step includes the loop's own work before its forward, such as reading a batch."""
        return self.loop.began

    async def check_loop_end(self, over: bool) -> bool:
        self._run.end_wait()
        return over or not await Op("do", self.loop.run_to_next)

    async def drive_step(self, step: Coroutine[Op, Any, Any]) -> int:
        return int(await Op("do", partial(self._run_to_end, step)))

    def _run_to_end(self, step: Coroutine[Op, Any, Any]) -> int:
        try:
            return self._run.host.drive_coroutine(step) or 1
        except LoopEnded:
            return 0

    def accept_requests(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Also ends the run if this rank's machine is about to end."""
        run = self._run
        for what in requests:
            if (reason := REFUSED_REQUESTS.get(what["kind"])) and run.rank.id == 0:
                run.mark("not saved", {"text": reason})
            if what["kind"] == "preempt":
                run.session.stop_early()
        return [what for what in requests if what["kind"] not in REFUSED_REQUESTS]

    async def finish_loop(self) -> None:
        run = self._run
        if self.loop.in_block:
            await run.leave_opaque()
            await average_model(run)
            run.host.hooks.detach_hooks()
            run.host.at("behind the loop's block")
            await Op("do", self.loop.run_to_end)

    def close(self) -> None:
        self.loop.close()
