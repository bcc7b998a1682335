"""Stale synchronous parallel (SSP)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Bucket, Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy
from workbench.strategies._server import Copies, answer, dense_only, post, taken, tell, told

UNBOUNDED = 64  # the end of the scale of `bound`; it stands for infinity


class _State(Copies):
    """State of one rank: its clock and the age of its copy. The server also has the clocks of all ranks."""

    def __init__(self, params: list[Bucket], size: int) -> None:
        super().__init__(params)
        self.clock = 0  # iterations that this rank has finished
        self.seen = 0  # its copy includes this many iterations of every rank
        self.asked = False  # whether it has requested the server's parameters and not read them yet
        self.clocks = [0] * size  # by rank, the updates that the server has applied


@dataclass(frozen=True, kw_only=True)
class BoundedStaleness(Strategy):
    """Ranks train at their own pace, but no rank begins an iteration more than s ahead of the slowest.

        rank:    begin iteration c only if c - min_j c_j <= s     c_j: iterations that rank j has finished
                 params_i <- centre, if its copy is older than that allows
                 params_i <- optimizer_i(params_i, grad_i);   push the change;   c_i <- c_i + 1
        server:  centre <- centre + the pushed change;   answers a fetch for iteration c once min_j c_j >= c - s

    So in iteration c a rank sees its own updates and every update of the other ranks' first c - s iterations. No rank
    ever finishes more than s + 1 iterations more than another. A rank requests parameters together with its push, and
    waits for them before its next iteration. Updates are summed, not averaged. So s = 0 is DDP at p times the learning
    rate, with plain or momentum SGD. At s = 64 there is no bound: ranks never wait and fetch in every iteration (ASP).

    A rank pushes the model's bytes in every iteration and fetches them only when its copy is too old. That is once in s
    + 1 iterations if all ranks are equally fast. A rank that waits for a slower rank fetches in every iteration. The
    server on rank 0 sends every rank's fetches. The Sample "ahead" is a fetching rank's lead over the slowest, in
    iterations. So a larger s makes copies older even if no rank is late. With `eager` copies are as new as without a
    bound and cost as many bytes. This is the eager SSP of Dai et al. Their servers send without a request.

    When to use it: different ranks are slow at different times. A bound of a few iterations then hides this. With any
    bound all ranks end up waiting for a rank that is always slow. The sum of p updates needs a learning rate 1/p of
    DDP's.

    Reference: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013,
    https://papers.nips.cc/paper/2013/hash/b7bb35b9c6ca2aee2df08cf09d7016c2-Abstract.html; Dai et al., "High-Performance
    Distributed ML at Scale through Parameter Server Consistency Models", AAAI 2015, https://arxiv.org/abs/1410.8043
    """

    bound: int = knob(
        3, 0, UNBOUNDED, unit="iterations", doc=f"s: largest lead over the slowest rank; {UNBOUNDED}: no limit"
    )
    eager: bool = knob(False, doc="fetch in every iteration; false: only if the copy is too old")

    lockstep: ClassVar[bool] = False
    periodic: ClassVar[bool] = True
    exchanges: ClassVar[str] = "displacements"
    in_flight: ClassVar[bool] = True
    own: ClassVar[dict[str, str]] = {
        "base": "drop", "centre": "drop", "asked": "drop", "clock*": "drop", "seen": "drop",
    }  # fmt: skip

    @property
    def free(self) -> bool:
        """Whether there is no bound."""
        return self.bound == UNBOUNDED

    def propagation(self, size: int) -> int:
        return 0 if self.free else self.bound + 2

    def refuses(self, compressor: Any) -> str | None:
        return dense_only("BoundedStaleness", compressor)

    def init(self, rank: Rank, params: list[Bucket]) -> _State:
        return _State(params, rank.size)

    async def step(self, rank: Rank, state: _State) -> None:
        buckets = await rank.params()
        memory = state.memory
        await self._fetched(rank, state, buckets)
        await rank.forward()
        await rank.backward()
        await rank.update()
        state.clock += 1
        needs = 0 if self.free else state.clock - self.bound
        state.asked = self.free or self.eager or needs > state.seen
        await tell(rank, 0, "push", state.clock, state.asked, needs)
        for bucket in buckets:
            base = memory.flat("base", bucket)
            await post(rank, 0, "push", [bucket.like(bucket.data - base)])
            base.copy_(bucket.data)

    async def _fetched(self, rank: Rank, state: _State, buckets: list[Bucket]) -> None:
        """Waits for the server's parameters if this rank requested them, and copies them."""
        if not state.asked:
            return
        state.asked = False
        (state.seen,) = await answer(rank, 0)
        await rank.sample("ahead", state.clock - state.seen)
        for bucket, centre in zip(buckets, await taken(rank, 0, "fetch", buckets), strict=True):
            bucket.data.copy_(centre.data)
            state.memory.flat("base", bucket).copy_(centre.data)

    async def background(self, rank: Rank, state: _State) -> None:
        if rank.index:
            return
        buckets = await rank.params()
        memory = state.memory
        waiting: list[tuple[int, int]] = []  # (rank, the clock that the slowest rank must reach)
        while (got := await told(rank, "push")) is not None:
            (clock, asks, needs), source = got
            for moved in await taken(rank, source, "push", buckets):
                memory.flat("centre", moved).add_(moved.data)
            state.clocks[source] = clock
            if asks:
                waiting.append((source, needs))
            slowest = min(state.clocks)
            for who, needs in waiting:
                if needs <= slowest:
                    await tell(rank, who, "answer", slowest)
                    await post(rank, who, "fetch", [b.like(memory.flat("centre", b)) for b in buckets])
            waiting = [(who, needs) for who, needs in waiting if needs > slowest]

    async def known(self, rank: Rank, state: _State) -> list[Bucket] | None:
        if rank.index:
            return None
        buckets = await rank.params()
        memory = state.memory
        return [bucket.like(memory.flat("centre", bucket)) for bucket in buckets]

    async def leave(self, rank: Rank, state: _State) -> None:
        """Gives every rank the centre, which contains every update."""
        buckets = await rank.params()
        memory = state.memory
        await self._fetched(rank, state, buckets)
        for bucket in buckets:
            bucket.data.copy_(memory.flat("centre", bucket))
            await rank.broadcast(bucket.data, 0, bucket.name)
            memory.flat("base", bucket).copy_(bucket.data)
