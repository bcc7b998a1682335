"""Elastic averaging in the background."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.rank import Bucket, Rank
from workbench.settings import knob
from workbench.strategies._copies import copies
from workbench.strategies._server import leaves_none, post, taken, tell, told
from workbench.strategies._shadow import Shadow, Shadowing


@dataclass(frozen=True, kw_only=True)
class ShadowEASGD(Shadowing):
    """Ranks train without waiting, while a shadow on each exchanges its replica with a common centre on servers.

        step:    params_i <- optimizer_i(params_i, grad_i)
        shadow:  send before <- params_i;   params_i += alpha (centre - before)     when the centre comes back
        server:  centre <- (1 - alpha) centre + alpha before_i                      for each that comes, one by one

    A shadow begins a round when the last round is over and the rank has made a step since. The Sample "sync gap" is the
    number of steps from one round to the next. Each rank meets the servers at its own pace. The returned centre has
    already moved, as in the paper. So unlike EASGD the sum of all parameters and the centre is not constant. The
    correction is added, so steps made during a round are kept.

    A trainer sends the model's bytes once per round and receives them once. The servers send p times as many, so their
    ports are the bottleneck. Servers hold equal parts of the buckets. A server on rank 0 also trains. It exchanges with
    itself without sending, once in p - 1 rounds of the other ranks.

    When the strategy is left, all trainers meet the centre once more with 1/p of alpha. Every rank then continues from
    the centre, the method's result.

    When to use it: ranks differ in speed, so averaging ranks (ShadowMA) would follow the slowest rank's rounds. Servers
    must have bandwidth to spare.

    Reference: Zheng et al., "ShadowSync: Performing Synchronization in the Background for Highly Scalable
    Distributed Training", 2020, https://arxiv.org/abs/2003.03477; adding the correction as in Bagua's asynchronous
    model average, Gan et al., VLDB 2021, https://arxiv.org/abs/2107.01499
    """

    servers: int = knob(0, 0, 64, unit="ranks", doc="last ranks that are only servers; 0: rank 0 also serves")
    alpha: float = knob(
        0.5, 0.0, 1.0, doc="alpha: share of their distance by which replica and centre approach in a round"
    )

    lockstep: ClassVar[bool] = False
    periodic: ClassVar[bool] = True
    plain: ClassVar[bool] = False
    exchanges: ClassVar[str] = "parameters"
    in_flight: ClassVar[bool] = True  # a server's part depends on the buckets
    own: ClassVar[dict[str, str]] = {"centre": "drop", "last": "drop", "asked": "drop"}

    def trains(self, index: int, size: int) -> bool:
        return index < size - self.servers

    def serving(self, size: int) -> list[int]:
        """Returns the ranks that serve. Server k of n holds buckets k, k + n, k + 2 n and so on."""
        return list(range(size - self.servers, size)) or [0]

    def refuses_size(self, size: int) -> str | None:
        return leaves_none(self.servers, size)

    def init(self, rank: Rank, params: list[Bucket]) -> Shadow:
        return Shadow(rank, copies(params, "centre"))

    async def step(self, rank: Rank, state: Shadow) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()

    async def background(self, rank: Rank, state: Shadow) -> None:
        if rank.size > 1 and rank.index in self.serving(rank.size):
            return await self._serve(rank, state)
        while step := await rank.again(alone=True):
            await self._meet(rank, state, step)
            await state.synchronised(rank, step)

    async def _meet(self, rank: Rank, state: Shadow, step: int) -> None:
        """Makes a shadow's round: this rank's parameters and the centre move towards each other."""
        servers, buckets = self.serving(rank.size), await self.replica(rank)
        begun = [bucket.like(bucket.data.clone()) for bucket in buckets]
        for k, server in enumerate(servers):
            if server == rank.index:
                self._give_way(state, begun)
            else:
                await tell(rank, server, "turn", step)
                await post(rank, server, "shadow", begun[k :: len(servers)])
        for k, server in enumerate(servers):
            if server != rank.index:
                for centre in await taken(rank, server, "centre", buckets[k :: len(servers)]):
                    state.memory.flat("centre", centre).copy_(centre.data)
        for bucket, before in zip(buckets, begun, strict=True):
            bucket.data.add_(state.memory.flat("centre", bucket) - before.data, alpha=self.alpha)

    async def _serve(self, rank: Rank, state: Shadow) -> None:
        """Runs a server: one round for each replica that arrives."""
        rounds = 0
        while (turn := await told(rank, "turn")) is not None:
            await self._met(rank, state, turn[1])
            rounds += 1
            if rank.role == "trainer" and rounds % (rank.size - 1) == 0:
                await self._meet(rank, state, rank.step)

    async def _met(self, rank: Rank, state: Shadow, who: int) -> None:
        """Makes the server's part of a round."""
        servers = self.serving(rank.size)
        mine = (await self.replica(rank))[servers.index(rank.index) :: len(servers)]
        self._give_way(state, await taken(rank, who, "shadow", mine))
        await post(rank, who, "centre", [bucket.like(state.memory.flat("centre", bucket)) for bucket in mine])

    def _give_way(self, state: Shadow, replica: list[Bucket]) -> None:
        for bucket in replica:
            state.memory.flat("centre", bucket).lerp_(bucket.data, self.alpha)

    async def known(self, rank: Rank, state: Shadow) -> list[Bucket]:
        return [bucket.like(state.memory.flat("centre", bucket)) for bucket in await self.replica(rank)]

    async def leave(self, rank: Rank, state: Shadow) -> None:
        servers, buckets = self.serving(rank.size), await self.replica(rank)
        for k, bucket in enumerate(buckets):
            centre = state.memory.flat("centre", bucket)
            own = self.alpha / self.batches(rank.size) if rank.role == "trainer" else 0.0
            bucket.data.mul_(own)
            if rank.index == servers[k % len(servers)]:
                bucket.data.add_(centre, alpha=1.0 - self.alpha)
            await rank.all_reduce(bucket.data, "sum", bucket.name)
            centre.copy_(bucket.data)
