"""What some strategies can do besides, in groups: each has the answers of a strategy that cannot, and names its law.

A strategy overrides what it needs of a group and leaves the others alone. The laws are in tests/laws.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from workbench.rank import Bucket, Memory, Rank


class Serving:
    """Some ranks hold parameters and do not train. Law: a switch in and out leaves all ranks with one state.

    tables: embedding tables, which the task names, lie with one rank each, and with them what the optimizer remembers
            of them: what other ranks have of them is old
    """

    tables: ClassVar[bool] = False

    def owner(self, table: int, size: int) -> int:
        """Where `tables` lie with one rank each: the rank that has number `table` of those that the task names."""
        return 0

    def trains(self, index: int, size: int) -> bool:
        """Does rank `index` of `size` train? One that does not is a server: only its `background` runs."""
        return True

    def batches(self, size: int) -> int:
        """How many batches of one rank make the global batch that a learning rate may be scaled with."""
        return sum(self.trains(r, size) for r in range(size))


class Apart:
    """Ranks do not meet in every step. Law: what both hosts send agrees, and a change acts on all ranks.

    alike:    ranks that are equally fast all do the same at the same time, and meet in collectives alone: so with sizes
              only one may stand for all. What it keeps may be a few bytes more than others keep (a shorter last shard)
    lockstep: all ranks ask the same operations in the same order. False means asynchronous: ranks do not meet each
              step, and changes wait until all have drained.
    """

    alike: ClassVar[bool] = False
    lockstep: ClassVar[bool] = True

    def propagation(self, size: int) -> int:
        """Steps until every rank has heard, through messages, what rank 0 says; 0: they meet, or come when called.

        For strategies whose ranks only wait for those they exchange messages with: all of them act on a change at
        a step that rank 0 names, and each message tells it.
        """
        return 0

    def propagation_in(self, size: int, step: int) -> int:
        """`propagation` in step `step`, where a common step is kept only for a while, up to a step of the run."""
        return self.propagation(size)

    def newest(self, rank: Rank, state: Any) -> int:
        """On rank 0, where `propagation` > 0: the newest step any rank may have begun, if others may overtake it."""
        return rank.step

    def steps_apart(self, state: Any) -> int | None:
        """For a `periodic` strategy: steps since all ranks last had the same parameters; None if it cannot tell.

        If a rank is lost while the others take their mean, some have it and some do not: those that have it count.
        """
        return None

    def anchor(self, state: Any) -> Memory | None:
        """What remembers in slot "anchor" the parameters that all ranks last had; None if nothing does."""
        return None

    async def known(self, rank: Rank, state: Any) -> Any:
        """Where ranks keep no common step: the parameters that all agree on, as far as this rank knows, as Buckets.

        It asks nobody, so that no rank waits when rank 0 evaluates; None for this rank's own.
        """
        return None


class Beside:
    """A second coroutine runs beside the steps. Law: it ends before the strategy is left, and a change restarts it."""

    async def background(self, rank: Rank, state: Any) -> None:
        """A second coroutine beside `step`, with a thread and a wire of its own; it changes parameters by `params`.

        Symmetric ones loop `while await rank.again()`, which comes round at most once per step; a server loops on
        `recv` until it gets None. It ends when all steps stand still, before `leave` is asked, and begins again.
        """

    @property
    def has_background(self) -> bool:
        """Does this strategy run anything beside `step`?"""
        return type(self).background is not Beside.background


class Unfinished:
    """A step may end with exchanges under way. Law: a change at any step loses nothing of what is under way.

    in_flight: exchanges are under way, or things are kept by bucket, when a step ends; `drain` ends that before
               anything is changed, and before buckets are cut anew
    late_update: a step's update, too, may be made in the next one, which needs `in_flight`; `drain` makes it. So it is
                 drained before an evaluation and before the learning rate changes, too, and ranks are whole replicas
    """

    in_flight: ClassVar[bool] = False
    late_update: ClassVar[bool] = False

    async def drain(self, rank: Rank, state: Any) -> None:
        """Where exchanges are `in_flight`: finishes them, to go on with the same `state`. Without it: `leave`."""
        await self.leave(rank, state)  # type: ignore[attr-defined]  # a Strategy

    @property
    def can_drain(self) -> bool:
        """Can it finish what is under way without being left? In lockstep it does so when the run is over, too."""
        return type(self).drain is not Unfinished.drain


class InPieces:
    """Its step passes the model piece by piece. Law: all pieces together compute what the model does."""

    @property
    def by_pieces(self) -> bool:
        """Does it cut the model? Then hosts first try on one batch that the model's parts compute what it does."""
        return False


