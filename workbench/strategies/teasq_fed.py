"""TEASQ-Fed: clients that are idle ask a server for work, and it mixes in what comes back by how stale it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any, ClassVar

import torch

from workbench.compressors import QSGD, Dense, Quantised, TopK
from workbench.rank import FLOATS, Bucket, Memory, Rank, StrategyError
from workbench.settings import knob
from workbench.strategies._base import Strategy
from workbench.strategies._copies import copies
from workbench.strategies._encoded import opened, packet, room
from workbench.strategies._server import dense_only, tell, told

ASK, PUSH = 0, 1  # what a trainer tells the server
SERVER = 0


class _State:
    """What one rank remembers: "known" is the model as its clients were last sent it; the rest is the server's."""

    def __init__(self, rank: Rank, params: list[Bucket]) -> None:
        self.chance = Memory(rank.memory.seed)  # of what this rank rounds as a trainer, and there as the server
        self.serving = Memory(rank.memory.seed + 50_021)
        self.turn = 0  # which of this rank's clients trains next, counted on and on
        mine = ["model", *(f"sent {r}" for r in range(rank.size))] if rank.index == SERVER else []
        self.memory = copies(params, "known", *mine)
        self.version = 0  # of the model: how often it was mixed
        self.running = 0  # tasks that are under way
        self.waiting: deque[int] = deque()  # ranks with an idle client that no task was given to
        self.cached = 0  # updates in "cache", which is the sum of S w by the sum of S: `weight`
        self.weight = self.stale = 0.0
        self.early = 0  # updates that were mixed in before there were enough, on leaving


