"""Passes over a model in shards: buckets are gathered before they are read, and released afterwards.

[Note: Reading shards] A pass is a forward, a backward or an evaluation. Before it reads a bucket that is not whole, the
Unsharder calls the strategy's `unshard`, with the buckets that the pass reads next. After the last read it calls
`reshard`. In a forward that is when the pass first reads another bucket, so tied weights stay until their last use. In
a backward it is when the bucket's gradients have arrived.

A step that computes nothing shows order and last use (`read_order.py`). If a model cannot run so, the Unsharder listens
to a first step with whole parameters. A gather is a collective, so all ranks must gather in the same order. They
compare it in the steps in which the memory account looks.

[Note: Straying] A model that branches by rank or by step reads other parameters than foreseen. So in a forward every
rank gathers all buckets in the foreseen order. A rank that needs a bucket early gathers the buckets before it first,
and from then on releases none. After the forward each rank gathers the remaining buckets, and all ranks exchange
whether they have strayed. If one has, all gather the whole model, and the backward gathers nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from workbench.experiment.mesh_rules import list_shard_groups
from workbench.host.core.rank_view import RankView
from workbench.host.memory.storages import pack_tensor
from workbench.host.placement import unmaterialized
from workbench.host.placement.bucket_groups import ParameterPlace
from workbench.host.placement.canonical_state import check_same
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.sharding.access_trace import (
    AccessTrace,
    PassEvent,
    TraceListener,
    assume_trace,
    list_backward_events,
    list_forward_events,
)
from workbench.host.sharding.read_view import ReadView
from workbench.rank import Bucket, StrategyError

if TYPE_CHECKING:
    from workbench.strategies import Strategy


class LentView(NamedTuple):
    """A view's place in its bucket. Autograd keeps it instead."""

    bucket: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class PassEvents(NamedTuple):
    """By bucket, the events before its first read and after its last."""

    events: list[PassEvent]
    first: dict[int, int]
    over: dict[int, int]


NO_PLAN = PassEvents([], {}, {})


