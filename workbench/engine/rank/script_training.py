"""A rank's training under the user's own loop."""

from __future__ import annotations

import random
from collections.abc import Coroutine
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.engine.baselines.torch_ddp import convert_to_mib, wrap_model
from workbench.engine.control.canonical import broadcast_model, check_model, gather_numbers
from workbench.engine.control.script_position import ScriptLine, locate_script
from workbench.engine.rank.training import RankTraining
from workbench.engine.script.interception import LoopEnded, hook_name
from workbench.engine.script.loop import ScriptLoop
from workbench.engine.script.optimizers import ScriptRate
from workbench.experiment import Experiment
from workbench.fabric import traffic
from workbench.host.checkpoint.model_export import average_model
from workbench.host.core.planned import Planned
from workbench.host.memory.batches import BatchReader
from workbench.host.placement.canonical_state import hash_model_state
from workbench.host.placement.layout import ParameterLayout
from workbench.rank import Op
from workbench.settings import Change, KnobError
from workbench.tasks import rate

REFUSED_REQUESTS = {
    "resize": "the loop goes on with the ranks that it began with",
    "roll back": "the loop cannot go back",
    "preempt": "the loop goes on with the ranks that it began with, so the run ends",
}


class ScriptTraining(RankTraining):
    """A RankTraining that a user's loop leads. See [Note: Hand in hand] in engine/script/loop.py."""

    led: ScriptLoop
    script_store: Any = None  # on rank 0: the store in which the script's process group meets
    has_new_size = False  # whether a person has set the bucket size, so that the script's is void
    _bucket_asked_at: float | None = None  # when torch asked for its last bucket in the present backward
    _asked_by_script: Change | None = None  # the script's bucket size, as a change at the start

    def __init__(self, session: Any, before: Any = None) -> None:
        try:
            super().__init__(session, before)
        except BaseException:
            if hasattr(self, "led"):
                self.led.close()  # else the script would wait forever, with its process group open
            raise

    def _make_model(self) -> None:
        e, rank = self.experiment, self.rank
        if self.session.resume:
            raise KnobError(f"resume={self.session.resume!r}: a loop of its own begins at its beginning; let it load a "
                            f"checkpoint of its own")  # fmt: skip
        self.led = ScriptLoop(self)
        self.learner = self.led.make_learner()
        torch.manual_seed(e.seed)
        random.seed(e.seed)
        self.model = self.learner.model()
        self.layout = ParameterLayout(self.model, e.bucket_mb)
        self._take_bucket_size()
        check_model(self.control, self.model)
        if self.led.ddp_shim is None:
            broadcast_model(self.control, self.layout, self.model)
        elif len(set(gather_numbers(self.control, hash_model_state(self.layout)))) > 1:
            raise KnobError(
                f"{self.led.loop_name}: ranks begin with different parameters, and no strategy trains such; "
                f"leave out init_sync=False, and load the same values on all ranks"
            )
        self.optimizer = self.make_optimizer(e)
        rank.lr = rate(self.optimizer)
        self.rate = ScriptRate(e, self.optimizer)
        self.batches = BatchReader(self.learner.data, rank.id, rank.size, self.session.device)
        self.restart_data(0)

    def _take_bucket_size(self) -> None:
        """Makes the script's `bucket_cap_mb` the run's first change, unless `bucket_mb` is set already."""
        usual = {f.name: f.default for f in fields(Experiment)}["bucket_mb"]
        self.has_new_size = self.experiment.bucket_mb != usual
        cap = self.led.ddp_shim.options.get("bucket_cap_mb") if self.led.ddp_shim else None
        if cap is not None and not self.has_new_size:
            size = min(max(cap * 2**20 / 1e6, 0.01), 1024.0)  # the knob's range
            self._asked_by_script = Change(0, "bucket_mb", size)
            self.queue.planned.insert(0, self._asked_by_script)

    def locate_script(self) -> ScriptLine | None:
        return locate_script(self.led.thread_id) if hasattr(self, "led") else None

    def _make_host(self, first: float | None) -> None:
        super()._make_host(first)
        if self.rank.id == 0 and self.led.ddp_shim is not None and self.led.ddp_shim.comm_hook is not None:
            name = hook_name(self.led.ddp_shim.comm_hook)
            self.mark("warning", {"text": f"the script's communication hook {name} exchanges the gradients: the bytes "
                                  f"on the record are those of its buckets, and it may send fewer"})  # fmt: skip
        self.finite.again = False

    def enter_opaque(self) -> None:
        if self.peers.data is not None:
            self.host.hooks.detach_hooks()
            lane = self.lane if self.port.is_active else None
            seen = None if self.chip.runs_ahead else self._record_exchange
            hook = self.led.ddp_shim.comm_hook if self.led.ddp_shim else None
            made = wrap_model(self.model, self.peers.data, self._make_options(), lane, seen, self._note_bucket, hook)
            made.broadcast_buffers = self.led.ddp_shim is None  # the script's wrapper broadcasts them
            self.host.parts.wrap_model(made)

    def _make_options(self) -> dict[str, Any]:
        """Returns the arguments of torch's own wrapper: the script's, except settings that a person has changed."""
        options = dict(self.led.ddp_shim.options) if self.led.ddp_shim else {}
        if self.has_new_size or self.led.ddp_shim is None:
            options.pop("bucket_cap_mb_list", None)
            options["bucket_cap_mb"] = convert_to_mib(self.experiment.bucket_mb)
        if getattr(self.experiment.strategy, "find_unused_parameters", False):
            options["find_unused_parameters"] = True
        return options

    def require_trainable(self, wanted: Experiment) -> Experiment:
        if self.led.ddp_shim is not None and self.led.ddp_shim.comm_hook is not None:
            self._require_hook_runs(wanted, hook_name(self.led.ddp_shim.comm_hook))
        return super().require_trainable(wanted)

    def _require_hook_runs(self, wanted: Experiment, hook: str) -> None:
        """Raises KnobError if the script's communication hook would not exchange the gradients under `wanted`."""
        name, said = type(wanted.strategy).__name__, f"{self.led.loop_name} registers the communication hook {hook}"
        if not wanted.strategy.opaque:
            raise KnobError(f"strategy={name}: {said}, and {name} would exchange gradients without it; take TorchDDP, "
                            f"or leave register_comm_hook out of the script")  # fmt: skip
        if wanted.fabric.shaped:
            raise KnobError(f"fabric: {said}, and an emulated Link cannot carry what it sends; take Fabric(), or leave "
                            f"register_comm_hook out of the script")  # fmt: skip
        if self.peers.data is None:
            raise KnobError(f"ranks=1: {said}, which a run of one rank does not call; take 2 ranks or more")

    def unwrap_model(self) -> None:
        sums = self.led.copy_sums()
        super().unwrap_model()
        for p, grad in sums:
            p.grad = grad

    def _note_bucket(self) -> float:
        self._bucket_asked_at = self.clock.now()
        return self._bucket_asked_at

    def run_loss_backward(self, loss: Tensor, share: float | None) -> None:
        """Runs the loop's backward. Once torch asks for its last bucket all gradients exist, and it waits."""
        self._bucket_asked_at = None
        self.led.run_backward(loss, share)
        if (asked := self._bucket_asked_at) is not None and not self.chip.runs_ahead:
            now = self.clock.now()
            self.record.span(self.rank.step, "wait", "all_reduce", asked, asked, now, 0)
            self.host.timing.note_wait(asked, now, now - asked)

    def show_loss(self, loss: Tensor) -> Tensor:
        return self.led.recorded_loss(loss)

    def _record_exchange(self, name: str, began: float, nbytes: int) -> None:
        """Records that torch has summed one of its own buckets, when its last byte has arrived."""
        sent, _ = traffic("all_reduce", nbytes, self.rank.size)
        self.record.span(self.rank.step, "comm", name, began, began, self.clock.now(), sent)

    async def execute_change(self, change: Planned) -> bool:
        was, self.has_new_size = self.has_new_size, self.has_new_size or self._is_new_bucket_size(change)
        if (made := await super().execute_change(change)) and isinstance(change, Change):
            self.led.changes.append(replace(change, at_step=self.rank.step))
        elif not made:
            self.has_new_size = was
        return made

    def _is_new_bucket_size(self, change: Planned) -> bool:
        return isinstance(change, Change) and "bucket_mb" in change.settings and change is not self._asked_by_script

    async def finish_run(self) -> None:
        if self.led.in_block:
            await self.leave_opaque()
            await average_model(self)
            self.host.hooks.detach_hooks()
            self.host.at("behind the loop's block")
            await Op("do", self.led.run_to_end)
        await super().finish_run()

    async def check_ended(self) -> bool:
        over = await super().check_ended()
        self.end_wait()
        return over or not await Op("do", self.led.run_to_next)

    async def drive_step(self, strategy: Any) -> int:
        return int(await Op("do", partial(self._run_to_end, self.finite.guard_step(self.measuring.measure_step(self)))))

    def _run_to_end(self, step: Coroutine[Op, Any, Any]) -> int:
        try:
            return self.host.drive_coroutine(step) or 1
        except LoopEnded:
            return 0

    def _find_step_begin(self) -> Any:
        """The step includes the loop's own work before its forward, such as reading a batch."""
        return self.led.began

    async def _execute_requests(self, requests: list[dict[str, Any]]) -> None:
        for what in requests:
            if (reason := REFUSED_REQUESTS.get(what["kind"])) and self.rank.id == 0:
                self.mark("not saved", {"text": reason})
            self.session.stopping = self.session.stopping or what["kind"] == "preempt"
        await super()._execute_requests([what for what in requests if what["kind"] not in REFUSED_REQUESTS])

    def close(self) -> None:
        if hasattr(self, "led"):
            self.led.close()
        super().close()
