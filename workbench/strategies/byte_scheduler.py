"""ByteScheduler: gradients in small pieces, in the order of the next forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Bucket, Handle, Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy

Flying = dict[int, list[Handle]]  # by bucket, its exchanges that outlast the step


@dataclass(frozen=True, kw_only=True)
class ByteScheduler(Strategy):
    """DDP in small pieces, reordered so that the next forward begins at once and waits bucket by bucket.

        backward has filled bucket b:    its pieces of at most `partition_mb` wait; the first layers' are most urgent
        the network is free:             rank 0 starts all ranks' most urgent until `credit_mb` are under way
        forward is about to read b:      wait for its pieces;  params_b <- optimizer(params_b, (1/p) sum_i grad_i,b)

    Backward ends with the layers that the next forward begins with. In the order of filling ("fifo") these are sent
    last, and forward waits for every bucket. Here they overtake, and ranks send other pieces while forward computes. So
    a step can take max(compute, network). DDP takes at least forward + max(backward, network). Each rank sends DDP's
    bytes, 2 (p-1)/p times the model's per step. With p > 2 the order of additions may differ, as with any other size of
    buckets.

    Forward waits for one bucket at a time, so give buckets the size of a layer. Nothing overtakes the pieces under way.
    So with more credit an urgent piece waits longer, and rank 0 needs fewer rounds to choose pieces. P3 is
    `partition_mb` = 0.2 (its slices of 50,000 parameters) with the smallest credit. The best sizes depend on the
    network. `tune(lab)` searches both while ranks train, as the authors do.

    A step ends before its update. Ranks finish it before a change, an evaluation, a new learning rate and the run's
    end. Clipping is refused, because no update has all gradients before it. A compressor acts on whole buckets, without
    `partition_mb`. All ranks start the same pieces, so a rank must be a whole replica.

    When to use it: communication takes about as long as compute. It gains nothing if backward hides the exchange, or if
    the exchange takes many times as long.

    Reference: Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration", SOSP 2019,
    https://doi.org/10.1145/3341301.3359642; Jayarajan et al., "Priority-based Parameter Propagation for Distributed
    DNN Training", MLSys 2019, https://arxiv.org/abs/1905.03960
    """

    partition_mb: float = knob(0.25, 0.001, 1024.0, unit="MB", log=True, doc="delta: largest piece of a bucket")
    credit_mb: float = knob(
        0.5, 0.001, 4096.0, unit="MB", log=True, doc="kappa: bytes in flight that no later piece overtakes"
    )
    order: str = knob(
        "forward", choices=("forward", "fifo"), doc="order of pieces: first needed by forward, or first ready"
    )

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
                f"compressor={type(compressor).__name__}: it keeps the optimizer's momentum for an update of the "
                f"whole model, and ByteScheduler updates bucket by bucket; use it with DDP, or use Dense with "
                f"ByteScheduler"
            )
        return super().refuses(compressor)

    def init(self, rank: Rank, params: list[Bucket]) -> Flying:
        return {}

    async def step(self, rank: Rank, state: Flying) -> None:
        async for bucket in rank.forward():
            await self._land(rank, state, bucket)
        async for bucket in rank.backward(1.0 / rank.size):
            urgency = bucket.index + 1 if self.order == "forward" else 0  # the last bucket has the first layers
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
        if bucket.index in state:
            for handle in state.pop(bucket.index):
                await rank.wait(handle)
            await rank.update(bucket)

    async def drain(self, rank: Rank, state: Flying) -> None:
        for bucket in reversed(await rank.params()) if state else ():
            await self._land(rank, state, bucket)

    async def leave(self, rank: Rank, state: Flying) -> None:
        await self.drain(rank, state)
