"""Optional capabilities of strategies, in groups with defaults for strategies without them.

Each group names its law. The tests in tests/laws check it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.rank import Bucket, Memory, Rank

if TYPE_CHECKING:
    from workbench.strategies.embedding_tables.rows import Lookups, TableLayout


class Serving:
    """Some ranks hold parameters and do not train. Law: a switch in and out leaves all ranks with one state.

    tables: one rank holds each embedding table of the task, with its optimizer state. Other ranks' copies are old
    """

    tables: ClassVar[bool] = False

    def owner(self, table: int, size: int) -> int:
        """Returns the rank that holds an embedding table.

        table:  its number, from 0
        size:   number of ranks
        """
        return 0

    def list_tables(self, learner: Lookups, draw: Callable[[], Any], layout: TableLayout) -> tuple[str, ...]:
        """Returns the names of the tables that a batch reads. () if ranks hold no tables.

        learner:  the task's function that declares the rows of a batch
        draw:     returns a batch
        layout:   the places of the tables in the model
        """
        from workbench.strategies.embedding_tables.rows import find_rows  # imports torch

        return tuple(find_rows(learner, draw(), layout)) if self.tables else ()

    def trains(self, index: int, size: int) -> bool:
        """Whether a rank trains. Otherwise it is a server, which only runs `background`.

        index:  the rank, from 0
        size:   number of ranks, servers included
        """
        return True

    def batches(self, size: int) -> int:
        """Returns how many batches of one rank make the global batch, which may scale the learning rate.

        size:  number of ranks, servers included
        """
        return sum(self.trains(r, size) for r in range(size))


class Apart:
    """Ranks do not meet in every step. Law: what both hosts send agrees, and a change acts on all ranks.

    alike:    equally fast ranks do the same at the same time and meet only in collectives, so a simulation with sizes
              only may use one rank for all. Memory may differ by a few bytes (a shorter last shard)
    lockstep: all ranks issue the same operations in the same order. Otherwise ranks are asynchronous, and a change
              waits until all ranks have drained
    """

    alike: ClassVar[bool] = False
    lockstep: ClassVar[bool] = True

    def propagation(self, size: int) -> int:
        """Returns the steps until messages carry a report of rank 0 to every rank; 0 if ranks meet or can be called.

        For strategies with ranks that wait only for message partners. All ranks apply a change at a step that rank 0
        chooses. Every message carries this step.
        """
        return 0

    def propagation_in(self, size: int, step: int) -> int:
        """Returns `propagation` in a given step, for strategies with a common step only up to a step of the run.

        step:  the step, from 0
        """
        return self.propagation(size)

    def newest(self, rank: Rank, state: Any) -> int:
        """Returns the newest step that any rank may have begun: on rank 0, with `propagation` > 0."""
        return rank.step

    def steps_apart(self, state: Any) -> int | None:
        """Returns, if `periodic`, the steps since all ranks last had the same parameters. None if unknown.

        If a rank is lost during an averaging, only some ranks have the mean. The ranks that have it count.
        """
        return None

    def anchor(self, state: Any) -> Memory | None:
        """Returns the Memory whose slot "anchor" has the last parameters common to all ranks; None without one."""
        return None

    async def known(self, rank: Rank, state: Any) -> Any:
        """Returns the last parameters that all ranks agree on, as far as this rank knows. None means its own.

        For ranks without a common step. It sends nothing, so that no rank waits when rank 0 evaluates.
        """
        return None


class Beside:
    """A second coroutine runs next to the steps. Law: it ends before the strategy is left, and a change restarts it."""

    async def background(self, rank: Rank, state: Any) -> None:
        """Runs next to `step`, on a thread and connection of its own. Changes parameters through `params`.

        Symmetric ranks loop `while await rank.again()`, at most once per step. A server loops on `recv` until it
        returns None. The coroutine ends when all steps have stopped, before `leave`. It begins again afterwards.
        """

    @property
    def has_background(self) -> bool:
        """Whether this strategy has a `background`."""
        return type(self).background is not Beside.background


class Unfinished:
    """A step may end with exchanges under way. Law: a change at any step loses nothing of what is under way.

    in_flight:   exchanges or state by bucket outlast a step; `drain` finishes them before any change and before buckets
                 are cut again
    late_update: a step's update may also be made in the next step, which needs `in_flight`. The host also drains before
                 an evaluation or a new learning rate. Ranks are whole replicas
    """

    in_flight: ClassVar[bool] = False
    late_update: ClassVar[bool] = False

    async def drain(self, rank: Rank, state: Any) -> None:
        """Finishes exchanges that are `in_flight` and keeps `state` usable. Default: `leave`."""
        await self.leave(rank, state)  # type: ignore[attr-defined]  # a Strategy

    @property
    def can_drain(self) -> bool:
        """Whether it can finish exchanges without being left. In lockstep it also does so at the run's end."""
        return type(self).drain is not Unfinished.drain


