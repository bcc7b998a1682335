"""A rank that the user's own training loop leads: how it differs from other ranks."""

from __future__ import annotations

import random
from collections.abc import Coroutine
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.engine.baselines.opaque import bucket_cap, wrap
from workbench.engine.control.canonical import all_equal, broadcast_model, check_model
from workbench.engine.control.located import Place, locate_script
from workbench.engine.rank.training import Training
from workbench.engine.script.led import Led
from workbench.engine.script.theirs import TheirRate
from workbench.engine.script.wrapped import Over, hook_name
from workbench.experiment import Experiment
from workbench.fabric import traffic
from workbench.host.checkpoint.alone import mean_taken
from workbench.host.memory.batches import Batches
from workbench.host.placement.canonical import state_hash
from workbench.host.placement.layout import Layout
from workbench.rank import Op
from workbench.settings import Change, KnobError
from workbench.tasks import rate

NOT = {
    "resize": "the loop goes on with the ranks that it began with",
    "roll back": "the loop cannot go back",
    "preempt": "the loop goes on with the ranks that it began with, so the run ends",
}


class Following(Training):
    """A Training that a user's loop leads. See [Note: Hand in hand] in engine/script/led.py."""

    led: Led
    script_store: Any = None  # on rank 0: the store in which the script's process group meets
    recut = False  # whether a person has set the bucket size, so that the script's is void
    _asked: float | None = None  # when torch asked for its last bucket in the present backward
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
        self.led = Led(self)
        self.learner = self.led.learner()
        torch.manual_seed(e.seed)
        random.seed(e.seed)
        self.model = self.learner.model()
        self.layout = Layout(self.model, e.bucket_mb)
        self._take_bucket_size()
        check_model(self.control, self.model)
        if self.led.wrapper is None:
            broadcast_model(self.control, self.layout, self.model)
        elif len(set(all_equal(self.control, state_hash(self.layout)))) > 1:
            raise KnobError(f"{self.led.name}: ranks begin with different parameters, and no strategy trains such; "
                            f"leave out init_sync=False, and load the same values on all ranks")  # fmt: skip
        self.optimizer = self.make_optimizer(e)
        rank.lr = rate(self.optimizer)
        self.rate = TheirRate(e, self.optimizer)
        self.batches = Batches(self.learner.data, rank.id, rank.size, self.session.device)
        self.restart_data(0)

    def _take_bucket_size(self) -> None:
        """Makes the script's `bucket_cap_mb` the run's first change, unless `bucket_mb` is set already."""
        usual = {f.name: f.default for f in fields(Experiment)}["bucket_mb"]
        self.recut = self.experiment.bucket_mb != usual
        cap = self.led.wrapper.options.get("bucket_cap_mb") if self.led.wrapper else None
        if cap is not None and not self.recut:
            size = min(max(cap * 2**20 / 1e6, 0.01), 1024.0)  # the knob's range
            self._asked_by_script = Change(0, "bucket_mb", size)
            self.planned = [self._asked_by_script, *self.planned]

    def locate_script(self) -> Place | None:
        return locate_script(self.led.thread) if hasattr(self, "led") else None

    def _make_host(self, first: float | None) -> None:
        super()._make_host(first)
        if self.rank.id == 0 and self.led.wrapper is not None and self.led.wrapper.comm_hook is not None:
            name = hook_name(self.led.wrapper.comm_hook)
            self.mark("warning", {"text": f"the script's communication hook {name} exchanges the gradients: the bytes "
                                  f"on the record are those of its buckets, and it may send fewer"})  # fmt: skip
        self.finite.again = False

    def enter_opaque(self) -> None:
        if self.peers.data is not None:
            self.host.hooks.detach()
            lane = self.lane if self.port.active else None
            seen = None if self.chip.runs_ahead else self._exchanged
            hook = self.led.wrapper.comm_hook if self.led.wrapper else None
            made = wrap(self.model, self.peers.data, self._options(), lane, seen, self._ask, hook)
            made.broadcast_buffers = self.led.wrapper is None  # the script's wrapper broadcasts them
            self.host.parts.wrap(made)

    def _options(self) -> dict[str, Any]:
        """Returns the arguments of torch's own wrapper: the script's, except a bucket size that a person has set."""
        options = dict(self.led.wrapper.options) if self.led.wrapper else {}
        if self.recut or self.led.wrapper is None:
            options.pop("bucket_cap_mb_list", None)
            options["bucket_cap_mb"] = bucket_cap(self.experiment.bucket_mb)
        return options

    def able(self, wanted: Experiment) -> Experiment:
        if self.led.wrapper is not None and self.led.wrapper.comm_hook is not None:
            self._require_hook_runs(wanted, hook_name(self.led.wrapper.comm_hook))
        return super().able(wanted)

    def _require_hook_runs(self, wanted: Experiment, hook: str) -> None:
        """Raises KnobError if the script's communication hook would not exchange the gradients under `wanted`."""
        name, said = type(wanted.strategy).__name__, f"{self.led.name} registers the communication hook {hook}"
        if not wanted.strategy.opaque:
            raise KnobError(f"strategy={name}: {said}, and {name} would exchange gradients without it; take TorchDDP, "
                            f"or leave register_comm_hook out of the script")  # fmt: skip
        if wanted.fabric.shaped:
            raise KnobError(f"fabric: {said}, and an emulated Link cannot carry what it sends; take Fabric(), or leave "
                            f"register_comm_hook out of the script")  # fmt: skip
        if self.peers.data is None:
            raise KnobError(f"ranks=1: {said}, which a run of one rank does not call; take 2 ranks or more")

    def unwrap(self) -> None:
        sums = self.led.sums()
        super().unwrap()
        for p, grad in sums:
            p.grad = grad

    def _ask(self) -> float:
        """Notes and returns the time at which torch asks for a bucket."""
        self._asked = self.clock.now()
        return self._asked

    def go_back(self, loss: Tensor, share: float | None) -> None:
        """Runs the loop's backward. Once torch asks for its last bucket all gradients exist, and it waits."""
        self._asked = None
        self.led.go_back(loss, share)
        if (asked := self._asked) is not None and not self.chip.runs_ahead:
            now = self.clock.now()
            self.record.span(self.rank.step, "wait", "all_reduce", asked, asked, now, 0)
            self.host.timing.note_wait(asked, now, now - asked)

    def show_loss(self, loss: Tensor) -> Tensor:
        """Returns a loss as the loop reports it."""
        return self.led.shown(loss)

    def _exchanged(self, name: str, began: float, nbytes: int) -> None:
        """Records that one of torch's own buckets has been summed, when its last byte has arrived."""
        sent, _ = traffic("all_reduce", nbytes, self.rank.size)
        self.record.span(self.rank.step, "comm", name, began, began, self.clock.now(), sent)

    async def obey(self, change: Change) -> bool:
        was, self.recut = self.recut, self.recut or self._is_new_bucket_size(change)
        if made := await super().obey(change):
            self.led.changes.append(replace(change, at_step=self.rank.step))
        else:
            self.recut = was
        return made

    def _is_new_bucket_size(self, change: Change) -> bool:
        return type(change) is Change and "bucket_mb" in change.settings and change is not self._asked_by_script

    async def finish(self) -> None:
        if self.led.in_block:
            await self.leave_opaque()
            await mean_taken(self)
            self.host.hooks.detach()
            self.host.at("behind the loop's block")
            await Op("do", self.led.settle)
        await super().finish()

    async def over(self) -> bool:
        over = await super().over()
        self.end_wait()
        return over or not await Op("do", self.led.another)

    async def drive_step(self, strategy: Any) -> int:
        return int(await Op("do", partial(self._to_its_end, self.finite.step(self.measuring.step(self)))))

    def _to_its_end(self, step: Coroutine[Op, Any, Any]) -> int:
        """Drives the step to its end, or as far as the loop goes with it."""
        try:
            return self.host.drive(step) or 1
        except Over:
            return 0

    def _begun(self) -> Any:
        """Returns when the step began. It includes the loop's own work before its forward, such as reading a batch."""
        return self.led.began

    async def _heed(self, requests: list[dict[str, Any]]) -> None:
        for what in requests:
            if (reason := NOT.get(what["kind"])) and self.rank.id == 0:
                self.mark("not saved", {"text": reason})
            self.session.stopping = self.session.stopping or what["kind"] == "preempt"
        await super()._heed([what for what in requests if what["kind"] not in NOT])

    def close(self) -> None:
        if hasattr(self, "led"):
            self.led.close()
        super().close()
