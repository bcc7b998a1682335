"""ByteScheduler: gradients cross in pieces, what the next forward needs first going first, and that forward begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Bucket, Handle, Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy

Flying = dict[int, list[Handle]]  # by bucket, its pieces under way across the step's end


@dataclass(frozen=True, kw_only=True)
class ByteScheduler(Strategy):
    """DDP in pieces and in another order: the next forward begins at once, and waits before a bucket for that alone.

        backward has filled bucket b:    its pieces of at most `partition_mb` wait, the first layers' the most urgent
        the wire is free:                rank 0 lets the most urgent go, of all ranks, until `credit_mb` are under way
        forward is about to read b:      wait for its pieces;  params_b <- optimizer(params_b, (1/p) sum_i grad_i,b)

    Backward ends with the layers that the next forward begins with. In the order in which buckets fill ("fifo") those
    cross last, and forward waits for all; here they overtake, and what is left crosses while forward computes. So
    a step can last max(compute, wire), where DDP's lasts forward + max(backward, wire) and more. Each rank sends what
    it does under DDP, 2 (p-1)/p times the model's bytes per step, and every element is summed over the same ranks;
    where p > 2 additions may come in another order than DDP's, as with any other size of buckets.

    A bucket is what is waited for and updated at a time: give it the size of a layer. What is under way is overtaken by
    nothing: the more credit, the longer an urgent piece waits, and the fewer rounds rank 0 needs to say what goes. P3
    is `partition_mb` = 0.2 (its slices of 50,000 parameters) with the smallest credit, one slice at a time. Which sizes
    are best depends on the wire: `tune(lab)` searches both while ranks train, as the authors do.

    A step ends with its update still to be made. Before anything is changed or evaluated, and when the run ends, what
    is under way is waited for; so it is before each step that has another learning rate than the last (a warm-up).
    Clipping is refused, for no update has all gradients before it. A compressor acts on whole buckets, and
    `partition_mb` does nothing then. All ranks start the same pieces, so a replica must be whole.

    When to use it: the wire takes about as long as compute. It gains nothing where backward hides the exchange, nor
    where that takes many times as long.

    Reference: Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP 2019,
    https://doi.org/10.1145/3341301.3359642; Jayarajan et al., "Priority-based Parameter Propagation for Distributed
    DNN Training", MLSys 2019, https://arxiv.org/abs/1905.03960
    """

    partition_mb: float = knob(0.25, 0.001, 1024.0, unit="MB", log=True, doc="delta: largest piece of a bucket")
    credit_mb: float = knob(0.5, 0.001, 4096.0, unit="MB", log=True, doc="kappa: bytes under way that none overtakes")
    order: str = knob("forward", choices=("forward", "fifo"), doc="what crosses first: what forward needs, or is ready")

    alike: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    clips: ClassVar[bool] = False
    in_flight: ClassVar[bool] = True
    late_update: ClassVar[bool] = True
    exchanges: ClassVar[str] = "gradients"
    own: ClassVar[dict[str, str]] = {"by bucket": "sum"}

    def refuses(self, compressor: Any) -> str | None:
        if compressor.carries:
            return (
                f"compressor={type(compressor).__name__}: it keeps the optimizer's momentum for an update of the whole "
                f"model, and ByteScheduler updates bucket by bucket; use it with DDP, or Dense here"
            )
        return super().refuses(compressor)

    def init(self, rank: Rank, params: list[Bucket]) -> Flying:
        return {}

    async def step(self, rank: Rank, state: Flying) -> None:
        async for bucket in rank.forward():
            await self._land(rank, state, bucket)
        async for bucket in rank.backward(1.0 / rank.size):
            urgency = bucket.index + 1 if self.order == "forward" else 0  # the last to fill has the first layers
            state[bucket.index] = [
                await rank.start(rank.compressor.reduce(rank, piece, rank.memory), name=piece.name, priority=urgency,
                                 share=piece.nbytes / (self.credit_mb * 1e6))
                for piece in self._pieces(rank, bucket)
            ]  # fmt: skip

    def _pieces(self, rank: Rank, bucket: Bucket) -> Iterator[Bucket]:
        count = max(1, -(-bucket.nbytes // int(self.partition_mb * 1e6))) if rank.compressor.immediate else 1
        if count == 1:
            yield bucket
            return
        for number in range(count):
            piece = bucket.shard(number, count)
            piece.name = f"{bucket.name} piece {number}"
            if piece.data.numel():
                yield piece

    async def _land(self, rank: Rank, state: Flying, bucket: Bucket) -> None:
        """All of a bucket's gradients have come before this returns, and it is updated."""
        if bucket.index in state:
            for handle in state.pop(bucket.index):
                await rank.wait(handle)
            await rank.update(bucket)

    async def drain(self, rank: Rank, state: Flying) -> None:
        for bucket in reversed(await rank.params()) if state else ():
            await self._land(rank, state, bucket)

    async def leave(self, rank: Rank, state: Flying) -> None:
        await self.drain(rank, state)
