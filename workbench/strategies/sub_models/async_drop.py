"""AsyncDrop: ranks train sub-models of the server's model."""

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
from workbench.strategies.sub_models import verbs

ASK, PUSH = 0, 1  # message kinds from a rank to the server
SERVER = 0


class _Task:
    """A task of one rank: the entries of its sub-model, the model's version and the share of units that it keeps."""

    def __init__(self, entries: Entries, version: int, keep: float) -> None:
        self.entries, self.version, self.keep = entries, version, keep


class _Passed:
    """Measures how slow each rank is: mixings during one of its tasks, per share of the model that the task keeps."""

    def __init__(self, size: int) -> None:
        self._of = [inf] * size  # no task has returned: slowest
        self._order = [(inf, r) for r in range(size)]  # fastest first

    def place(self, rank: int) -> int:
        """Returns how many ranks are faster."""
        return bisect_left(self._order, (self._of[rank], rank))

    def note(self, rank: int, passed: float) -> None:
        """Records the mixings that passed during one more task; the newest value counts for half."""
        before = self._of[rank]
        del self._order[self.place(rank)]
        self._of[rank] = passed if before == inf else 0.5 * (before + passed)
        insort(self._order, (self._of[rank], rank))


class _State:
    """State of one rank. The server also has the model, the model at the start and the ranks' speeds."""

    def __init__(self, rank: Rank, params: list[Bucket]) -> None:
        self.memory = copies(params, "model", "first") if rank.index == SERVER else Memory()
        self.chance = Memory(rank.memory.seed + 50_021)
        self.version = 0  # how often the model was mixed
        self.tasks: dict[int, _Task] = {}  # by rank, its current task
        self.passed = _Passed(rank.size if rank.index == SERVER else 0)