class InPieces:
    """Its step passes the model piece by piece. Law: all pieces together compute what the model does."""

    @property
    def by_pieces(self) -> bool:
        """Whether it cuts the model. Hosts then first check the model's parts on one batch."""
        return False


class Sharding:
    """Ranks shard values that all of them need. Law: the shards together are bit-identical through any switch.

    shards:       the sharded values: "optimizer state" (for optimizers that step each element by itself), "gradients"
                  (once they are summed), "parameters" (except while they are read). Of p ranks the r-th keeps the r-th
                  of p slices of every bucket, as `Bucket.shard` cuts it
    shared_along: the mesh dimensions along which shards are dealt out; ranks that differ in other dimensions keep the
                  same shard. Empty: all dimensions
    offloads:     it keeps some of its shards away from the device, also on one rank alone
    """

    shards: ClassVar[frozenset[str]] = frozenset()
    shared_along: ClassVar[tuple[str, ...]] = ()
    offloads: ClassVar[bool] = False

    async def unshard(self, rank: Rank, state: Any, bucket: Bucket, following: Iterator[Bucket]) -> None:
        """Gathers all parameters of `bucket` before a forward, a backward or an evaluation reads it.

        following:  the buckets that this pass will read next and that are not whole, in their order. Take only the
        buckets to gather now
        """

    async def recall(self, rank: Rank, state: Any) -> None:
        """Returns all offloaded shards to their places on the device.

        For strategies that `offloads`. Hosts call it before they make a new optimizer, leave the strategy, or cut
        buckets again while nothing is set `aside`.
        """

    def copies(self, state: Any) -> int:
        """Returns the bytes of parameters that it holds now in addition to whole buckets and shards."""
        return 0

    def aside(self, state: Any) -> list[Bucket]:
        """Returns and forgets its offloaded parameter shards, before buckets are cut again. If empty, `recall` them."""
        return []

    async def stow(self, rank: Rank, state: Any, bucket: Bucket) -> None:
        """Offloads this rank's shard of a new bucket and its optimizer state, after `aside`."""

    async def reshard(self, rank: Rank, state: Any, bucket: Bucket) -> None:
        """Keeps only this rank's shard of `bucket` after a pass has read it; also called for shards at a pass's end."""


class Outer:
    """An outer momentum outlives the strategy. Law: a switch at a round's end to another with one continues it."""

    def hands_on(self, rank: Rank, state: Any) -> Any:
        """Returns its outer momentum after `leave`, as displacements by parameter name. None without one."""
        return None

    def takes(self, rank: Rank, state: Any, momentum: Any) -> None:
        """Continues after `init` with the momentum that the previous strategy `hands_on`.

        momentum:  displacements by parameter name
        """

    @property
    def has_outer(self) -> bool:
        """Whether it would continue with an outer momentum."""
        return type(self).takes is not Outer.takes


class Remembering:
    """A rank's state is its own. Law: each part of it has a rule for when the strategy is left.

    own: the rules by name, of buffers and parts of a Memory and attributes of the state, or of patterns ("sent *")

    "sum": part of a sum that is owed or under way, which `leave` delivers. "mean": a replica of one value, which
    `leave` averages. "keep": continues under a next strategy that `takes` it. "drop": has no meaning afterwards.
    """

    own: ClassVar[dict[str, str]] = {}


class OneMemory:
    """Several steps run at once on one vector of parameters. Law: no update is lost while steps do not collide.

    workers: how many `step`s run at once on each training rank; `rank.worker` distinguishes them
    shared:  all workers of one machine share one vector of parameters, and `leave` averages nothing. On the engine all
             ranks are on that machine
    """

    workers: ClassVar[int] = 1
    shared: ClassVar[bool] = False
