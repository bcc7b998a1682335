"""An asynchronous parameter server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from workbench.rank import Bucket, Memory, Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy
from workbench.strategies._former import async_server
from workbench.strategies._server import Copies, answer, dense_only, leaves_none, post, taken, tell, told


class _State(Copies):
    """State of one rank: a trainer's step counts, and a server's parameters."""

    def __init__(self, params: list[Bucket]) -> None:
        super().__init__(params)
        self.version = 0  # how often the centre was moved
        self.versions: dict[int, int] = {}  # by server, the version that was fetched last
        self.owed: set[int] = set()  # servers with an unread answer to a push
        self.since_push = self.since_fetch = 0


@dataclass(frozen=True, kw_only=True)
class AsyncServer(Strategy):
    """Ranks train at their own pace. They push displacements to a server and fetch its parameters.

        trainer:  params_i <- optimizer_i(params_i, grad_i)                   every step
                  push d_i = params_i - base_i;   base_i <- params_i          every `push` steps
                  params_i <- centre + params_i - base_i;   base_i <- centre  every `fetch` steps
        server:   v <- m v + w d_i;   centre <- centre + r v;   version <- version + 1       whenever a push comes

    With p trainers, w is 1/p ("mean"), 1 ("sum") or 1 / max(1, staleness) ("staleness"). A push's staleness is the
    number of pushes that the server has applied since the sender's last fetch. It is in the record. The server's
    optimizer is momentum SGD on the pushes, with r = `server_lr` and m = `server_momentum`. By default it adds the
    pushes. v is dropped when the strategy is left.

    A trainer sends the model's bytes once per push and receives them once per fetch. The server sends p times as many,
    so its port is the bottleneck. A server on rank 0 runs next to its training. Several servers hold equal parts of the
    buckets.

    When to use it: ranks differ in speed for a long time, and the network is fast. The staler the pushes, the smaller
    the learning rate must be. If pushes are t versions old and have weight 1, plain SGD is stable up to a limit. The
    learning rate must be at most 2 sin(pi / (2 (2 t + 1))) / curvature. SyncServer is the same with ranks that wait for
    each other.

    Reference: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012,
    https://papers.nips.cc/paper/4687-large-scale-distributed-deep-networks; weights by staleness: Zhang et al.,
    "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016, https://arxiv.org/abs/1511.05950
    """

    servers: int = knob(0, 0, 64, unit="ranks", doc="last ranks that are only servers; 0: rank 0 also serves")
    push: int = knob(1, 1, 256, unit="steps", log=True, doc="steps between two pushes of one trainer")
    fetch: int = knob(1, 1, 256, unit="steps", log=True, doc="steps between two fetches of one trainer")
    weight: str = knob("mean", choices=("mean", "sum", "staleness"), doc="weight of a push: 1/p, 1 or 1/staleness")
    server_lr: float = knob(1.0, 0.0, 2.0, doc="r: learning rate of the server's optimizer; 1 adds pushes as they are")
    server_momentum: float = knob(0.0, 0.0, 0.99, doc="m: momentum of the server's optimizer; 0: none")

    lockstep: ClassVar[bool] = False
    periodic: ClassVar[bool] = True
    exchanges: ClassVar[str] = "displacements"
    in_flight: ClassVar[bool] = True
    waits: ClassVar[bool] = False  # whether the server answers only when every trainer has asked
    old: ClassVar[tuple[str, ...]] = ("synchronous",)
    own: ClassVar[dict[str, str]] = {
        "pushed": "sum", "owed": "sum", "base": "drop", "centre": "drop", "velocity": "drop", "since_*": "drop",
        "version*": "drop",
    }  # fmt: skip

    @classmethod
    def formerly(cls, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return async_server(cls.__name__, settings)

    def trains(self, index: int, size: int) -> bool:
        return index < size - self.servers

    def serving(self, size: int) -> list[int]:
        """Returns the ranks that serve. Server k of n holds buckets k, k + n, k + 2 n and so on."""
        return list(range(size - self.servers, size)) or [0]

    def refuses_size(self, size: int) -> str | None:
        return leaves_none(self.servers, size)

    def refuses(self, compressor: Any) -> str | None:
        return dense_only(type(self).__name__, compressor)

    def init(self, rank: Rank, params: list[Bucket]) -> _State:
        return _State(params)

    async def step(self, rank: Rank, state: _State) -> None:
        buckets = await rank.params()
        memory = state.memory
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
            await tell(rank, server, "ask", push, fetch, state.versions.get(server, 0))
            for bucket in buckets[k :: len(servers)] if push else ():
                base = memory.flat("base", bucket)
                await post(rank, server, "push", [bucket.like(bucket.data - base)])
                base.copy_(bucket.data)
            state.owed.add(server)
        for k, server in enumerate(servers):
            if fetch or self.waits:
                await self._answer(rank, state, server, buckets[k :: len(servers)] if fetch else [])
        state.since_push = 0 if push else state.since_push
        state.since_fetch = 0 if fetch else state.since_fetch

    async def _answer(self, rank: Rank, state: _State, server: int, buckets: list[Bucket]) -> None:
        """Reads a server's answer to a push or a fetch, and applies its part of the parameters."""
        pushed, version, staleness = await answer(rank, server)
        state.owed.discard(server)
        if pushed:
            await rank.sample("staleness", staleness)
        for bucket, centre in zip(buckets, await taken(rank, server, "fetch", buckets), strict=True):
            base = state.memory.flat("base", bucket)
            bucket.data.sub_(base).add_(centre.data)
            base.copy_(centre.data)
            state.versions[server] = version

    async def background(self, rank: Rank, state: _State) -> None:
        servers, trainers = self.serving(rank.size), rank.size - self.servers
        if rank.index not in servers:
            return
        buckets = await rank.params()
        memory = state.memory
        buckets = buckets[servers.index(rank.index) :: len(servers)]
        waiting: list[tuple[int, int, int, int]] = []
        while (got := await told(rank, "ask")) is not None:
            (push, fetch, version), source = got
            staleness = state.version - version
            for moved in await taken(rank, source, "push", buckets if push else ()):
                memory.flat("pushed", moved).add_(moved.data, alpha=self._share(trainers, staleness))
            waiting.append((source, push, fetch, staleness))
            if self.waits and len(waiting) < trainers:
                continue
            if any(pushed for _, pushed, _, _ in waiting):
                self._move(memory, buckets)
                state.version += 1
            for who, pushed, fetched, stale in waiting:
                await tell(rank, who, "answer", pushed, state.version, stale)
                await post(rank, who, "fetch", [b.like(memory.flat("centre", b)) for b in buckets] if fetched else ())
            waiting = []

    def _move(self, memory: Memory, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            move = pushed = memory.flat("pushed", bucket)
            if self.server_momentum:
                move = memory.flat("velocity", bucket).mul_(self.server_momentum).add_(pushed)
            memory.flat("centre", bucket).add_(move, alpha=self.server_lr)
            pushed.zero_()

    def _share(self, trainers: int, staleness: int) -> float:
        return {"mean": 1 / trainers, "sum": 1.0}.get(self.weight, 1 / max(1, staleness))

    async def known(self, rank: Rank, state: _State) -> list[Bucket]:
        buckets = await rank.params()
        slot = "centre" if self.serving(rank.size) == [rank.index] else "base"
        return [bucket.like(state.memory.flat(slot, bucket)) for bucket in buckets]

    async def leave(self, rank: Rank, state: _State) -> None:
        """Gives every rank the centre plus the unpushed displacements, so that other ranks can serve afterwards."""
        servers, buckets = self.serving(rank.size), await rank.params()
        memory = state.memory
        for k, bucket in enumerate(buckets):
            base, centre = memory.flat("base", bucket), memory.flat("centre", bucket)
            serves = rank.index == servers[k % len(servers)]
            bucket.data.sub_(base).div_(rank.size - self.servers)
            if serves:
                bucket.data.add_(centre)
            await rank.all_reduce(bucket.data, "sum", bucket.name)
            base.copy_(bucket.data)
            centre.copy_(bucket.data)
            if self.server_momentum:
                velocity = memory.flat("velocity", bucket).mul_(serves)
                await rank.all_reduce(velocity, "sum", f"velocity {bucket.name}")
        versions = torch.tensor([state.version * (rank.index == server) for server in servers])
        await rank.all_reduce(versions, "sum", "versions")
        state.versions = dict(zip(servers, versions.tolist(), strict=True))
