"""Synchronous steps that do not wait for the last few ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Bucket, Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy
from workbench.strategies._server import answer, dense_only, post, taken, tell, told


class _State:
    """State of the server on rank 0; empty on other ranks."""

    def __init__(self, version: int) -> None:
        self.version = version  # of the parameters: the step whose gradients the server is waiting for
        self.come: dict[int, list[Bucket]] = {}  # by rank, its gradients of this version
        self.means: dict[int, list[Bucket]] = {}  # by version, the means that some rank has not received yet
        self.wanting: dict[int, int] = {}  # by version, how many ranks have not received it


@dataclass(frozen=True, kw_only=True)
class BackupWorkers(Strategy):
    """Counts the first p - b gradients of p ranks in each step, and drops the later ones.

        rank:    grad_i of params_v -> server, with its version v
        server:  mean_v <- (1/n) sum of the first n = p - b gradients of version v, in rank order;   v <- v + 1
        rank:    params <- optimizer(params, mean_v)             for each version that it has not applied yet

    If a rank's gradient came too late, it receives the means that it missed. It applies them one after the other, so
    its step counts for several. All ranks apply the same means in the same order. So with any optimizer, parameters and
    optimizer states stay bit-identical. With b = 0 it is DDP.

    The server runs on rank 0. A rank sends the model's bytes once per gradient and receives them once per version. The
    server sends p - 1 times as many, so its port is the bottleneck. DDP's all-reduce has no bottleneck. A step lasts
    until the n-th gradient. A late rank first finishes its backward, because nothing can interrupt it. The step takes
    the n-th smallest of p times only if all ranks begin a version together. For exponentially distributed times with
    mean 1 this is H_p - H_b on average. The Sample "late" is 1 if a gradient was dropped, else 0.

    When to use it: ranks are slow at random and the network is fast. A rank that is always slow does no useful work,
    and the model never learns its data. A mean of n gradients has the noise of n batches, so scale the learning rate by
    n.

    Reference: Chen et al., "Revisiting Distributed Synchronous SGD", 2016, https://arxiv.org/abs/1604.00981
    """

    backup: int = knob(0, 0, 64, unit="ranks", doc="b: number of late gradients that each step ignores")

    moves_frozen: ClassVar[bool] = True
    lockstep: ClassVar[bool] = False
    exchanges: ClassVar[str] = "gradients"
    own: ClassVar[dict[str, str]] = {"come": "drop", "means": "drop", "version": "drop", "wanting": "drop"}

    def propagation(self, size: int) -> int:
        return 1

    def newest(self, rank: Rank, state: _State) -> int:
        return state.version

    def refuses_size(self, size: int) -> str | None:
        if self.backup < size:
            return None
        return f"backup={self.backup} ignores the gradients of all {size} ranks; use at most {size - 1}, or more ranks"

    def refuses(self, compressor: Any) -> str | None:
        return dense_only("BackupWorkers", compressor)

    def init(self, rank: Rank, params: list[Bucket]) -> _State:
        return _State(rank.step)

    async def step(self, rank: Rank, state: _State) -> int:
        await rank.forward()
        await rank.backward(1.0 / (rank.size - self.backup))
        await tell(rank, 0, "push", rank.step)
        await post(rank, 0, "gradient", await rank.grads())
        newest, counted = await answer(rank, 0)
        await rank.sample("late", 1 - counted)
        for version in range(rank.step, newest):
            rank.rated(version)
            for bucket in await rank.grads():
                await rank.recv(bucket.data, 0, f"mean {bucket.name}")
            await rank.update()
        return newest - rank.step

    async def background(self, rank: Rank, state: _State) -> None:
        if rank.index:
            return
        buckets = await rank.params()
        while (got := await told(rank, "push")) is not None:
            (version,), source = got
            gradient = await taken(rank, source, "gradient", buckets)
            if version < state.version:
                await self._answer(rank, state, source, version, counted=False)
                continue
            state.come[source] = gradient
            if len(state.come) < rank.size - self.backup:
                continue
            sources = sorted(state.come)
            total, *others = (state.come[source] for source in sources)
            for other in others:
                for into, bucket in zip(total, other, strict=True):
                    into.data.add_(bucket.data)
            state.means[version], state.wanting[version] = total, rank.size
            state.come, state.version = {}, version + 1
            for source in sources:
                await self._answer(rank, state, source, version, counted=True)

    async def _answer(self, rank: Rank, state: _State, to: int, version: int, counted: bool) -> None:
        """Sends a rank all means from `version` on, and deletes the means that every rank has received."""
        newest = state.version
        await tell(rank, to, "answer", newest, counted)
        for missed in range(version, newest):
            await post(rank, to, "mean", state.means[missed])
            state.wanting[missed] -= 1
            if not state.wanting[missed]:
                del state.means[missed], state.wanting[missed]