@dataclass(frozen=True, kw_only=True)
class AsyncDrop(Strategy):
    """Trains smaller sub-models on ranks that work at their own pace, and mixes them into the server's model.

        rank:    ask;  w_S <- the entries S of w that the server sends
                 w_c <- `local` steps of the optimizer, with new state, on the sub-model of S;   push w_c
        server:  when the k-th fastest of p ranks (k = 0 ... p-1) asks, of the F units between two layers:
                 s_u <- sum |w - w_0| over the entries of unit u;   units k F / p ... k F / p + q F in descending s
                 w_S <- (1 - alpha) w_S + alpha w_c              whenever a push comes; all other entries stay

    So fast ranks train the units that change most and slow ranks train the stable units. A late push then overwrites
    little that other ranks have learned. w_0 is the model when the strategy is entered. `choose` = "random" draws the
    units of each task, as in the paper's AsyncDrop without heterogeneity. A rank is slow if many tasks of other ranks
    return during its own task. The number is per share of the model that it keeps. The order is in the record, so a
    replay makes the same decisions.

    A unit is a hidden feature, a channel or an attention head. The task's `split` marks them by Colwise() and
    Rowwise(), or two layers of a Sequential follow each other. One layer's matrix loses rows and the next one's
    columns. So the sub-model makes q of their operations, or q^2 for a layer that is cut on both sides. Other
    parameters are in every sub-model. Its entries are sent each way, and one byte per unit to the rank. With `scaled`
    the weights that read q F of F units are 1 / q times as large during training, as under dropout. The paper does not
    scale them. The whole model's next layer then receives 1 / q times as much as in sub-models.

    A step is one task with a new optimizer. The run's own optimizer is not used. The server runs on rank 0, next to its
    training. The Sample "computed" is the share of the model's operations in one forward. On rank 0 the Sample
    "staleness" counts the mixings during the task. A rank keeps old values of parameters that it does not train.

    When to use it: slow ranks' tasks take too long, or the network is slow. With q = 1 and alpha = 1 on one rank it is
    the optimizer, with new state for each task. Units that few ranks train learn only these ranks' classes. On Digits
    with alpha = 0.3 sub-models of half the units learned less than whole models.

    The paper's code masks activations and mixes the entries that have changed. Here matrices are cut and all entries of
    a sub-model are mixed. The paper orders the ranks once. Its defaults are q = 0.25 in the later blocks of a ResNet,
    alpha = 0.5 and tasks of 50 steps.

    Reference: Dun, Hipolito, Jermaine, Dimitriadis and Kyrillidis, "Efficient and Light-Weight Federated Learning via
    Asynchronous Distributed Dropout", AISTATS 2023, https://arxiv.org/abs/2210.16105
    """

    keep: float = knob(0.5, 0.01, 1.0, doc="q: share of the units between two layers that a sub-model has")
    slowest: float = knob(1.0, 0.01, 1.0, doc="share of q on the slowest rank; other ranks by their order")
    local: int = knob(4, 1, 1024, log=True, unit="batches", doc="length of a task")
    mixing: float = knob(0.5, 0.01, 1.0, doc="alpha: weight of a received sub-model in the server's model")
    choose: str = knob(
        "changing", choices=("changing", "random"), doc="changing: choose units by speed and change; random: draw them"
    )
    scaled: bool = knob(False, doc="scale the weights of a sub-model up for the missing units")

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
        buckets, units = await rank.params(), await verbs.units(rank)
        await tell(rank, SERVER, "client", ASK)
        kept = await self._told(rank, units, buckets[0].data)
        entries = Entries(units, kept)
        for bucket in buckets:
            data, _ = await rank.recv(bucket.data.new_empty(entries.numel(bucket)), SERVER, f"model {bucket.name}")
            entries.mix(bucket, data)
        await rank.sample("computed", await verbs.narrow(rank, kept, self.scaled))
        for _ in range(self.local):
            await rank.forward()
            await rank.backward()
            await rank.update()
        await verbs.narrow(rank, None)
        await tell(rank, SERVER, "client", PUSH)
        for bucket in buckets:
            await rank.send(entries.pick(bucket), SERVER, f"update {bucket.name}")

    async def _told(self, rank: Rank, units: list[Units], like: Tensor) -> list[Tensor]:
        """Receives from the server the units to train. Returns their indices, ascending, by entry of `units`."""
        got = await told(rank, "task", SERVER)
        if got is None:
            raise StrategyError("no sub-model arrived, because the server has ended")
        into = like.new_empty(sum(each.size for each in units), dtype=torch.uint8)
        chosen, _ = await rank.recv(into, SERVER, "units")
        masks = chosen.split([each.size for each in units])
        return [m.argsort(descending=True, stable=True)[:n] for m, n in zip(masks, got[0], strict=True)]

    async def background(self, rank: Rank, state: _State) -> None:
        if rank.index != SERVER:
            return
        buckets, units = await rank.params(), await verbs.units(rank)
        while (got := await told(rank, "client")) is not None:
            (what,), source = got
            if what == ASK:
                await self._give(rank, state, buckets, units, source)
            else:
                await self._take(rank, state, buckets, source)

    async def _give(self, rank: Rank, state: _State, buckets: list[Bucket], units: list[Units], to: int) -> None:
        """Sends a task: the chosen units, and the entries of the current model that belong to them."""
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
        """Returns `(count,)` unit indices, ascending. They are random, or go from `start` on by descending change."""
        where = buckets[0].data.device
        if self.choose == "random":
            by = torch.rand(units.size, generator=state.chance.generator(where), device=where)
            return by.argsort()[:count].sort().values
        order = _changed(state.memory, buckets, units).argsort(descending=True, stable=True)
        start = min(start, units.size - count)
        return order[start : start + count].sort().values

    async def _take(self, rank: Rank, state: _State, buckets: list[Bucket], source: int) -> None:
        """Mixes a rank's trained entries into the model; the other entries stay as they are."""
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
        """Gives every rank the server's model. No task is open, because a step ends with its push."""
        for bucket in await rank.params():
            if rank.index == SERVER:
                bucket.data.copy_(state.memory.flat("model", bucket))
            await rank.broadcast(bucket.data, SERVER, bucket.name)


def _changed(memory: Memory, buckets: list[Bucket], units: Units) -> Tensor:
    """Returns `(F,)`: for each unit, the sum of its entries' absolute changes since the start."""
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
