"""Shapes against the verbs of a Rank: servers and workers, a deadline, a two-hop reduce.

Shown in docs/shapes.md; what of each is run by a test is said there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.compressors import Compressor
from workbench.rank import Bucket, Memory, Rank
from workbench.settings import knob
from workbench.strategies import Strategy


class Ask(IntEnum):
    """What a server is asked."""

    LOOK_UP = 0
    PUSH = 1
    CENTRE = 2


class Shadowed:
    """What a rank remembers: a server its table and the centre by bucket, a trainer whether its shadow is idle."""

    def __init__(self) -> None:
        self.table = torch.Tensor()
        self.centre: dict[int, Tensor] = {}
        self.idle = True


@dataclass(frozen=True, kw_only=True)
class ShadowSync(Strategy):
    """Embeddings on servers; dense layers replicated, trained by several workers each, kept together by a shadow.

        rows <- look_up(ids);  push(ids, gradient of rows)              each worker, each step
        centre <- (1-a) centre + a params;  params <- (1-a) params + a centre        the shadow, all the time

    A batch is (ids, rest); the loss takes ((ids, rest), rows). No worker ever waits for the shadow, which begins
    another round when it is through with one and a step has been made since.

    Reference: Zheng et al., "ShadowSync: Performing Synchronization in the Background for Highly Scalable
    Distributed Training", 2020, https://arxiv.org/abs/2003.03477
    """

    servers: int = knob(1, 1, 64, live=False, unit="ranks", doc="the first ranks hold embeddings and centres")
    rows: int = knob(1000, 1, 10**8, live=False, log=True, doc="rows of the embedding table")
    width: int = knob(16, 1, 4096, live=False, doc="numbers per row")
    alpha: float = knob(0.5, 0.01, 1.0, doc="a: how far the shadow pulls replica and centre together")

    lockstep: ClassVar[bool] = False
    periodic: ClassVar[bool] = True
    exchanges: ClassVar[str] = "parameters"
    workers: ClassVar[int] = 2

    def trains(self, index: int, size: int) -> bool:
        return index >= self.servers

    def init(self, rank: Rank, params: list[Bucket]) -> Shadowed:
        state = Shadowed()
        if rank.role == "server":
            state.table = torch.zeros(-(-self.rows // self.servers), self.width)
        return state

    async def step(self, rank: Rank, state: Shadowed) -> None:
        ids, rest = await rank.batch()
        rows = torch.zeros(len(ids), self.width, requires_grad=True)
        for server in range(self.servers):
            await rank.send(self._asked(Ask.LOOK_UP, rank.worker, ids[ids % self.servers == server]), server, "ask")
        for server in range(self.servers):
            got = await rank.recv(None, server, f"rows {rank.worker}")
            if got is None:
                return
            rows.data[ids % self.servers == server] = got[0]
        await rank.forward(((ids, rest), rows))
        await rank.backward()
        for server in range(self.servers):
            its = ids % self.servers == server
            await rank.send(self._asked(Ask.PUSH, rank.worker, ids[its]), server, "ask")
            await rank.send(rows.grad[its], server, f"push {rank.worker}")
        await rank.update()
        if state.idle:
            state.idle = False
            await rank.send(torch.zeros(1), rank.index, "stepped")

    async def background(self, rank: Rank, state: Shadowed) -> None:
        await (self._serve(rank, state) if rank.role == "server" else self._shadow(rank, state))

    async def _shadow(self, rank: Rank, state: Shadowed) -> None:
        while await rank.recv(None, rank.index, "stepped") is not None:
            for bucket in await rank.params():
                server = bucket.index % self.servers
                await rank.send(self._asked(Ask.CENTRE, bucket.index), server, "ask")
                await rank.send(bucket.data, server, f"params {bucket.index}")
                if (got := await rank.recv(None, server, f"centre {bucket.index}")) is None:
                    return
                bucket.data.lerp_(got[0], self.alpha)
            state.idle = True

    async def _serve(self, rank: Rank, state: Shadowed) -> None:
        while (got := await rank.recv(None, kind="ask")) is not None:
            (what, which, *ids), source = got[0].tolist(), got[1]
            rows = torch.tensor(ids, dtype=torch.int64) // self.servers
            match what:
                case Ask.LOOK_UP:
                    await rank.send(state.table[rows], source, f"rows {which}")
                case Ask.PUSH:
                    grad, _ = await rank.recv(None, source, f"push {which}")
                    state.table.index_add_(0, rows, grad, alpha=-rank.lr)
                case Ask.CENTRE:
                    theirs, _ = await rank.recv(None, source, f"params {which}")
                    centre = state.centre.setdefault(which, theirs.clone()).lerp_(theirs, self.alpha)
                    await rank.send(centre, source, f"centre {which}")

    async def leave(self, rank: Rank, state: Shadowed) -> None:
        for bucket in await rank.params():
            bucket.data.mul_(rank.role == "trainer").div_(rank.size - self.servers)
            await rank.all_reduce(bucket.data, "sum", bucket.name)

    def _asked(self, what: int, which: int = 0, ids: Tensor | None = None) -> Tensor:
        head = torch.tensor([what, which])
        return head if ids is None else torch.cat([head, ids])


@dataclass(frozen=True, kw_only=True)
class TwoHop(Compressor):
    """A mean of 8-bit codes: codes cannot be added, so each rank sums one chunk, codes it again and hands it round.

        codes of chunk j -> rank j;  sum_j = sum of decoded chunks;  codes of sum_j -> everybody

    Sends (p-1)/p (n + n) bytes and 4 bytes per chunk and hop, a quarter of a dense all-reduce, whatever p.

    Reference: Markov et al., "CGX: Adaptive System Support for Communication-Efficient Deep Learning", Middleware
    2022, https://arxiv.org/abs/2111.08617
    """

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        n = bucket.data.numel()
        codes, scale = coded(pad(bucket.data, (0, -n % rank.size)).view(rank.size, -1))
        own = (codes * scale).view(-1)[:n]
        codes = await rank.all_to_all(codes, bucket.name)
        scale = await rank.all_to_all(scale, bucket.name)
        codes, scale = coded((codes * scale).sum(0))
        codes = await rank.all_gather(codes, bucket.name)
        scale = await rank.all_gather(scale, bucket.name)
        bucket.data.copy_((codes * scale).view(-1)[:n])
        return own


def coded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(..., n) -> int8 codes (..., n) and their scale (..., 1): each row's largest magnitude is 127."""
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / scale.clamp_min(torch.finfo(rows.dtype).tiny)).round().to(torch.int8), scale
