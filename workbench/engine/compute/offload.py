"""A rank's state off its device, with the time of its transfers; a lane may use it, too."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from workbench.engine.compute.clocked_view import OffloadView
from workbench.fabric import Ways
from workbench.fabric.load import stretch
from workbench.fabric.pace import SHARES, lasts
from workbench.host.memory.offload import Hops, OffloadStore, name_span
from workbench.host.placement.optimizer_slots import Settings, read_settings, require_steppable
from workbench.rank import Bucket, Op
from workbench.strategies.offload.engine import OffloadPerformer

UpdateSettings = tuple[Settings, frozenset[str]]  # an optimizer's settings, and the parameters that no rank used


class OffloadTransfers:
    """One rank's state off the device. Each transfer takes at least as long as the Fabric says. See OffloadPerformer.

    kept:  the state
    verbs: perform `offload` and `fetch`
    """

    def __init__(self, run: OffloadView) -> None:
        self._run = run
        self.kept = OffloadStore(self._copy_out, self._copy_in)
        self._ways, self._lock = Ways(), threading.Lock()
        self.verbs = OffloadPerformer(self).verbs

    def update_settings(self) -> UpdateSettings:
        """Returns the present settings, for a child that updates later."""
        return read_settings(self._run.optimizer), frozenset(self._run.layout.unused)

    def perform_op(self, op: Op, step: int, by: UpdateSettings | None) -> Any:
        """Performs `op` in `step`. by: the optimizer's settings at the start of the child, if a child asks"""
        if op.verb == "update":
            return self._update_shard(op.args[0], step, by)
        return self.verbs[op.verb](op, step)

    def read_clock(self) -> float:
        return self._run.clock.now()

    def offload_state(self, shard: Bucket, what: str, where: str) -> Hops:
        return self.kept.offload_state(self._run.layout, self._run.optimizer, shard, what, where)

    def fetch_state(self, shard: Bucket, what: str, where: str, keep: bool) -> tuple[Tensor | None, Hops]:
        return self.kept.fetch_state(self._run.layout, self._run.optimizer, shard, what, where, keep)

    def record_transfer(self, op: Op, step: int, began: float, hops: Hops, out: bool) -> None:
        """Waits until these hops are over at the Fabric's speed, and records them. out: off the device"""
        run = self._run
        if not hops:
            return
        with self._lock:
            until = self._ways.occupy(run.port.fabric, began, hops, out)
        run.paced_sleep.sleep_until(until)
        lane = "measuring" if op.measures else "offload"
        run.record.span(step, lane, name_span(op), began, began, run.clock.now(), hops[0][1])

    def _update_shard(self, shard: Bucket, step: int, by: UpdateSettings | None) -> None:
        """Makes the optimizer's step on the host's processor, paced as any update."""
        run, clock = self._run, self._run.clock
        require_steppable(run.layout, run.optimizer, shard, run.experiment)
        began = clock.now()
        self.kept.step_shard(run.layout, run.optimizer, shard, *(by or self.update_settings()))
        pace = run.host.pace
        if pace.is_active:
            asked = pace.seconds * SHARES["update"] * shard.data.numel() / run.layout.element_count
            factor = stretch(pace.faults, run.rank.id, step, "update")
            run.paced_sleep.sleep_until(began + lasts(asked, clock.now() - began, factor))
        run.record.span(step, "offload", f"update {shard.index}", began, began, clock.now(), 0)

    def _copy_out(self, x: Tensor) -> Tensor:
        there = self._run.chip.copy_to_host(x)
        return there.clone() if there.untyped_storage()._cdata == x.untyped_storage()._cdata else there

    def _copy_in(self, x: Tensor, device: Any) -> Tensor:
        made = torch.empty_like(x, device=device)
        self._run.chip.copy_from_host(made, x)
        return made
