"""Wavelet: two overlapping batches on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy
from workbench.strategies.sub_models.verbs import fall, pieces, rise

TICK, TOCK = 0, 1


@dataclass(frozen=True, kw_only=True)
class Wavelet(Strategy):
    """Two batches per step on every rank: the second's forward uses the memory that the first's backward frees.

        tick:  forward, piece by piece;  backward, the last piece first
        tock:  after `lead` pieces of tick's backward one piece of forward for each of tick's;  then backward
        params <- optimizer(params, (1/2p) sum of both batches' gradients over p ranks)

    It equals DDP with `accumulate` = 2 and sends half of DDP's bytes per batch. The exchange hides behind tock's
    backward. If n pieces need equal memory, a rank keeps at most about 1 + 1/n of one batch's activations. Two batches
    next to each other keep twice as much as one batch. In a convolutional network the first pieces need most memory.
    Then delay tock by a larger `lead`. Digits keeps 1.5 times as much as one batch with `lead` = 1 and 1.3 times with
    2.

    A model is cut where a Pipeline would cut it, into `pieces` or as many as it has parts. A model without such places
    is one piece, and tock then begins after tick. A piece must not write into its input, except by an `inplace` layer.
    Batch norms see one batch after the other.

    In the paper waves are processes that share a GPU, and each uses the hardware that the other leaves idle. Here they
    take turns on one device. So it shows the memory, and a step is no shorter. The paper's waves never stop and make
    their own updates. These waves end with each step.

    When to use it: to see where the memory of a step goes. It trains two batches at once in the memory of 1.5.

    Reference: Wang et al., "Wavelet: Efficient DNN Training with Tick-Tock Scheduling", MLSys 2021,
    https://proceedings.mlsys.org/paper_files/paper/2021/hash/099268c3121d49937a67a052c51f865d-Abstract.html
    """

    pieces: int = knob(8, 1, 256, log=True, doc="largest number of pieces of the model")
    lead: int = knob(1, 1, 256, unit="pieces", doc="pieces of tick's backward before tock's forward starts")

    alike: ClassVar[bool] = True
    plain: ClassVar[bool] = False  # a step uses two batches
    exchanges: ClassVar[str] = "gradients"
    sees_all: ClassVar[bool] = True  # a stage's pieces belong to its schedule

    @property
    def by_pieces(self) -> bool:
        return self.pieces > 1

    def batches(self, size: int) -> int:
        return 2 * size

    async def step(self, rank: Rank, state: Any) -> None:
        share, of = 1.0 / (2 * rank.size), await pieces(rank, self.pieces)
        for piece in range(of):
            await rise(rank, TICK, piece, of, falls=True)
        risen = 0
        for fallen in range(1, of + 1):
            await fall(rank, TICK, of - fallen, of, share)
            if fallen >= self.lead:
                await rise(rank, TOCK, risen, of)
                risen += 1
        while risen < of:
            await rise(rank, TOCK, risen, of)
            risen += 1
        pending = []
        async for bucket in rank.backward(share, micro=TOCK):
            pending.append(await rank.start(rank.compressor.reduce(rank, bucket, rank.memory), name=bucket.name))
        for handle in pending:
            await rank.wait(handle)
        await rank.update()
