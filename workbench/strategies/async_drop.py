"""AsyncDrop: each task trains a sub-model of the server's model, which mixes in the entries that come back."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.rank import FLOATS, Bucket, Entries, Memory, Rank, StrategyError, Units, outlined
from workbench.settings import knob
from workbench.strategies._base import Strategy
from workbench.strategies._copies import copies
from workbench.strategies._server import dense_only, tell, told

ASK, PUSH = 0, 1  # what a rank tells the server
SERVER = 0


class _Task:
    """What a rank has been given: which entries, in which version, and what part of each layer's units."""

    def __init__(self, entries: Entries, version: int, keep: float) -> None:
        self.entries, self.version, self.keep = entries, version, keep


class _Passed:
    """How many mixings pass during a task of each rank, for a whole model; and who is how fast by that."""

    def __init__(self, size: int) -> None:
        self._of = [inf] * size  # none came yet: slow
        self._order = [(inf, r) for r in range(size)]  # the fastest first

    def place(self, rank: int) -> int:
        """How many ranks are faster."""
        return bisect_left(self._order, (self._of[rank], rank))

    def note(self, rank: int, passed: float) -> None:
        """So many have during one more task; the last ones count for most."""
        before = self._of[rank]
        del self._order[self.place(rank)]
        self._of[rank] = passed if before == inf else 0.5 * (before + passed)
        insort(self._order, (self._of[rank], rank))


class _State:
    """What one rank remembers: on the server the model, what it was at first, and how slow ranks are."""

    def __init__(self, rank: Rank, params: list[Bucket]) -> None:
        self.memory = copies(params, "model", "first") if rank.index == SERVER else Memory()
        self.chance = Memory(rank.memory.seed + 50_021)
        self.version = 0  # of the model: how often it was mixed
        self.tasks: dict[int, _Task] = {}  # by rank, what it is at work on
        self.passed = _Passed(rank.size if rank.index == SERVER else 0)


