"""Passes over a model of which each rank holds only shards: what is read is made whole before, and let go after.

[Note: Reading shards] A pass is a forward, a backward or an evaluation. Before it reads a bucket that is not whole on
this rank the strategy is asked to `unshard` it, and told which buckets the pass is going to read next. Once the pass
reads it no more the strategy is asked to `reshard` it: in a forward, when something else is first read after its last
use, so tied weights stay from their first use to their last; in a backward, when its gradients are there.

Order and last use are known before the first step from one that computes nothing (`foreseen.py`); where a
model does not let itself be run so, from the first step, in which all is whole and this only listens (`Trial`). An
absent parameter asks for itself whenever it is read. But to gather is a collective, so all ranks must gather in the
same order; they compare it in the steps in which the ledger looks at memory.

[Note: Straying] A model that branches by rank or by step reads other parameters than foreseen. In a forward every rank
therefore gathers all buckets in one order, the foreseen one, whatever it reads: a rank that needs a bucket early
gathers those before it first, and at the end of the forward each rank gathers what is left. A rank that strays so lets
nothing go. At the end of the forward each rank tells whether it has strayed. If one has, all ranks gather the whole
model, and the backward has nothing to gather.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.experiment.arranged import sharers
from workbench.host.core.changing import Changing
from workbench.host.memory.memory import packed
from workbench.host.placement import absent
from workbench.host.placement.canonical import check_same
from workbench.host.placement.layout import Layout
from workbench.host.sharding.trial import Event, Listening, Trial, assumed, backward_events, forward_events
from workbench.rank import Bucket, StrategyError


class Lent(NamedTuple):
    """A view of a bucket's parameters as autograd keeps it: where to find it again."""

    bucket: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Plan(NamedTuple):
    """What happens in a pass; by bucket, before which event it is first read, and before which it is over."""

    events: list[Event]
    first: dict[int, int]
    over: dict[int, int]


NO_PLAN = Plan([], {}, {})


