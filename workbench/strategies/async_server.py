"""An asynchronous parameter server: nobody waits for anybody but the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from workbench.knobs import knob
from workbench.ops import Bucket, Memory, Rank
from workbench.strategies._base import Strategy


class _State:
    """What one rank remembers: as a trainer since when it is on its own, as a server the parameters it holds."""

    def __init__(self) -> None:
        self.memory: Memory | None = None  # "base": own parameters when they were last the server's; "centre": its own
        self.version = 0  # of the centre: pushes that it has taken in
        self.versions: dict[int, int] = {}  # by server, that which was fetched last
        self.owed: set[int] = set()  # servers whose answer to a push has not been read
        self.since_push = self.since_fetch = 0

    def begin(self, buckets: list[Bucket]) -> Memory:
        """Before the first step all parameters are equal: they are the base and the centre."""
        if self.memory is None:
            self.memory = Memory()
            for bucket in buckets:
                self.memory.flat("base", bucket).copy_(bucket.data)
                self.memory.flat("centre", bucket).copy_(bucket.data)
        return self.memory


@dataclass(frozen=True, kw_only=True)
class AsyncServer(Strategy):
    """Each rank trains at its own pace, pushes what it has moved to a server and fetches the server's parameters.

        trainer:  params_i <- optimizer_i(params_i, grad_i)                   every step
                  push d_i = params_i - base_i;   base_i <- params_i          every `push` steps
                  params_i <- centre + params_i - base_i;   base_i <- centre  every `fetch` steps
        server:   centre <- centre + w d_i;   version <- version + 1          whenever a push comes

    w is 1/p of p trainers ("mean"), 1 ("sum") or 1 / max(1, staleness) ("staleness"). The staleness of a push is
    the number of pushes that the server has taken in since its sender last fetched; it is on the record. A trainer
    sends the model's bytes once per push and gets them once per fetch; the server p times as many: its port is the
    narrow place. With `servers` = 0 the server runs beside rank 0, which trains like all others; else the last
    `servers` ranks only serve, each an equal part of the buckets, and the others train.

    When to use it: ranks differ in speed for long, and wires are fast. `synchronous` lets the server answer only
    when every trainer has pushed: the same bytes and roles, everybody waits, staleness 0.

    Reference: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012,
    https://papers.nips.cc/paper/4687-large-scale-distributed-deep-networks; weights by staleness: Zhang et al.,
    "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016, https://arxiv.org/abs/1511.05950
    """

    servers: int = knob(0, 0, 64, unit="ranks", doc="ranks that only serve, the last ones; 0: beside rank 0")
    push: int = knob(1, 1, 256, unit="steps", log=True, doc="steps between two pushes of one trainer")
    fetch: int = knob(1, 1, 256, unit="steps", log=True, doc="steps between two fetches of one trainer")
    weight: str = knob("mean", choices=("mean", "sum", "staleness"), doc="how much one push moves the centre")
    synchronous: bool = knob(False, doc="the server answers only when every trainer has asked")

    lockstep: ClassVar[bool] = False
    periodic: ClassVar[bool] = True
    exchanges: ClassVar[str] = "displacements"

    def trains(self, index: int, size: int) -> bool:
        return index < size - self.servers

    def serving(self, size: int) -> list[int]:
        """The ranks that serve; server k of n holds buckets k, k + n, k + 2 n, ..."""
        return list(range(size - self.servers, size)) or [0]

    def heard(self, size: int) -> int:
        return min(self.push, self.fetch) + 1 if self.synchronous else 0

    def refuses_size(self, size: int) -> str | None:
        if self.servers < size:
            return None
        return f"servers={self.servers} leaves none of {size} ranks to train; use at most {size - 1}, or more ranks"

    def refuses(self, compressor: Any) -> str | None:
        if type(compressor).__name__ == "Dense":
            return None
        return f"AsyncServer sends messages, which {compressor} cannot encode; use Dense with it, or LocalSGD or DDP"

    def init(self, rank: Rank) -> _State:
        return _State()

    async def step(self, rank: Rank, state: _State) -> None:
        buckets = await rank.params()
        memory = state.begin(buckets)
        await rank.forward()
        await rank.backward()
        await rank.update()
        state.since_push += 1
        state.since_fetch += 1
        push, fetch = state.since_push >= self.push, state.since_fetch >= self.fetch
        if not push and not fetch:
            return
        servers = self.serving(rank.size)
        for k, server in enumerate(servers):
            if server in state.owed:
                await self._answer(rank, state, server, [])
            await rank.send(torch.tensor([push, fetch, state.versions.get(server, 0)]), server, "ask")
            for bucket in buckets[k :: len(servers)] if push else ():
                base = memory.flat("base", bucket)
                await rank.send(bucket.data - base, server, f"push {bucket.name}")
                base.copy_(bucket.data)
            state.owed.add(server)
        for k, server in enumerate(servers):
            if fetch or self.synchronous:
                await self._answer(rank, state, server, buckets[k :: len(servers)] if fetch else [])
        state.since_push = 0 if push else state.since_push
        state.since_fetch = 0 if fetch else state.since_fetch

    async def _answer(self, rank: Rank, state: _State, server: int, buckets: list[Bucket]) -> None:
        """Reads what a server answers to a push or a fetch, and takes over its part of the parameters."""
        head, _ = await rank.recv(torch.zeros(3, dtype=torch.int64), server, "answer")
        pushed, version, staleness = head.tolist()
        state.owed.discard(server)
        if pushed:
            await rank.sample("staleness", staleness)
        for bucket in buckets:
            base = state.begin([]).flat("base", bucket)
            centre, _ = await rank.recv(bucket.data.new_empty(bucket.data.shape), server, f"fetch {bucket.name}")
            bucket.data.sub_(base).add_(centre)
            base.copy_(centre)
            state.versions[server] = version

    async def background(self, rank: Rank, state: _State) -> None:
        servers, trainers = self.serving(rank.size), rank.size - self.servers
        if rank.index not in servers:
            return
        buckets = await rank.params()
        memory = state.begin(buckets)
        buckets = buckets[servers.index(rank.index) :: len(servers)]
        waiting: list[tuple[int, bool, bool, int]] = []
        while (got := await rank.recv(torch.zeros(3, dtype=torch.int64), None, "ask")) is not None:
            (push, fetch, version), source = got[0].tolist(), got[1]
            moved = []
            for bucket in buckets if push else ():
                moved.append(await rank.recv(bucket.data.new_empty(bucket.data.shape), source, f"push {bucket.name}"))
            staleness = state.version - version
            for bucket, (move, _) in zip(buckets, moved, strict=False):
                memory.flat("centre", bucket).add_(move, alpha=self._share(trainers, staleness))
            state.version += bool(push) and not self.synchronous
            waiting.append((source, push, fetch, staleness))
            if self.synchronous and len(waiting) < trainers:
                continue
            state.version += self.synchronous and any(pushed for _, pushed, _, _ in waiting)
            for who, pushed, fetched, stale in waiting:
                await rank.send(torch.tensor([pushed, state.version, stale]), who, "answer")
                for bucket in buckets if fetched else ():
                    await rank.send(memory.flat("centre", bucket), who, f"fetch {bucket.name}")
            waiting = []

    def _share(self, trainers: int, staleness: int) -> float:
        return {"mean": 1 / trainers, "sum": 1.0}.get(self.weight, 1 / max(1, staleness))

    async def known(self, rank: Rank, state: _State) -> list[Bucket]:
        buckets = await rank.params()
        slot = "centre" if self.serving(rank.size) == [rank.index] else "base"
        return [bucket.like(state.begin(buckets).flat(slot, bucket)) for bucket in buckets]

    async def leave(self, rank: Rank, state: _State) -> None:
        """The centre, moved by what trainers have not pushed."""
        servers, buckets = self.serving(rank.size), await rank.params()
        memory = state.begin(buckets)
        for k, bucket in enumerate(buckets):
            bucket.data.sub_(memory.flat("base", bucket)).div_(rank.size - self.servers)
            if rank.index == servers[k % len(servers)]:
                bucket.data.add_(memory.flat("centre", bucket))
            await rank.all_reduce(bucket.data, "sum", bucket.name)