class Sharding:
    """Ranks keep parts of what others keep, too. Law: what the parts make together is bit-equal through any switch.

    shards: what each rank keeps its part of: of p ranks the r-th keeps the r-th of p slices of every bucket, as
            `Bucket.shard` cuts it; "optimizer state", which only optimizers that step each element by itself allow,
            "gradients", once they are summed, and "parameters", but while they are read
    shared_along: the dimensions of the mesh along which they are dealt out; ranks that differ in others keep the same.
            None named: all of them
    offloads: it keeps some of its shards away from the device, as one rank alone may do, too
    """

    shards: ClassVar[frozenset[str]] = frozenset()
    shared_along: ClassVar[tuple[str, ...]] = ()
    offloads: ClassVar[bool] = False

    async def unshard(self, rank: Rank, state: Any, bucket: Bucket, following: Iterator[Bucket]) -> None:
        """Before a forward, a backward or an evaluation reads `bucket`: brings all of its parameters here.

        following: the buckets that this pass is known to read next and that are not whole either, in their order; take
                   no more than begin to come
        """

    async def recall(self, rank: Rank, state: Any) -> None:
        """Where it `offloads`, before an optimizer is made anew, it is left, or buckets are cut anew and nothing is set
        `aside`: all comes back to the device, as it lay there. It may be away again from the next step on.
        """

    def aside(self, state: Any) -> list[Bucket]:
        """Where it `offloads`, before buckets are cut anew: its shards of parameters that are away, of which it then
        knows no longer. None are: all is to be recalled.
        """
        return []

    async def stow(self, rank: Rank, state: Any, bucket: Bucket) -> None:
        """After that: this rank's shard of a new bucket is here, and what the optimizer remembers of it; they go."""

    async def reshard(self, rank: Rank, state: Any, bucket: Bucket) -> None:
        """The pass reads `bucket` no more: keeps this rank's shard of it. Asked of shards, too, when a pass is over."""


class Outer:
    """An outer momentum outlives the strategy. Law: a switch to another with one, at a round's end, goes on with it."""

    def hands_on(self, rank: Rank, state: Any) -> Any:
        """After `leave`: an outer momentum, if it has one, as displacements by parameter's name; else None."""
        return None

    def takes(self, rank: Rank, state: Any, momentum: Any) -> None:
        """After `init`: what the strategy before `hands_on`, which one with an outer momentum goes on with."""

    @property
    def has_outer(self) -> bool:
        """Would it go on with an outer momentum?"""
        return type(self).takes is not Outer.takes


class Remembering:
    """What a rank remembers beside the parameters is its own. Law: what it remembers when it is left has a rule.

    own: by name, what becomes of it then: names of buffers and parts of a Memory, and of attributes of its state, or
         patterns of them ("sent *")

    "sum": a part of what is owed or travels, which `leave` brings to those whom it is for. "mean": a replica of one
    value, of which `leave` makes the ranks' mean. "keep": goes on under a next strategy that `takes` it. "drop": of no
    meaning afterwards.
    """

    own: ClassVar[dict[str, str]] = {}


class OneMemory:
    """Several steps at once on one vector of parameters. Law: no update of one is lost where they do not meet.

    workers: how many `step`s run at once on each rank that trains; `rank.worker` tells them apart
    shared:  all workers of one machine, whatever their rank, have one vector of parameters in common; on the engine all
             ranks are on that machine, and `leave` has nothing to average
    """

    workers: ClassVar[int] = 1
    shared: ClassVar[bool] = False
