"""Gossip on a ring with one byte per parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.compressors import ByteGrad, Coder, Dense
from workbench.rank import FLOATS, Bucket, Memory, Rank
from workbench.settings import knob
from workbench.strategies._average import average
from workbench.strategies._base import Strategy
from workbench.strategies._copies import keep
from workbench.strategies._graph import Round, hops, mixing_round


class _State:
    """State of one rank: its parameters as its neighbours know them, and its neighbours' parameters."""

    def __init__(self, rank: Rank, params: list[Bucket]) -> None:
        self.known = Memory()
        self.begin(rank, params)

    def begin(self, rank: Rank, params: list[Bucket]) -> None:
        """Copies the parameters, equal on all ranks, into a slot for each rank. The rank's number names its slot."""
        keep(self.known, params, *map(str, ring(rank).shares))


@dataclass(frozen=True, kw_only=True)
class LowPrecisionDecentralized(Strategy):
    """Each rank sends its two neighbours on a ring its displacement, in 8 bits per parameter.

        params_i <- optimizer_i(params_i, grad_i)                          every step
        z_i = params_i - w_i + sum_j W_ij w_j - w_i                        every `every` steps
        w_i <- w_i + Q(z_i);   w_j <- w_j + Q(z_j) for both neighbours;    params_i <- w_i

    w_i is the neighbours' copy of rank i. A rank also keeps copies of its neighbours' w. All copies are bit-identical,
    because both sides add the same Q(z). W is 1/3 for each neighbour and the rank itself (1/2 on two ranks). Only the
    displacement since the last round is rounded, so the rounding error shrinks with it. Q is ByteGrad's. It sends the
    smallest element and the distance between two codes, then one byte per element. With `bits` = 32 this is gossip on a
    ring, without rounding.

    A rank sends each neighbour one byte per parameter and 8 per bucket. On a ring that is half the model's fp32 bytes
    in two messages: 1/3 of DDP's bytes on 4 ranks and 1/4 on many. The exchange hides behind nothing, because it comes
    after the update.

    When to use it: high latency and low bandwidth at the same time. It needs memory for three more copies of the model.

    Reference: Tang et al., "Communication Compression for Decentralized Training", NeurIPS 2018 (there DCD-PSGD),
    https://arxiv.org/abs/1803.06443; on a ring with these codes: Gan et al., "BAGUA: Scaling up Distributed Learning
    with System Relaxations", VLDB 2021, https://arxiv.org/abs/2107.01499
    """

    every: int = knob(1, 1, 256, unit="steps", log=True, doc="steps between two rounds of messages")
    bits: int = knob(8, choices=(8, 32), doc="bits per sent parameter; 32: not rounded")

    moves_frozen: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = FLOATS
    periodic: ClassVar[bool] = True
    exchanges: ClassVar[str] = "displacements"
    own: ClassVar[dict[str, str]] = {"[0-9]*": "drop"}

    def propagation(self, size: int) -> int:
        return hops("ring", size) * self.every

    def receivers(self, size: int, index: int, number: int = 0) -> tuple[int, ...]:
        """Returns the ranks that rank `index` of `size` sends to in round `number`."""
        return mixing_round("ring", 1.0, size, index, number).to

    def refuses(self, compressor: Any) -> str | None:
        if compressor.immediate:
            return None
        return (
            f"LowPrecisionDecentralized has its own codes and cannot use {compressor}; use Dense with it, or LocalSGD"
        )

    def init(self, rank: Rank, params: list[Bucket]) -> _State:
        return _State(rank, params)

    async def step(self, rank: Rank, state: _State) -> None:
        part, known = ring(rank), state.known
        buckets = await rank.params()
        await rank.forward()
        await rank.backward()
        await rank.update()
        if rank.step % self.every or not part.to:
            return
        q, messages = self._codec(rank.memory), []
        for bucket in buckets:
            own = known.flat(str(rank.index), bucket)
            z = bucket.data - own
            for r, share in part.shares.items():
                z.add_(known.flat(str(r), bucket), alpha=share - (r == rank.index))
            [message] = q.encode(z)
            for other in part.to:
                await rank.send(message, other, bucket.name)
            messages.append(message)
        for bucket, mine in zip(buckets, messages, strict=True):
            own = known.flat(str(rank.index), bucket).add_(q.decode((mine,), bucket.data))
            bucket.data.copy_(own)
            for other in part.to:
                message, _ = await rank.recv(mine.new_empty(mine.shape), other, bucket.name)
                known.flat(str(other), bucket).add_(q.decode((message,), bucket.data))

    def _codec(self, memory: Memory) -> Coder:
        coder = (ByteGrad() if self.bits == 8 else Dense()).coder(memory)
        assert coder is not None
        return coder

    async def leave(self, rank: Rank, state: _State) -> None:
        await average(rank)
        state.begin(rank, await rank.params())


def ring(rank: Rank) -> Round:
    """Returns this rank's neighbours on the ring and its mixing shares."""
    return mixing_round("ring", 1.0, rank.size, rank.index, 0)