@dataclass(frozen=True, kw_only=True)
class AsyncDrop(Strategy):
    """Ranks train sub-models at their own pace: some hidden units of each layer, by matrices that are really smaller.

        rank:    ask;  w_S <- the entries S of w that the server sends
                 w_c <- `local` steps of the optimizer, which begins anew, on the sub-model of S;   push w_c
        server:  to whoever asks the k-th fastest of p ranks (k = 0 ... p-1), of the F units between two layers:
                 s_u <- sum |w - w_0| over the entries of unit u;   units k F / p ... k F / p + q F in descending s
                 w_S <- (1 - alpha) w_S + alpha w_c              whenever a push comes; all other entries stay

    So fast ranks train what changes most, slow ones what is stable, and a late push overwrites little of what others
    have learned meanwhile. w_0 is the model as it was when the stay began. With `choose` = "random" units are drawn for
    each task (the paper's AsyncDrop without heterogeneity). How slow a rank is the server sees by how many tasks of
    others come back during one of its own, for what that keeps: an order that is on the record, so that a replay
    decides the same. q is `keep`; with `slowest` below 1 slower ranks keep less, too.

    A unit is a hidden feature, a channel or an attention head: where the task's `split` says Colwise() and Rowwise(),
    or two layers of a Sequential follow each other. One layer's matrix loses rows and the next one's columns, so that
    the sub-model makes q of their operations, q^2 where a layer is cut on both sides. Other parameters are in every
    sub-model. Each way the sub-model's entries cross the wire, and to the rank a byte for each unit besides. With
    `scaled` the weights that read q F of F units are 1 / q times as large while they are trained, as under dropout;
    without it, as in the paper, the whole model gives its next layer 1 / q times what sub-models are used to.

    A step of the run is a task. The server runs beside rank 0; the run's own optimizer rests. The Sample "computed" is
    what share of the model's operations a forward makes, "staleness" how often the model was mixed since the task was
    given, on rank 0. What a rank does not train it keeps as it last had it; the model is the server's.

    When to use it: ranks differ in speed, and the slow ones' tasks take too long, or the wire is narrow. With q = 1 and
    alpha = 1 on one rank it is the optimizer, begun anew in each task. Where ranks see other classes, units that few
    ranks train know few of them: on Digits with alpha = 0.3 sub-models of a half learned less than whole models.

    The paper's code masks activations, and tells what a task has trained by whether it changed; here matrices are cut,
    and all entries of a sub-model are mixed. It gives ranks their places once and for all. Its defaults are q = 0.25 in
    the later blocks of a ResNet, alpha = 0.5 and tasks of 50 steps.

    Reference: Dun, Hipolito, Jermaine, Dimitriadis and Kyrillidis, "Efficient and Light-Weight Federated Learning via
    Asynchronous Distributed Dropout", AISTATS 2023, https://arxiv.org/abs/2210.16105
    """

    keep: float = knob(0.5, 0.01, 1.0, doc="q: of the units between two layers, those that a sub-model has")
    slowest: float = knob(1.0, 0.01, 1.0, doc="how much of that the slowest rank keeps; others by their place")
    local: int = knob(4, 1, 1024, log=True, unit="batches", doc="of a task")
    mixing: float = knob(0.5, 0.01, 1.0, doc="alpha: how far the server's entries go to those that have come")
    choose: str = knob("changing", choices=("changing", "random"), doc="units by speed and change, or drawn")
    scaled: bool = knob(False, doc="do weights that read fewer units count for more meanwhile?")

    dtypes: ClassVar[tuple[str, ...]] = FLOATS
    lockstep: ClassVar[bool] = False
    periodic: ClassVar[bool] = True
    plain: ClassVar[bool] = False
    narrows: ClassVar[bool] = True
    exchanges: ClassVar[str] = "displacements"
    own: ClassVar[dict[str, str]] = {
        "model": "drop", "first": "drop", "passed": "drop", "tasks": "drop", "version": "drop",
    }  # fmt: skip

    def refuses(self, compressor: Any) -> str | None:
        return dense_only("AsyncDrop", compressor)

    def init(self, rank: Rank, params: list[Bucket]) -> _State:
        return _State(rank, params)

    async def step(self, rank: Rank, state: _State) -> None:
        buckets, units = await rank.params(), await rank.units()
        await tell(rank, SERVER, "client", ASK)
        kept = await self._told(rank, units, buckets[0].data)
        entries = Entries(units, kept)
        for bucket in buckets:
            data, _ = await rank.recv(bucket.data.new_empty(entries.numel(bucket)), SERVER, f"model {bucket.name}")
            entries.mix(bucket, data)
        await rank.sample("computed", await rank.narrow(kept, self.scaled))
        for _ in range(self.local):
            await rank.forward()
            await rank.backward()
            await rank.update()
        await rank.narrow(None)
        await tell(rank, SERVER, "client", PUSH)
        for bucket in buckets:
            await rank.send(entries.pick(bucket), SERVER, f"update {bucket.name}")

    async def _told(self, rank: Rank, units: list[Units], like: Tensor) -> list[Tensor]:
        """Which of each of the units the server wants trained, in ascending order."""
        got = await told(rank, "task", SERVER)
        if got is None:
            raise StrategyError("a sub-model did not come: the server has ended")
        into = like.new_empty(sum(each.size for each in units), dtype=torch.uint8)
        chosen, _ = await rank.recv(into, SERVER, "units")
        masks = chosen.split([each.size for each in units])
        return [m.argsort(descending=True, stable=True)[:n] for m, n in zip(masks, got[0], strict=True)]

    async def background(self, rank: Rank, state: _State) -> None:
        if rank.index != SERVER:
            return
        buckets, units = await rank.params(), await rank.units()
        while (got := await told(rank, "client")) is not None:
            (what,), source = got
            if what == ASK:
                await self._give(rank, state, buckets, units, source)
            else:
                await self._take(rank, state, buckets, source)

    async def _give(self, rank: Rank, state: _State, buckets: list[Bucket], units: list[Units], to: int) -> None:
        """A task: which units, and the entries of the present model that they leave."""
        place, p = state.passed.place(to), rank.size
        keep = self.keep * (1 - (1 - self.slowest) * place / max(1, p - 1))
        counts = [max(1, round(keep * each.size)) for each in units]
        kept = [self._chosen(state, buckets, each, n, place * each.size // p)
                for each, n in zip(units, counts, strict=True)]  # fmt: skip
        state.tasks[to] = _Task(Entries(units, kept), state.version, keep)
        await tell(rank, to, "task", *counts)
        none = [index.new_zeros(each.size, dtype=torch.uint8) for each, index in zip(units, kept, strict=True)]
        masks = [mask.index_fill_(0, index, 1) for mask, index in zip(none, kept, strict=True)]
        await rank.send(torch.cat(masks), to, "units")
        for bucket in buckets:
            model = bucket.like(state.memory.flat("model", bucket))
            await rank.send(state.tasks[to].entries.pick(model), to, f"model {bucket.name}")

    @outlined(lambda self, state, buckets, units, count, start: buckets[0].data.new_empty(count, dtype=torch.int64))
    def _chosen(self, state: _State, buckets: list[Bucket], units: Units, count: int, start: int) -> Tensor:
        """So many of the units, (count,) in ascending order: from `start` on in the order of how much they changed."""
        where = buckets[0].data.device
        if self.choose == "random":
            by = torch.rand(units.size, generator=state.chance.generator(where), device=where)
            return by.argsort()[:count].sort().values
        order = _changed(state.memory, buckets, units).argsort(descending=True, stable=True)
        start = min(start, units.size - count)
        return order[start : start + count].sort().values

    async def _take(self, rank: Rank, state: _State, buckets: list[Bucket], source: int) -> None:
        """Mixes in what a rank has trained; entries that it did not have stay as they are."""
        task = state.tasks.pop(source)
        staleness = state.version - task.version
        await rank.sample("staleness", staleness)
        for bucket in buckets:
            into = bucket.data.new_empty(task.entries.numel(bucket))
            data, _ = await rank.recv(into, source, f"update {bucket.name}")
            task.entries.mix(bucket.like(state.memory.flat("model", bucket)), data, self.mixing)
        state.version += 1
        state.passed.note(source, staleness / task.keep)

    async def known(self, rank: Rank, state: _State) -> list[Bucket]:
        buckets = await rank.params()
        return [b.like(state.memory.flat("model", b)) for b in buckets] if rank.index == SERVER else list(buckets)

    async def leave(self, rank: Rank, state: _State) -> None:
        """The server's model is everybody's; all tasks have come back, for a step ends with its push."""
        for bucket in await rank.params():
            if rank.index == SERVER:
                bucket.data.copy_(state.memory.flat("model", bucket))
            await rank.broadcast(bucket.data, SERVER, bucket.name)


def _changed(memory: Memory, buckets: list[Bucket], units: Units) -> Tensor:
    """(F,): how far the entries of each unit are from what they were at first, added up."""
    cuts = {cut.param: cut for cut in units.cuts}
    score = buckets[0].data.new_zeros(units.size, dtype=torch.float32)
    for bucket in buckets:
        if not any(part.name in cuts for part in bucket.parts):
            continue
        moved = (memory.flat("model", bucket) - memory.flat("first", bucket)).abs_().float()
        for part in bucket.parts:
            if (cut := cuts.get(part.name)) is not None:
                x = moved[part.start : part.stop].view(cut.view)
                score += x.sum([d for d in range(x.dim()) if d != cut.dim])
    return score