@dataclass(frozen=True, kw_only=True)
class TEASQFed(Strategy):
    """Idle clients ask for a task, train from the model that they are sent, and a server mixes in every K updates.

        client:  ask;  w_h <- what the server sends, of version h
                 w_c <- `local` steps of the optimizer from w_h on f(w) + mu / 2 |w - w_h|^2;   push w_c - w_h
        server:  a task to whoever asks while fewer than ceil(C n) of n clients are at work; others wait in turn
                 once K updates have come:   S(t) = (1 + t)^-a,  t = version - h
                     u <- sum S(t_c) w_c / sum S(t_c),   b <- alpha S(mean t_c),   w <- (1 - b) w + b u

    Each rank has `clients` clients, which take turns; each has data of its own (`rank.client`), so with
    Digits(shards="dirichlet") each sees digits of its own. n is how many all ranks have, C is `share`. No more than
    one client of a rank is at work at once, so C limits anything only below 1 / `clients`. A step of the run is a task.
    With `deadline` a client begins no batch after so many ms and pushes what it has, one batch at least; the Sample
    "batches" says how many. With `weighted` an update counts for as much as the batches that it was trained on, S(t) n
    in place of S(t), as in FedAvg; without a deadline all clients train on as many, and it changes nothing.

    Both ways what a model differs by from what the other side knows crosses the wire, `density` of its entries in
    `bits` bits each: at 1 and 32, as it is. What a client does not push is lost; what the server does not send it
    sends later, for it keeps a copy of what each rank has been sent. After every `relax` mixings twice as many
    entries cross (0: never), as late differences are small. The Sample "staleness" is t of each update, "active" how
    many tasks were under way when one was given out, both on rank 0's record.

    The server runs beside rank 0. The run's optimizer keeps its state on each rank from task to task; plain SGD, the
    paper's, has none.

    When to use it: clients differ in speed and in data, and the way to the server is narrow. Slow clients' classes
    count for less, the more the larger a is: look at accuracy by class.

    The paper was at hand in its abstract and this project's notes; the formulas are those of TEA-Fed (Zhou et al.,
    2021), whose server this is. That differences are encoded, not models, is ours: of a model in which all but the
    largest weights are zero nothing is left to train.

    Reference: Jia, Liu, Zhou, Tian, Dong and Dou, "Efficient Asynchronous Federated Learning with Sparsification and
    Quantization", 2023, https://arxiv.org/abs/2312.15186
    """

    clients: int = knob(2, 1, 64, log=True, doc="clients of each rank, which take turns")
    share: float = knob(1.0, 0.01, 1.0, doc="C: of all clients, how many may be at work at once")
    cache: int = knob(2, 1, 256, log=True, unit="updates", doc="K: updates that the server mixes in at once")
    local: int = knob(4, 1, 1024, log=True, unit="batches", doc="of a client's task")
    deadline: float = knob(0.0, 0.0, 60_000.0, unit="ms", doc="after which a client begins no batch; 0: none")
    mixing: float = knob(0.8, 0.01, 1.0, doc="alpha: how far the server goes to what has come, if none of it is stale")
    staleness: float = knob(0.5, 0.0, 4.0, doc="a: how much less an update counts, the staler it is")
    proximal: float = knob(0.01, 0.0, 100.0, doc="mu: how strongly a client is held to the model that it was sent")
    density: float = knob(0.25, 0.0001, 1.0, log=True, doc="fraction of the entries that cross the wire")
    bits: int = knob(8, choices=(2, 4, 8, 32), doc="of each entry that crosses; 32: as it is")
    weighted: bool = knob(False, doc="does an update count for as much as it was trained on?")
    relax: int = knob(0, 0, 4096, unit="mixings", doc="after which twice as many entries cross; 0: never")

    dtypes: ClassVar[tuple[str, ...]] = FLOATS
    lockstep: ClassVar[bool] = False
    periodic: ClassVar[bool] = True
    plain: ClassVar[bool] = False
    exchanges: ClassVar[str] = "displacements"
    own: ClassVar[dict[str, str]] = {
        "cache*": "drop", "early": "drop", "known": "drop", "model": "drop", "sent *": "drop", "running": "drop",
        "stale": "drop", "turn": "drop", "version": "drop", "waiting": "drop", "weight": "drop",
    }  # fmt: skip

    def refuses(self, compressor: Any) -> str | None:
        return dense_only("TEASQFed", compressor)

    def init(self, rank: Rank, params: list[Bucket]) -> _State:
        return _State(rank, params)

    async def step(self, rank: Rank, state: _State) -> None:
        buckets = await rank.params()
        await rank.client(state.turn % self.clients, self.clients)
        state.turn += 1
        await tell(rank, SERVER, "client", ASK, 0, 0)
        got = await told(rank, "task", SERVER)
        if got is None:
            raise StrategyError("a client's task did not come: the server has ended")
        (version,), _ = got
        for bucket in buckets:
            known = state.memory.flat("known", bucket)
            known.add_(await self._come(rank, SERVER, bucket.like(known), version, "model"))
            bucket.data.copy_(known)
        done = await self._train(rank, state.memory)
        await rank.sample("batches", done)
        await tell(rank, SERVER, "client", PUSH, version, done)
        codec = self._codec(version)
        for bucket in buckets:
            moved = bucket.data - state.memory.flat("known", bucket)
            await rank.send(packet(codec, state.chance, moved), SERVER, f"update {bucket.name}")

    async def _train(self, rank: Rank, memory: Memory) -> int:
        """A client's task; of how many batches."""
        began, done = await rank.clock(), 0
        while done < self.local:
            await rank.forward()
            await rank.backward()
            if self.proximal:
                for params, grad in zip(await rank.params(), await rank.grads(), strict=True):
                    grad.data.add_(params.data - memory.flat("known", params), alpha=self.proximal)
            await rank.update()
            done += 1
            if self.deadline and await rank.clock() - began >= self.deadline * 1e-3:
                break
        return done

    async def background(self, rank: Rank, state: _State) -> None:
        if rank.index != SERVER:
            return
        buckets = await rank.params()
        while (got := await told(rank, "client")) is not None:
            (what, version, done), source = got
            if what == ASK:
                state.waiting.append(source)
            else:
                state.running -= 1
                await self._cache(rank, state, buckets, source, version, done)
            while state.waiting and state.running < ceil(self.share * self.clients * rank.size):
                state.running += 1
                await rank.sample("active", state.running)
                await self._give(rank, state, buckets, state.waiting.popleft())

    async def _give(self, rank: Rank, state: _State, buckets: list[Bucket], to: int) -> None:
        """A task: the present model, as far as it differs from what `to` has been sent."""
        await tell(rank, to, "task", state.version)
        codec = self._codec(state.version)
        for bucket in buckets:
            sent = state.memory.flat(f"sent {to}", bucket)
            message = packet(codec, state.serving, state.memory.flat("model", bucket) - sent)
            sent.add_(opened(codec, message, sent))
            await rank.send(message, to, f"model {bucket.name}")

    async def _cache(self, rank: Rank, state: _State, buckets: list[Bucket], source: int, version: int,
                     done: int) -> None:  # fmt: skip
        """Takes in an update that was trained on so many batches, and mixes once there are enough."""
        stale = state.version - version
        await rank.sample("staleness", stale)
        share = (1 + stale) ** -self.staleness * (done if self.weighted else 1)
        for bucket in buckets:
            sent = state.memory.flat(f"sent {source}", bucket)
            update = await self._come(rank, source, bucket.like(sent), version, "update")
            state.memory.flat("cache", bucket).add_(update.add_(sent), alpha=share)
        state.cached, state.weight, state.stale = state.cached + 1, state.weight + share, state.stale + stale
        if state.cached >= self.cache:
            self._mix(state, buckets)

    def _mix(self, state: _State, buckets: Iterable[Bucket]) -> None:
        part = self.mixing * (1 + state.stale / state.cached) ** -self.staleness
        for bucket in buckets:
            cache = state.memory.flat("cache", bucket)
            state.memory.flat("model", bucket).lerp_(cache.div_(state.weight), part)
            cache.zero_()
        state.version += 1
        state.cached, state.weight, state.stale = 0, 0.0, 0.0

    async def _come(self, rank: Rank, source: int, like: Bucket, version: int, what: str) -> torch.Tensor:
        """What `source` has sent of a difference, for the place of `like`."""
        codec = self._codec(version)
        message, _ = await rank.recv(room(codec, like.data), source, f"{what} {like.name}")
        return opened(codec, message, like.data)

    def _codec(self, version: int) -> Quantised:
        """What turns a difference into a message, while the model is of this version."""
        density = min(1.0, self.density * 2.0 ** min(version // self.relax if self.relax else 0, 64))
        return _codec(density, self.bits)

    async def known(self, rank: Rank, state: _State) -> list[Bucket]:
        name = "model" if rank.index == SERVER else "known"
        return [bucket.like(state.memory.flat(name, bucket)) for bucket in await rank.params()]

    async def leave(self, rank: Rank, state: _State) -> None:
        """Updates that wait for others are mixed in, which a Mark says; everybody gets the server's model."""
        buckets = await rank.params()
        state.early = state.cached
        if state.cached:
            self._mix(state, buckets)
        for bucket in buckets:
            if rank.index == SERVER:
                bucket.data.copy_(state.memory.flat("model", bucket))
            await rank.broadcast(bucket.data, SERVER, bucket.name)
        await rank.client(0, 1)

    def left(self, state: _State) -> str | None:
        if not state.early:
            return None
        return f"the server mixed in {state.early} update{'s' * (state.early > 1)} without waiting for {self.cache}"


@cache
def _codec(density: float, bits: int) -> Quantised:
    """What chooses so much of a difference and rounds what it has chosen; each message asks for it."""
    chooses = TopK(density=density) if density < 1 else Dense()
    return Quantised(of=chooses, by=QSGD(bits=bits, block=64) if bits < 32 else Dense())
