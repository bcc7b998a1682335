"""A virtual rank's tensors on host or disk. They move at once, and the transfer takes its time after that."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from workbench.fabric import Ways
from workbench.host.memory.offload import Hops, OffloadStore, name_span
from workbench.host.placement.optimizer_slots import Settings, make_slot_likes, read_settings, require_steppable
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.optimizers import elementwise
from workbench.rank import Bucket, Op
from workbench.sim.clock.fiber import PARKED, ChildFiber, Fiber
from workbench.sim.compute.compute_parts import ComputeParts
from workbench.sim.compute.pass_timer import PassTimer

HOST_PROCESSOR = "host"  # the processor that updates offloaded shards in parallel to the device


class OffloadTransfers:
    """A virtual rank's transfers to the host or to disk, and its updates there. See OffloadPerformer."""

    def __init__(self, parts: ComputeParts, timing: PassTimer) -> None:
        self._parts, self._body, self._timing, self._clock, self._ways = parts, parts.body, timing, parts.clock, Ways()

    def offload_state(self, shard: Bucket, what: str, where: str) -> Hops:
        return self._body.away.offload_state(self._body.layout, self._body.optimizer, shard, what, where)

    def fetch_state(self, shard: Bucket, what: str, where: str, keep: bool) -> tuple[Tensor | None, Hops]:
        return self._body.away.fetch_state(self._body.layout, self._body.optimizer, shard, what, where, keep)

    def answer_transfer(self, fiber: Fiber, op: Op, hops: Hops, value: Any, out: bool) -> Any:
        """Answers with `value` after the time of these hops. out: off the device"""
        if not hops:
            return value
        now = self._clock.now
        end = self._ways.occupy(self._parts.experiment.fabric, now, hops, out)
        self._parts.span(
            "measuring" if op.measures else "offload", name_span(op), now, now, end, hops[0][1], _find_step(fiber)
        )
        self._clock.resume_at(end, fiber, value)
        return PARKED

    def update_settings(self) -> tuple[Settings, frozenset[str]]:
        """Returns the optimizer's settings and the unused parameters. A child that updates later uses them."""
        return read_settings(self._body.optimizer), frozenset(self._body.layout.unused)

    def update_on_host(self, fiber: Fiber, shard: Bucket) -> Any:
        body, now = self._body, self._clock.now
        require_steppable(body.layout, body.optimizer, shard, self._parts.experiment)
        by = getattr(fiber, "by", None) or self.update_settings()
        body.away.step_shard(body.layout, body.optimizer, shard, *by)
        body.note_shard_step()
        began = max(now, self._timing.free.get(HOST_PROCESSOR, 0.0))
        end = self._timing.free[HOST_PROCESSOR] = began + self._timing.phase_seconds(
            "update", shard.data.numel() / body.layout.element_count
        )
        self._parts.span("offload", f"update {shard.index}", now, began, end, 0, _find_step(fiber))
        self._clock.resume_at(end, fiber)
        return PARKED


def _find_step(fiber: Fiber) -> int:
    """Returns the step in which a child started; -1 (the rank's present step) for other fibers."""
    return fiber.step if isinstance(fiber, ChildFiber) else -1


class SizedOffload(OffloadStore):
    """Offloading with sizes only. Ranks share one optimizer, and its state never moves."""

    def __init__(self, stepped: Any) -> None:
        super().__init__()
        self._has_stepped = stepped  # whether the optimizer has state
        self._likes: dict[int, tuple[tuple[Any, ...], dict[str, Tensor]]] = {}  # by bucket

    def _take_slots(self, layout: ParameterLayout, optimizer: Any, shard: Bucket) -> dict[Any, Any]:
        return self._list_slots(layout, optimizer, shard) if self._has_stepped() else {}

    def _return_slots(self, layout: ParameterLayout, optimizer: Any, shard: Bucket, values: dict[Any, Any]) -> None:
        """Does nothing: the optimizer has kept the values."""

    def _step_values(self, layout: ParameterLayout, optimizer: Any, shard: Bucket, *_: Any) -> dict[Any, Any]:
        return self._list_slots(layout, optimizer, shard)

    def _list_slots(self, layout: ParameterLayout, optimizer: Any, shard: Bucket) -> dict[Any, Tensor]:
        """Returns a shard's optimizer state: cut like its parameters, or whole."""
        of, like = self._likes.get(shard.index, ((), {}))
        if of != (layout, optimizer):  # trial steps find it, once per optimizer
            like = make_slot_likes(layout.groups[shard.index], optimizer)
            self._likes[shard.index] = (layout, optimizer), like
        numel, cut = {part.name: part.stop - part.start for part in shard.parts}, elementwise(optimizer)
        found: dict[Any, Tensor] = {}
        for name, x in like.items():
            slot, _, parameter = name.partition("/")
            if parameter in numel:
                n = numel[parameter] if cut and not x.numel() else max(x.numel(), 1)
                found[parameter, slot] = layout.weights[shard.index].new_empty(n, dtype=x.dtype)
        return found
