"""A rank's life where a loop of its own makes the steps: what is otherwise than in any other rank's."""

from __future__ import annotations

import random
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from workbench.engine.canonical import broadcast_model, check_model
from workbench.engine.led import Led
from workbench.engine.opaque import wrap
from workbench.engine.theirs import TheirRate
from workbench.engine.training import Training
from workbench.engine.wrapped import Over
from workbench.fabric import traffic
from workbench.host.batches import Batches
from workbench.host.layout import Layout
from workbench.host.saved.alone import mean_taken
from workbench.rank import Op
from workbench.settings import Change, KnobError
from workbench.tasks import rate

NOT = {
    "resize": "the loop goes on with the ranks that it began with",
    "roll back": "the loop cannot go back",
    "preempt": "the loop goes on with the ranks that it began with, so the run ends",
}


class Following(Training):
    """A Training that a loop leads; see [Note: Hand in hand] in engine/led.py."""

    led: Led

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
        check_model(self.control, self.model)
        broadcast_model(self.control, self.layout, self.model)
        self.optimizer = self.make_optimizer(e)
        rank.lr = rate(self.optimizer)
        self.rate = TheirRate(e, self.optimizer)
        self.batches = Batches(self.learner.data, rank.id, rank.size, self.session.device)
        self.restart_data(0)

    def _make_host(self, first: float | None) -> None:
        super()._make_host(first)
        self.host.go_back, self.host.shown = self.led.go_back, self.led.shown
        self.finite.again = False

    def enter_opaque(self) -> None:
        if self.peers.data is not None:
            self.host.forget_hooks()
            lane = self.lane if self.port.active else None
            seen = None if self.chip.runs_ahead else self._exchanged
            self.host.module = wrap(self.model, self.peers.data, self.experiment.bucket_mb, lane, seen, self.clock.now,
                                    self.led.options)  # fmt: skip

    def unwrap(self) -> None:
        sums = self.led.sums()
        super().unwrap()
        for p, grad in sums:
            p.grad = grad

    def _exchanged(self, name: str, began: float, nbytes: int) -> None:
        """One of torch's own buckets has been summed, as its last byte has come."""
        sent, _ = traffic("all_reduce", nbytes, self.rank.size)
        self.record.span(self.rank.step, "comm", name, began, began, self.clock.now(), sent)

    async def obey(self, change: Change) -> bool:
        if made := await super().obey(change):
            self.led.changes.append(replace(change, at_step=self.rank.step))
        return made

    async def finish(self) -> None:
        if self.led.in_block:
            await self.leave_opaque()
            await mean_taken(self)
            self.host.forget_hooks()
            self.host.at("behind the loop's block")
            await Op("do", self.led.settle)
        await super().finish()

    async def over(self) -> bool:
        return await super().over() or not await Op("do", self.led.another)

    async def drive_step(self, strategy: Any) -> int:
        return int(await Op("do", partial(self._to_its_end, self.finite.step(self.measuring.step(self)))))

    def _to_its_end(self, step: Coroutine[Op, Any, Any]) -> int:
        """The step, or as far as the loop went with it."""
        try:
            return self.host.drive(step) or 1
        except Over:
            return 0

    def _begun(self) -> Any:
        """With what the loop did before its forward, such as reading a batch."""
        super()._begun()
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
