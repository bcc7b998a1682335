"""TEASQ-Fed: idle clients request tasks from a server."""

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

ASK, PUSH = 0, 1  # message kinds from a trainer to the server
SERVER = 0


class _State:
    """State of one rank: "known" is the last model sent to its clients; the other slots are the server's."""

    def __init__(self, rank: Rank, params: list[Bucket]) -> None:
        self.chance = Memory(rank.memory.seed)  # seed for the rounding of a trainer; `serving` for that of the server
        self.serving = Memory(rank.memory.seed + 50_021)
        self.turn = 0  # counts this rank's tasks; picks its next client
        mine = ["model", *(f"sent {r}" for r in range(rank.size))] if rank.index == SERVER else []
        self.memory = copies(params, "known", *mine)
        self.version = 0  # how often the model was mixed
        self.running = 0  # tasks under way
        self.waiting: deque[int] = deque()  # ranks with an idle client and no task
        self.cached = 0  # updates in "cache", the sum of S w; `weight` is the sum of S
        self.weight = self.stale = 0.0
        self.early = 0  # updates that were mixed in on leaving, before there were `cache` of them


@dataclass(frozen=True, kw_only=True)
class TEASQFed(Strategy):
    """Idle clients request tasks and train the model that they receive; a server mixes in every K updates.

        client:  ask;  w_h <- the server's model, of version h
                 w_c <- `local` steps of the optimizer from w_h on f(w) + mu / 2 |w - w_h|^2;   push w_c - w_h
        server:  a task to a client that asks, while fewer than ceil(C n) of n clients are at work; else it waits
                 once K updates have come:   S(t) = (1 + t)^-a,  t = version - h
                     u <- sum S(t_c) w_c / sum S(t_c),   b <- alpha S(mean t_c),   w <- (1 - b) w + b u

    The `clients` of a rank take turns and have their own data (`rank.client`). With Digits(shards="dirichlet") each
    client has different digits. n counts the clients of all ranks. One client of a rank works at a time, so C has an
    effect only below 1 / `clients`. A step of the run is one task. With `deadline` a client begins no batch after so
    many ms, but always trains one. The Sample "batches" counts its batches. With `weighted` an update's weight is S(t)
    times its number of batches, as in FedAvg. Without a deadline this changes nothing.

    Both sides send the difference between a model and the receiver's copy: `density` of its entries, in `bits` bits
    each. At 1 and 32 the whole difference is sent. A client's unsent entries are lost. The server keeps a copy of each
    rank's model, so it sends its unsent entries later. After every `relax` mixings twice as many entries are sent,
    because late differences are small. The Sample "staleness" is t of each update. The Sample "active" counts the open
    tasks when the server sends a task. Both are in rank 0's record.

    The server runs on rank 0. On each rank the run's optimizer keeps its state from task to task. The paper's plain SGD
    has none.

    When to use it: clients differ in speed and in data, and the network to the server is slow. Classes of slow clients
    count for less, especially with a large a. Look at accuracy by class.

    This follows the paper's abstract and the formulas of TEA-Fed (Zhou et al., 2021), which has the same server. We
    encode differences, not models. A model with only its largest weights cannot be trained.

    Reference: Jia, Liu, Zhou, Tian, Dong and Dou, "Efficient Asynchronous Federated Learning with Sparsification and
    Quantization", 2023, https://arxiv.org/abs/2312.15186
    """

    clients: int = knob(2, 1, 64, log=True, doc="clients of each rank, which take turns")
    share: float = knob(1.0, 0.01, 1.0, doc="C: share of the clients that may work at once")
    cache: int = knob(2, 1, 256, log=True, unit="updates", doc="K: updates that the server mixes in at once")
    local: int = knob(4, 1, 1024, log=True, unit="batches", doc="length of a client's task")
    deadline: float = knob(0.0, 0.0, 60_000.0, unit="ms", doc="time after which a client starts no batch; 0: none")
    mixing: float = knob(0.8, 0.01, 1.0, doc="alpha: weight of fresh updates in the server's model")
    staleness: float = knob(0.5, 0.0, 4.0, doc="a: decrease of an update's weight with its staleness")
    proximal: float = knob(0.01, 0.0, 100.0, doc="mu: penalty on the distance from the model that the client received")
    density: float = knob(0.25, 0.0001, 1.0, log=True, doc="fraction of the entries that are sent")
    bits: int = knob(8, choices=(2, 4, 8, 32), doc="bits per sent entry; 32: not rounded")
    weighted: bool = knob(False, doc="weight an update by its number of batches")
    relax: int = knob(0, 0, 4096, unit="mixings", doc="mixings after which density doubles; 0: never")

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
            raise StrategyError("no task arrived for a client, because the server has ended")
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
        """Trains one client's task and returns the number of batches."""
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
            while state.waiting and state.running < self._at_once(self.clients * rank.size):
                state.running += 1
                await rank.sample("active", state.running)
                await self._give(rank, state, buckets, state.waiting.popleft())

    def _at_once(self, n: int) -> int:
        """Returns ceil(C n), without the rounding error of the product."""
        return ceil(self.share * n - 1e-9)

    async def _give(self, rank: Rank, state: _State, buckets: list[Bucket], to: int) -> None:
        """Sends a task: the current model, as its difference from the copy of rank `to`."""
        await tell(rank, to, "task", state.version)
        codec = self._codec(state.version)
        for bucket in buckets:
            sent = state.memory.flat(f"sent {to}", bucket)
            message = packet(codec, state.serving, state.memory.flat("model", bucket) - sent)
            sent.add_(opened(codec, message, sent))
            await rank.send(message, to, f"model {bucket.name}")

    async def _cache(self, rank: Rank, state: _State, buckets: list[Bucket], source: int, version: int,
                     done: int) -> None:  # fmt: skip
        """Adds an update that was trained on `done` batches to the cache, and mixes if the cache is full."""
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
        """Receives a difference from `source` in the shape of `like`."""
        codec = self._codec(version)
        message, _ = await rank.recv(room(codec, like.data), source, f"{what} {like.name}")
        return opened(codec, message, like.data)

    def _codec(self, version: int) -> Quantised:
        """Returns the encoder of differences for this version of the model."""
        density = min(1.0, self.density * 2.0 ** min(version // self.relax if self.relax else 0, 64))
        return _codec(density, self.bits)

    async def known(self, rank: Rank, state: _State) -> list[Bucket]:
        name = "model" if rank.index == SERVER else "known"
        return [bucket.like(state.memory.flat(name, bucket)) for bucket in await rank.params()]

    async def leave(self, rank: Rank, state: _State) -> None:
        """Mixes in the cached updates, which `left` reports. Gives every rank the server's model."""
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
    """Returns the encoder that selects `density` of the entries and rounds them; cached for all messages."""
    chooses = TopK(density=density) if density < 1 else Dense()
    return Quantised(of=chooses, by=QSGD(bits=bits, block=64) if bits < 32 else Dense())
