"""A forward that stops before it reads a bucket, so that the strategy can act first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from workbench.engine.compute.compute_parts import ComputeParts
from workbench.engine.compute.pass_timer import PassTimer
from workbench.host.core.drive import CoroutineEnded, LeaveLoop, drive_coroutine
from workbench.host.placement import unmaterialized
from workbench.rank import Bucket, Op, StrategyError
from workbench.strategies.offload.engine import OFFLOAD_VERBS

# possible inside torch, during a forward or a backward
VERBS_INSIDE = {"all_reduce", "all_gather", "all_to_all", "all_to_allv", "broadcast", "reduce_scatter", "start", "wait",
          "sample", "params", "clock", "send", "recv", "hold", *OFFLOAD_VERBS}  # fmt: skip
_VERBS_BETWEEN = {*VERBS_INSIDE, "update"} - {"hold", *OFFLOAD_VERBS}  # possible between two buckets of a forward


class ForwardStops:
    """Gives parameters in `stop_at_reads` no values until their bucket is handed out.

    Buckets come in the order of the model's reads. Unread buckets come at the forward's end, the last one first.
    """

    def __init__(self, parts: ComputeParts, timing: PassTimer, perform: Callable[[Op], Any]) -> None:
        self._parts, self._timing, self._do = parts, timing, perform
        self._coro: Any = None
        self._left: list[int] = []  # not handed out yet
        self._bucket: dict[int, int] = {}  # by a parameter's id
        self._before = 0  # elements of the buckets handed out
        self.ended: CoroutineEnded | None = None

    @contextmanager
    def stop_at_reads(self, coro: Any) -> Iterator[None]:
        """Resumes `coro` with each bucket before the forward inside the block reads it."""
        layout = self._parts.layout
        self._coro, self.ended, self._before = coro, None, 0
        self._left = [bucket.index for bucket in reversed(layout.buckets)]
        self._bucket = {id(place.param): place.bucket for place in layout.order}
        for place in layout.order:
            unmaterialized.make_absent(place.param, self._hand_out_read)
        try:
            yield
        finally:
            for place in layout.order:
                unmaterialized.make_present(place.param)

    def hand_out_rest(self) -> None:
        while self._left:
            self._hand_out_bucket(self._left[0])

    def _hand_out_read(self, params: list[Any], others: list[Any]) -> None:
        for index in dict.fromkeys(self._bucket[id(p)] for p in params):
            self._hand_out_bucket(index)

    def _hand_out_bucket(self, index: int) -> None:
        parts, timing = self._parts, self._timing
        layout = parts.layout
        self._left.remove(index)
        for place in layout.groups[index]:
            unmaterialized.make_present(place.param)
        if self.ended is not None:
            return
        if parts.pace.is_active and timing.is_computing:
            timing.reach_fraction(self._before / layout.element_count)
        self._before += layout.weight_bucket(index).data.numel()
        around = parts.at.now
        with parts.lane.chip.use_stream(), torch.inference_mode(False), torch.no_grad():
            self._resume_strategy(layout.weight_bucket(index))
        parts.at(*around[:2])

    def _resume_strategy(self, bucket: Bucket) -> None:
        try:
            self.ended = CoroutineEnded(drive_coroutine(self._coro, self._perform_op, self._parts.alone, bucket))
        except LeaveLoop:
            return

    def _perform_op(self, op: Op) -> Any:
        if op.verb == "next_params":
            raise LeaveLoop
        if op.verb not in _VERBS_BETWEEN or (op.verb == "update" and op.args[0] is None):
            what = "update of the whole model" if op.verb == "update" else op.verb
            raise StrategyError(
                f"{what} cannot be requested between two buckets of a forward: request it after the loop over buckets"
            )
        return self._do(op)