class Reading:
    """What one rank reads, and what its strategy does about it. See [Note: Reading shards].

    ask:   how this rank's host comes to `need` buckets (and those beside), from inside of torch, after such a share of
           the pass; None where it goes by `events` instead
    listens: does it see a real forward and backward?
    trial: what a step reads, as was foreseen or as the first step has shown; None before that
    phase: the pass under way, "forward", "backward" or "evaluation"; "" between
    whole: while parameters lie in shards, the buckets that are whole here all the same
    """

    def __init__(self, run: Changing, ask: Callable[..., None] | None, listens: bool) -> None:
        self._run, self._ask, self._listens = run, ask, listens
        self.by: Any = None  # the strategy that shares parameters out
        self.trial: Trial | None = None
        self.learning = False  # is everything whole, to listen to this step?
        self.listening: Listening | None = None
        self.phase = ""
        self.sharded = False  # do parameters lie in shards?
        self.whole: set[int] = set()
        self._offered: set[int] = set()  # buckets that may be under way, or whole
        self._queue: list[int] | None = None  # in a forward, the buckets that all ranks are still to gather, in order
        self._strays = False  # has this rank read otherwise than foreseen in this forward?
        self._plans: tuple[Any, dict[str, Plan]] = None, {}  # a layout in buckets, and what its passes do
        self._known: tuple[Any, dict[int, Any]] = None, {}  # a layout in buckets, its places by their parameters' ids

    # -- from whole to shards, and back --

    async def shard(self, given: Mapping[str, Tensor] | None = None) -> None:
        """Between steps: where the strategy wants that, this rank keeps its shard of every bucket.

        While it is not known what a step reads, all of it, for one step more. given: what it has of each parameter, of
        which nothing is laid yet
        """
        run = self._run
        strategy = run.experiment.strategy
        if "parameters" not in strategy.shards or strategy.opaque:
            return
        if len(sharers(strategy, run.rank.size)[0]) == 1 and not strategy.offloads:
            return
        await self.foresee()
        self.by, self.learning, self.listening = strategy, self.trial is None, None
        if self.learning:
            return
        self.sharded, self.whole = True, set(range(len(self._layout.buckets))) if given is None else set()
        for bucket in self._layout.params() if given is not None else ():
            await run.rank.hold(shard_of(run, strategy, bucket, given or {}))
            await self._close(bucket.index)
        await self.close()

    async def foresee(self, cheaply: bool = False) -> Trial | None:
        """Between steps: what a step reads, if all ranks can tell before one is made, or can `cheaply`."""
        if self.trial is None:
            seen = self._run.foreseen(cheaply)
            self.trial = seen if all(await self._run.gather(int(seen is not None))) else None
        return self.trial

    async def unshard(self) -> None:
        """Between steps: every bucket is whole on every rank."""
        if self.sharded:
            await self.need(range(len(self._layout.buckets)))
            self._offered.clear()  # their numbers may be others' when shards are next
        self.sharded = self.learning = False

    def recut(self) -> None:
        """Between steps: buckets were cut anew, and nothing of them is here yet."""
        self.whole.clear()
        self._offered.clear()  # their numbers are others' now

    def let_go(self) -> None:
        """Between steps: what lies in shards comes to lie otherwise, and nothing of these is brought any more."""
        self.recut()
        self.sharded = self.learning = False
        self._run.ledger.hold(None)

    async def forget(self) -> None:
        """Between steps: a step may read otherwise from now on."""
        self.trial, self._plans = None, (None, {})
        if self.sharded and await self.foresee() is None:
            await self.unshard()
            await self.shard()

    async def learn(self, shown: Trial | None) -> None:
        """After a step: what it has shown is known from now on. shown: by the host, where nothing listens"""
        if self.learning and (heard := shown or (self.listening and self.listening.heard)):
            self.trial, self.listening = await self._agreed(heard), None
            await self.shard()

    async def _agreed(self, heard: Trial) -> Trial:
        """What ranks have heard, if all have heard the same; else a stack of layers, in the order of registration."""
        if self._ask is None:
            return heard
        digest = hashlib.blake2b(repr(heard).encode(), digest_size=7).digest()
        numbers = await self._run.gather(int.from_bytes(digest, "big"))
        alike = len(set(numbers)) == 1
        return heard if alike else assumed(name for name, p in self._run.model.named_parameters() if p.requires_grad)

    # -- in a pass --

    @contextmanager
    def passing(self, phase: str) -> Iterator[None]:
        """Inside, torch runs a forward, a backward or an evaluation of the model."""
        self.phase = self._run.rank.phase = phase
        if phase == "forward" and self.sharded and self._ask is not None:
            self._queue, self._strays = self._in_order(), False
        try:
            with self._watching(phase):
                yield
        finally:
            self._queue = None
            self.phase = self._run.rank.phase = ""

    def _watching(self, phase: str) -> AbstractContextManager[Any]:
        if self.learning and self._listens and phase != "evaluation":
            if self.listening is None:
                self.listening = Listening({place.name: place.param for place in self._layout.order})
            return self.listening.forward() if phase == "forward" else self.listening.backward()
        if self.sharded and self._ask is not None and phase != "backward":
            return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        return nullcontext()

    async def need(self, buckets: Iterable[int], beside: Iterable[int] = ()) -> None:
        """Before these buckets are read, and those `beside` in the same call: they are whole when this returns."""
        asked = set(buckets)
        plan = self._plan(self.phase) if self.phase else NO_PLAN
        first = min((plan.first[i] for i in asked if i in plan.first), default=len(plan.events))
        left = self.whole - asked - set(beside)
        if first or self.phase == "backward":  # else the pass begins, and what is here the one before has left
            left = {i for i in left if plan.over.get(i, first + 1) <= first}
        wanted = self._with_those_before(sorted(asked - self.whole, key=lambda i: (plan.first.get(i, -1), -i)), plan)
        for index in sorted(left) if not self._strays or self.phase != "forward" else ():
            await self._close(index)
        for index in wanted:
            await self._bring(index, plan)

    async def _bring(self, index: int, plan: Plan) -> None:
        if self.phase and self._ask is not None and self._run.ledger.due:  # another bucket's would be taken for it
            check_same(await self._run.gather(index), f"the parameters that {self.phase} reads next",
                       [self._run.rank.number(place) for place in range(self._run.rank.size)])  # fmt: skip
        self._offered.add(index)
        following = self._following(plan, index) if index in plan.first else iter(())
        await self.by.unshard(self._run.rank, self._run.state, self._layout.lies(index), following)
        self._open(index)

    def _in_order(self) -> list[int]:
        """All buckets as a forward gathers them: as foreseen, and those behind of which no reading was foreseen."""
        first = self._plan("forward").first
        planned = sorted(first, key=lambda i: (first[i], -i))
        return planned + [i for i in range(len(self._layout.buckets)) if i not in first]

    def _with_those_before(self, wanted: list[int], plan: Plan) -> list[int]:
        """In a forward: what other ranks gather before these buckets, and these. See [Note: Straying]."""
        found = []
        for index in wanted:
            if self._queue is None or index not in self._queue:
                found.append(index)
                continue
            at = self._queue.index(index) + 1
            if at > 1 or index not in plan.first:
                self._strays = True
            found += self._queue[:at]
            del self._queue[:at]
        return list(dict.fromkeys(found))

    async def end_forward(self) -> None:
        """A forward is over: gathers what is left, and all buckets if a rank has strayed. See [Note: Straying]."""
        if self._queue is None:
            return
        plan, left, self._queue = self._plan("forward"), self._queue, None
        for index in left:
            await self._bring(index, plan)
        kept = {index for index in plan.first if index not in plan.over}
        strayed = any(await self._run.gather(int(self._strays or any(index in plan.first for index in left))))
        for index in sorted(self.whole - kept) if strayed else [i for i in left if i not in plan.first]:
            await self._close(index)
        for index in sorted(set(range(len(self._layout.buckets))) - kept) if strayed else ():
            await self._bring(index, NO_PLAN)

    async def gather_unforeseen(self, phase: str) -> list[int]:
        """Gathers the buckets that this pass was not foreseen to read, and returns them: a model that branches may.

        For a host that computes a pass at once, when the foreseen buckets have been gathered.
        """
        plan = self._plan(phase)
        more = [i for i in range(len(self._layout.buckets)) if i not in plan.first and i not in self.whole]
        for index in more:
            await self._bring(index, plan)
        return more

    async def release(self, buckets: Iterable[int]) -> None:
        """Lets these buckets go again."""
        for index in buckets:
            await self._close(index)

    def _following(self, plan: Plan, index: int) -> Iterator[Bucket]:
        """The buckets that are read after this one and not whole, one by one: who takes one may begin to gather it."""
        for event in plan.events[plan.first[index] :]:
            for other in event.buckets if event.kind == "read" else ():
                if other != index and other not in self.whole:
                    self._offered.add(other)
                    yield self._layout.lies(other)

    def require_sharded(self) -> None:
        """Refuses in words to hold a part of a bucket where nobody would bring the rest before it is read."""
        if not self.sharded:
            raise StrategyError(
                "hold: parameters are all here; a strategy that keeps parts of them claims 'parameters' in `shards` "
                "and holds them in its `unshard` and `reshard`"
            )

    async def filled(self, index: int) -> None:
        """The gradients of this bucket are there: its parameters are read no more."""
        if self.sharded and index in self.whole:
            await self._close(index)

    async def close(self) -> None:
        """A backward or an evaluation is over: nothing is whole any more."""
        if not self.sharded:
            return
        for index in sorted(self.whole | self._offered):
            await self._close(index)

    async def _close(self, index: int) -> None:
        run = self._run
        if self._ask is not None:
            for place in self._layout.groups[index]:
                absent.leave(place.param, self._asked)
        self.whole.discard(index)
        self._offered.discard(index)
        await self.by.reshard(run.rank, run.state, self._layout.lies(index))

    def _open(self, index: int) -> None:
        self.whole.add(index)
        if self._ask is not None:
            for place in self._layout.groups[index]:
                absent.come(place.param)

    def _asked(self, params: list[Any], others: list[Any]) -> None:
        """Something is about to read these parameters, and others that are here."""
        if self._known[0] is not self._layout.buckets:
            self._known = self._layout.buckets, {id(place.param): place for place in self._layout.order}
        buckets = {place.bucket: place.name for place in (self._known[1][id(p)] for p in params)}
        if not self.phase:
            name = next(iter(buckets.values()))
            raise StrategyError(
                f"parameter {name} is read between two passes, and no rank holds all of it: read it in a forward, a "
                f"backward or an evaluation, or take a strategy that keeps parameters whole (ZeRO2)"
            )
        beside = {self._known[1][id(p)].bucket for p in others if id(p) in self._known[1]}
        self._asked_for(buckets, beside)

    def _asked_for(self, buckets: Iterable[int], beside: Iterable[int] = ()) -> None:
        assert self._ask is not None
        plan, wanted = self._plan(self.phase), set(buckets)
        at = min((plan.first[i] for i in wanted if i in plan.first), default=None)
        self._ask(wanted, beside, 0.0 if at is None else plan.events[at].share)

    def _pack(self, x: Tensor) -> Tensor | Lent:
        """What autograd is to keep in place of `x`: of a bucket that will be let go, where it lies in it."""
        if x.layout != torch.strided or x.is_conj() or x.is_neg():
            return packed(x)
        bucket = self._layout.lying.get(x.untyped_storage()._cdata)
        if bucket is None or bucket not in self.whole or x.dtype != self._layout.weights[bucket].dtype:
            return packed(x)
        begins = self._layout.weights[bucket].storage_offset()
        return Lent(bucket, x.shape, x.stride(), int(x.storage_offset() - begins))

    def _unpack(self, kept: Tensor | Lent) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if self.sharded and kept.bucket not in self.whole:
            self._asked_for([kept.bucket])
        whole: Tensor = self._layout.weights[kept.bucket]
        return whole.as_strided(kept.size, kept.stride, int(whole.storage_offset()) + kept.offset)

    # -- what comes when --

    @property
    def _layout(self) -> Layout:
        layout: Layout = self._run.layout
        return layout

    def events(self, phase: str) -> list[Event]:
        """What happens in such a pass of the model in its present buckets, in order."""
        return self._plan(phase).events

    def _plan(self, phase: str) -> Plan:
        layout, trial = self._layout, self.trial
        assert trial is not None
        if self._plans[0] is not layout.buckets:
            self._plans = layout.buckets, {}
        kind, found = "backward" if phase == "backward" else "forward", self._plans[1]
        if kind not in found:
            events = backward_events(layout, trial) if kind == "backward" else forward_events(layout, trial)
            reads = [(at, e) for at, e in enumerate(events) if e.kind == "read"]
            found[kind] = Plan(events, {i: at for at, e in reads for i in e.buckets},
                               {i: at for at, e in reads for i in e.over})  # fmt: skip
        return found[kind]


def shard_of(run: Any, strategy: Any, bucket: Bucket, given: Mapping[str, Tensor]) -> Bucket:
    """Builds this rank's shard of a bucket from its flat pieces of each parameter."""
    group = next(group for group in sharers(strategy, run.rank.size) if run.rank.id in group)
    own = [given[part.name] for part in bucket.parts if part.name in given]
    shard = bucket.shard(group.index(run.rank.id), len(group))
    return shard.like(torch.cat(own) if own else bucket.data.new_empty(0))