class Unsharder:
    """One rank's reads, and its strategy's calls for them. See [Note: Reading shards].

    ask:     makes the host `need` buckets (and those `beside`) from inside torch, after a share of the pass; None: the
             host follows `events` instead
    listens: whether it sees a real forward and backward
    trial:   a step's use of parameters, foreseen or from the first step; None before
    phase:   "forward", "backward" or "evaluation"; "" between passes
    whole:   buckets that are whole here, while parameters are in shards
    """

    def __init__(self, run: ReadView, ask: Callable[..., None] | None, listens: bool) -> None:
        self._run, self._ask, self._listens = run, ask, listens
        self.by: Strategy | None = None  # it shards parameters
        self.trial: AccessTrace | None = None
        self.learning = False  # everything is whole, to listen to this step
        self.listening: TraceListener | None = None
        self.phase = ""
        self.sharded = False
        self.whole: set[int] = set()
        self.written: set[int] = set()  # released buckets that a simulated forward has written since
        self._offered: set[int] = set()  # buckets possibly whole
        self._queue: list[int] | None = None  # buckets still to gather in a forward
        self._strays = False  # whether it strayed in this forward
        self._plans: tuple[list[Bucket] | None, dict[str, PassEvents]] = None, {}  # by a layout's buckets
        self._known: tuple[list[Bucket] | None, dict[int, ParameterPlace]] = (
            None,
            {},
        )  # by a layout's buckets

    # -- sharding and unsharding --

    async def shard_parameters(self, given: Mapping[str, Tensor] | None = None) -> None:
        """Between steps: keeps this rank's shard of every bucket, if the strategy shards parameters.

        If the order of reads is unknown, parameters stay whole for one more step.

        given: this rank's part of each parameter, if the layout has no values yet
        """
        run = self._run
        strategy = run.experiment.strategy
        if "parameters" not in strategy.shards or strategy.opaque:
            return
        if len(list_shard_groups(strategy, run.rank.size)[0]) == 1 and not strategy.offloads:
            return
        await self.foresee_trace()
        self.by, self.learning, self.listening = strategy, self.trial is None, None
        if self.learning:
            return
        self.sharded, self.whole = True, set(range(len(self._parameter_layout.buckets))) if given is None else set()
        for bucket in self._parameter_layout.list_params() if given is not None else ():
            await run.rank.hold(build_shard(run, strategy, bucket, given or {}))
            await self._reshard_bucket(bucket.index)
        await self.reshard_all()

    async def foresee_trace(self, cheaply: bool = False) -> AccessTrace | None:
        """Between steps: finds a step's reads in advance, if all ranks can."""
        if self.trial is None:
            seen = self._run.foresee_reads(cheaply)
            self.trial = seen if all(await self._run.gather(int(seen is not None))) else None
        return self.trial

    async def unshard_all(self) -> None:
        """Between steps: makes every bucket whole on every rank."""
        if self.sharded:
            await self.gather_buckets(range(len(self._parameter_layout.buckets)))
            self._offered.clear()  # bucket numbers may change
        self.sharded = self.learning = False

    def note_new_buckets(self) -> None:
        """Between steps: buckets are new, and none is whole yet."""
        self.whole.clear()
        self._offered.clear()

    def release_shards(self) -> None:
        """Between steps: the shards get another layout."""
        self.note_new_buckets()
        self.sharded = self.learning = False
        self._run.memory_account.note_held(None)

    def adopt_trace(self, trace: AccessTrace) -> None:
        """Before shards are cut: takes over the reads of a step of an earlier run."""
        self.trial, self._plans = trace, (None, {})

    async def forget_trace(self) -> None:
        """Between steps: a step may read other parameters from now on."""
        self.trial, self._plans = None, (None, {})
        if self.sharded and await self.foresee_trace() is None:
            await self.unshard_all()
            await self.shard_parameters()

    async def learn_trace(self, shown: AccessTrace | None) -> None:
        """After a step: keeps its trace. shown: the host's trace"""
        if self.learning and (heard := shown or (self.listening and self.listening.heard_trace)):
            self.trial, self.listening = await self._agree_on_trace(heard), None
            await self.shard_parameters()

    async def _agree_on_trace(self, heard: AccessTrace) -> AccessTrace:
        """If ranks differ, takes the order of registration."""
        if self._ask is None:
            return heard
        digest = hashlib.blake2b(repr(heard).encode(), digest_size=7).digest()
        numbers = await self._run.gather(int.from_bytes(digest, "big"))
        alike = len(set(numbers)) == 1
        return (
            heard if alike else assume_trace(name for name, p in self._run.model.named_parameters() if p.requires_grad)
        )

    # -- in a pass --

    @contextmanager
    def run_pass(self, phase: str) -> Iterator[None]:
        self.enter_phase(phase)
        if phase == "forward" and self.sharded and self._ask is not None:
            self._queue, self._strays = self._list_gather_order(), False
        try:
            with self._listen_to_pass(phase):
                yield
        finally:
            self._queue = None
            self.enter_phase("")

    def enter_phase(self, phase: str) -> None:
        self.phase = self._run.rank.phase = phase

    def _listen_to_pass(self, phase: str) -> AbstractContextManager[None]:
        if self.learning and self._listens and phase != "evaluation":
            if self.listening is None:
                self.listening = TraceListener({place.name: place.param for place in self._parameter_layout.order})
            return self.listening.listen_to_forward() if phase == "forward" else self.listening.listen_to_backward()
        if self.sharded and self._ask is not None and phase != "backward":
            return torch.autograd.graph.saved_tensors_hooks(self._pack_tensor, self._unpack_tensor)
        return nullcontext()

    async def gather_buckets(self, buckets: Iterable[int], beside: Iterable[int] = ()) -> None:
        """Gathers buckets before a read. Keeps those in `beside`, which the same call reads."""
        asked = set(buckets)
        plan = self._plan_pass(self.phase) if self.phase else NO_PLAN
        first = min((plan.first[i] for i in asked if i in plan.first), default=len(plan.events))
        left = self.whole - asked - set(beside)
        if first or self.phase == "backward":  # else the pass before left them
            left = {i for i in left if plan.over.get(i, first + 1) <= first}
        wanted = self._add_preceding(sorted(asked - self.whole, key=lambda i: (plan.first.get(i, -1), -i)), plan)
        for index in sorted(left) if not self._strays or self.phase != "forward" else ():
            await self._reshard_bucket(index)
        for index in wanted:
            await self._gather_bucket(index, plan)

    async def _gather_bucket(self, index: int, plan: PassEvents) -> None:
        if self.phase and self._ask is not None and self._run.memory_account.due:  # another order would mix up buckets
            check_same(await self._run.gather(index), f"the parameters that {self.phase} reads next",
                       [self._run.rank.number(place) for place in range(self._run.rank.size)])  # fmt: skip
        self._offered.add(index)
        following = self._list_next_buckets(plan, index) if index in plan.first else iter(())
        assert self.by is not None
        await self.by.unshard(self._run.rank, self._run.state, self._parameter_layout.weight_bucket(index), following)
        self._mark_whole(index)

    def _list_gather_order(self) -> list[int]:
        """Foreseen buckets come first."""
        first = self._plan_pass("forward").first
        planned = sorted(first, key=lambda i: (first[i], -i))
        return planned + [i for i in range(len(self._parameter_layout.buckets)) if i not in first]

    def _add_preceding(self, wanted: list[int], plan: PassEvents) -> list[int]:
        """Puts preceding buckets before these. See [Note: Straying]."""
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
        """Gathers the remaining buckets; see [Note: Straying]."""
        if self._queue is None:
            return
        plan, left, self._queue = self._plan_pass("forward"), self._queue, None
        for index in left:
            await self._gather_bucket(index, plan)
        kept = {index for index in plan.first if index not in plan.over}
        strayed = any(await self._run.gather(int(self._strays or any(index in plan.first for index in left))))
        for index in sorted(self.whole - kept) if strayed else [i for i in left if i not in plan.first]:
            await self._reshard_bucket(index)
        for index in sorted(set(range(len(self._parameter_layout.buckets))) - kept) if strayed else ():
            await self._gather_bucket(index, NO_PLAN)

    async def gather_unforeseen(self, phase: str) -> list[int]:
        """Gathers and returns unforeseen buckets, for a host that computes a pass at once after the foreseen ones."""
        plan = self._plan_pass(phase)
        more = [i for i in range(len(self._parameter_layout.buckets)) if i not in plan.first and i not in self.whole]
        for index in more:
            await self._gather_bucket(index, plan)
        return more

    async def reshard_written(self) -> None:
        """After a simulated forward: lets the strategy's copies follow what the model wrote into released buckets."""
        self.enter_phase("forward")
        for index in sorted(self.written - self.whole):
            await self._reshard_bucket(index)
        self.written.clear()
        self.enter_phase("")

    async def reshard_buckets(self, buckets: Iterable[int]) -> None:
        for index in buckets:
            await self._reshard_bucket(index)

    def _list_next_buckets(self, plan: PassEvents, index: int) -> Iterator[Bucket]:
        for event in plan.events[plan.first[index] :]:
            for other in event.buckets if event.kind == "read" else ():
                if other != index and other not in self.whole:
                    self._offered.add(other)
                    yield self._parameter_layout.weight_bucket(other)

    def count_copies(self) -> int:
        """Returns bytes of parameters that the strategy holds in addition to whole buckets and shards."""
        return self.by.copies(self._run.state) if self.by is not None and self.sharded else 0

    def require_sharded(self) -> None:
        """Raises StrategyError if a strategy holds a shard that nothing would gather."""
        if not self.sharded:
            raise StrategyError(
                "hold: all parameters are on this rank; a strategy that shards them must claim 'parameters' in "
                "`shards` and call this in its `unshard` and `reshard`"
            )

    async def note_filled(self, index: int) -> None:
        """Reshards a bucket that the backward does not read again."""
        if self.sharded and index in self.whole:
            await self._reshard_bucket(index)

    async def reshard_all(self) -> None:
        """After a backward or an evaluation: reshards every bucket."""
        if not self.sharded:
            return
        for index in sorted(self.whole | self._offered):
            await self._reshard_bucket(index)

    async def _reshard_bucket(self, index: int) -> None:
        run = self._run
        if self._ask is not None:
            for place in self._parameter_layout.groups[index]:
                unmaterialized.make_absent(place.param, self._fetch_parameters)
        self.whole.discard(index)
        self._offered.discard(index)
        assert self.by is not None
        await self.by.reshard(run.rank, run.state, self._parameter_layout.weight_bucket(index))

    def _mark_whole(self, index: int) -> None:
        self.whole.add(index)
        if self._ask is not None:
            for place in self._parameter_layout.groups[index]:
                unmaterialized.make_present(place.param)

    def _fetch_parameters(self, params: list[nn.Parameter], others: list[nn.Parameter]) -> None:
        if self._known[0] is not self._parameter_layout.buckets:
            self._known = (
                self._parameter_layout.buckets,
                {id(place.param): place for place in self._parameter_layout.order},
            )
        buckets = {place.bucket: place.name for place in (self._known[1][id(p)] for p in params)}
        if not self.phase:
            name = next(iter(buckets.values()))
            raise StrategyError(
                f"parameter {name} is read between two passes, when each rank has only a shard of it: read it in a "
                f"forward, a backward or an evaluation, or take a strategy with whole parameters (ZeRO2)"
            )
        beside = {self._known[1][id(p)].bucket for p in others if id(p) in self._known[1]}
        self._fetch_buckets(buckets, beside)

    def _fetch_buckets(self, buckets: Iterable[int], beside: Iterable[int] = ()) -> None:
        assert self._ask is not None
        plan, wanted = self._plan_pass(self.phase), set(buckets)
        at = min((plan.first[i] for i in wanted if i in plan.first), default=None)
        self._ask(wanted, beside, 0.0 if at is None else plan.events[at].share)

    def _pack_tensor(self, x: Tensor) -> Tensor | LentView:
        """Returns a place instead of `x` if its bucket will be released."""
        if x.layout != torch.strided or x.is_conj() or x.is_neg():
            return pack_tensor(x)
        bucket = self._parameter_layout.lying.get(x.untyped_storage()._cdata)
        if bucket is None or bucket not in self.whole or x.dtype != self._parameter_layout.weights[bucket].dtype:
            return pack_tensor(x)
        begins = self._parameter_layout.weights[bucket].storage_offset()
        return LentView(bucket, x.shape, x.stride(), int(x.storage_offset() - begins))

    def _unpack_tensor(self, kept: Tensor | LentView) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if self.sharded and kept.bucket not in self.whole:
            self._fetch_buckets([kept.bucket])
        whole: Tensor = self._parameter_layout.weights[kept.bucket]
        return whole.as_strided(kept.size, kept.stride, int(whole.storage_offset()) + kept.offset)

    # -- events --

    @property
    def _parameter_layout(self) -> ParameterLayout:
        layout: ParameterLayout = self._run.layout
        return layout

    def list_events(self, phase: str) -> list[PassEvent]:
        return self._plan_pass(phase).events

    def _plan_pass(self, phase: str) -> PassEvents:
        layout, trial = self._parameter_layout, self.trial
        assert trial is not None
        if self._plans[0] is not layout.buckets:
            self._plans = layout.buckets, {}
        kind, found = "backward" if phase == "backward" else "forward", self._plans[1]
        if kind not in found:
            events = list_backward_events(layout, trial) if kind == "backward" else list_forward_events(layout, trial)
            reads = [(at, e) for at, e in enumerate(events) if e.kind == "read"]
            found[kind] = PassEvents(events, {i: at for at, e in reads for i in e.buckets},
                               {i: at for at, e in reads for i in e.over})  # fmt: skip
        return found[kind]


def build_shard(run: RankView, strategy: Strategy, bucket: Bucket, given: Mapping[str, Tensor]) -> Bucket:
    """Builds this rank's shard of a bucket from its flat pieces of each parameter."""
    group = next(group for group in list_shard_groups(strategy, run.rank.size) if run.rank.id in group)
    own = [given[part.name] for part in bucket.parts if part.name in given]
    shard = bucket.shard(group.index(run.rank.id), len(group))
    return shard.like(torch.cat(own) if own else bucket.data.new_empty(0))
