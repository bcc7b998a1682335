"""Rank: everything that a strategy may see and use, among all ranks of the run or in a group."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from workbench.rank.awaitables import Backward, Forward, Handle, Op
from workbench.rank.bucket import Bucket, Memory
from workbench.rank.data import Data
from workbench.rank.errors import StrategyError
from workbench.rank.former_verbs import find_former_verb
from workbench.rank.mesh import Group, Mesh

if TYPE_CHECKING:
    from torch import Tensor

REDUCTIONS = ("sum", "mean", "max", "min")


class Rank(Data):
    """Everything that a strategy may see and use. Every verb completes before it returns; `start` overlaps.

    index, size:  this rank and the number of ranks, of the run or of a group
    id:           this rank in the run, for records. An algorithm uses `index`
    members:      by place, the number that each rank keeps for the whole run. (): the place itself
    mesh:         the named dimensions in which the strategy arranges the ranks that train
    within:       the group that this Rank stands for. None: all ranks of the run
    worker:       the number of the strategy's worker that runs on this rank, from 0
    role:         "trainer", or "server" if the strategy's `trains` returns False
    step:         the number of the present step, from 0
    lr:           the present learning rate
    rated:        rated(step): this step's updates from here on use the learning rate of `step`
    clip:         the largest gradient norm if a strategy that updates by shards must clip itself. 0: no limit
    compressor:   encodes a bucket before it is sent (its `reduce` is a coroutine)
    density:      with sizes only: the share of elements that a choice by value is assumed to keep
    memory:       the compressor's memory on this rank
    tables:       the names of the embedding weights that the strategy keeps on servers
    phase:        the pass under way if parameters are sharded: "forward", "backward", "evaluation" or ""
    """

    def __init__(self, index: int, size: int, seed: int = 0, *, step: int = 0, lr: float = 0.0,
                 members: tuple[int, ...] = (), density: float | None = None) -> None:  # fmt: skip
        """Hosts call it.

        seed:  of the experiment, for this rank's random numbers
        """
        self.id = self.index = index
        self.size = size
        self.members = members
        self.within: Group | None = None
        self._groups: dict[tuple[str, ...], Rank] = {}
        self.mesh = Mesh.line(size)
        self.worker = 0
        self.role = "trainer"
        self.step, self.lr, self.clip = step, lr, 0.0
        self.rated: Callable[[int], None] = lambda step: None
        self.compressor: Any = None
        self.density = density or 0.01
        self.memory = Memory(seed * 100_003 + index)
        self.tables: tuple[str, ...] = ()
        self.phase = ""

    if not TYPE_CHECKING:  # new code calls the functions

        def __getattr__(self, name: str) -> Any:
            return find_former_verb(self, name)

    def number(self, place: int | None = None) -> int:
        """Returns the number in the run of a rank. Messages for people use it.

        place:  the rank's place, from 0. None: this rank
        """
        place = self.id if place is None else place
        return self.members[place] if self.members else place

    @property
    def mesh(self) -> Mesh:
        """The named dimensions in which the strategy arranges the ranks that train."""
        return self._mesh

    @mesh.setter
    def mesh(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._groups.clear()

    def group(self, *dims: str) -> Rank:
        """Returns a Rank for this rank's group along some mesh dimensions, with the same verbs.

        dims:  names of dimensions

        Several dimensions make one group of all their ranks. Raises StrategyError for an unknown dimension, and on a
        server, which is outside the mesh.
        """
        if dims not in self._groups:
            self._groups[dims] = Member(self, self.mesh.group(dims, self.id))
        return self._groups[dims]

    @property
    def replicas(self) -> Rank:
        """This rank in the group of ranks that hold the same part of the model, one of each replica."""
        inside = self.mesh.inside
        return self.group(*[name for name, _ in self.mesh.dims if name not in inside]) if inside else self

    @property
    def inside(self) -> Rank:
        """This rank in the group that its replica is spread over. Raises StrategyError if replicas are whole."""
        return self.group(*self.mesh.inside)

    # compute
    def forward(self, x: Any = None, micro: int = 0) -> Forward:
        """Returns the loss of a batch. Before a pipeline's last stage it returns the activation.

        x:      the batch, or the activation from the stage before. None: the next batch
        micro:  names this forward for its backward. Several may be open at once
        """
        return Forward(x, micro)

    def backward(self, grad: float | Tensor | None = None, micro: int = 0) -> Backward:
        """Computes gradients of a forward times `grad`.

        grad:   a number, or the gradient of the stage's activation. None: 1
        micro:  the forward's name

        Gradients add up until `update`. `async for` yields buckets as they fill, with the sums so far.
        """
        return Backward(grad, micro)

    def update(self, bucket: Bucket | None = None, by: Callable[[], None] | None = None, on: str = "device") -> Op:
        """Steps the optimizer with the present gradients, then clears them.

        bucket:  update only these parameters, or this shard of them. None: all
        by:      the strategy's own step in place of the optimizer's
        on:      "device" or "host"

        With `bucket` it updates only these parameters. For an element-wise optimizer `bucket` may be a shard of one. It
        then clears the whole bucket's gradients, and the strategy must apply `clip`. With `by` the host calls `by`
        instead of the optimizer. This is the strategy's own step and takes the time of any update.

        On the "host" the host's processor steps the shard `bucket` while the device computes. `offload` must have moved
        all state of the shard there. The settings are those of this call, or of the start of the child that makes it.
        """
        return Op("update", bucket, by, on)

    def params(self) -> Op:
        """Returns the parameters as Buckets that view them: writing into `data` changes the model."""
        return Op("params")

    def grads(self) -> Op:
        """Returns the gradients as a list of Buckets, zero where none exists. `update` uses what is written into them.

        A strategy that steps by `params` sets them to zero after use.
        """
        return Op("grads")

    def slots(self) -> Op:
        """Returns the optimizer state (momenta) as a list of tensors in the same order on all ranks.

        It is empty before the first `update`. Writing into the tensors changes the state.
        """
        return Op("slots")

    def hold(self, bucket: Bucket) -> Op:
        """Keeps only a shard of a parameter bucket in memory, or all of it again from its `data`.

        bucket:  the shard (`Bucket.shard`), or the whole bucket

        It serves a strategy that `shards` "parameters", in its `unshard` and `reshard`. Returns the bucket with its
        data as now stored. If the rank already holds this shard, nothing changes.
        """
        return Op("hold", bucket)

    # collective; `x` is a flat tensor, changed in place if a verb says so
    def all_reduce(self, x: Tensor, op: str = "sum", name: str = "") -> Op:
        """Replaces `x` in place by its sum over all ranks (or by "mean", "max" or "min") and returns it.

        x:     `(n,)`
        op:    "sum", "mean", "max" or "min"
        name:  the name in the record

        A mean divides the sum after the exchange, so it sends the same bytes. A sum in float16 overflows above 65504,
        so there ranks divide before. Raises StrategyError for another `op` and for the mean of integers.
        """
        if op not in REDUCTIONS:
            raise StrategyError(f"all_reduce: op={op!r} must be one of {', '.join(map(repr, REDUCTIONS))}")
        if op == "mean" and not (x.is_floating_point() or x.is_complex()):
            raise StrategyError(
                f"all_reduce: op='mean' of {x.dtype} elements, which cannot hold a mean. Use 'sum' and divide in "
                f"float32"
            )
        return self._collective("all_reduce", x, op, name)

    def reduce_scatter(self, x: Tensor, name: str = "") -> Op:
        """`(size * n,) -> (n,)`: returns this rank's chunk of the sum over ranks.

        x:     `(size * n,)`
        name:  the name in the record
        """
        return self._collective("reduce_scatter", x, name)

    def all_gather(self, x: Tensor, name: str = "") -> Op:
        """`(n,) -> (size, n)`: returns every rank's `x` in rank order. All ranks need the same n.

        x:     `(n,)`
        name:  the name in the record
        """
        return self._collective("all_gather", x, name)

    def all_to_all(self, x: Tensor, name: str = "") -> Op:
        """`(size, n) -> (size, n)`: sends row j to rank j. Row i of the result came from rank i.

        x:     `(size, n)`
        name:  the name in the record
        """
        return self._collective("all_to_all", x, name)

    def all_to_allv(self, rows: list[Tensor], lengths: tuple[tuple[int, ...], ...], name: str = "") -> Op:
        """Sends row j to rank j and returns the list of rows by rank. Rows have any length and one dtype.

        rows:     one for each rank, `(n_j,)`
        lengths:  lengths[i][j] is the number of elements that rank i sends to rank j. The same on all ranks
        name:     the name in the record

        An empty row costs nothing: with 1 non-empty row per rank this is an exchange in pairs. Raises StrategyError if
        this rank's rows do not have these lengths.
        """
        has, said = [row.numel() for row in rows], list(lengths[self.index])
        if has != said:
            raise StrategyError(
                f"all_to_allv: rank {self.index}'s rows have {has} elements, but `lengths` gives {said}"
            )
        return self._collective("all_to_allv", rows, lengths, name)

    def broadcast(self, x: Tensor, source: int = 0, name: str = "") -> Op:
        """Replaces `x` in place by one rank's `x` and returns it.

        x:       `(n,)`, equally long on all ranks
        source:  the rank that sends
        name:    the name in the record
        """
        return self._collective("broadcast", x, source, name)

    # point to point
    def send(self, tensor: Tensor, to: int, kind: str = "") -> Op:
        """Posts a copy of a tensor to a rank and returns None at once. It never occupies a lane.

        tensor:  of any shape and dtype
        to:      the rank that receives
        kind:    which `recv` takes it
        """
        return Op("send", tensor, to, kind)

    def recv(self, into: Tensor | None, source: int | None = None, kind: str = "") -> Op:
        """Returns (data, source) of the next message of a kind.

        into:    the tensor to receive into. None: a new one of the shape that was sent; the shape travels first
        source:  the rank that sends. None: any rank
        kind:    as in `send`

        Returns None if no message can follow, because the run stops or the strategy is being left.
        """
        return Op("recv", into, source, kind)

    # concurrency
    def start(self, child: Coroutine[Op, Any, Any], lane: str = "comm", name: str = "", priority: int = 0,
              share: float = 1.0) -> Op:  # fmt: skip
        """Starts a coroutine next to the step. Returns a Handle for `wait` in this step or a later one.

        child:     the coroutine
        lane:      the name of its lane
        name:      the name in the record
        priority:  0: none
        share:     the child's part of the total of 1, up to which rank 0 begins children

        Children of a lane run in the order of their start. A child with a `priority` overtakes waiting children of
        lower priority, up to the last child without one. All ranks use rank 0's order. Rank 0 begins children until
        their `share`s add up to 1; later children wait for these.
        """
        return self._collective("start", child, lane, name, priority, share)

    def wait(self, handle: Handle) -> Op:
        """Returns the result of a started child.

        handle:  from `start`
        """
        return Op("wait", handle)

    def again(self, rest: float = 0.0, alone: bool = False) -> Op:
        """In a background: waits for a step's end and `rest` seconds, and returns the step's number.

        rest:   seconds
        alone:  whether only this rank's step counts

        Returns 0 when the backgrounds must end: all of them together, or with `alone` only this one. In a group, only
        its ranks count. Ranks outside the group need not take part.
        """
        return self._collective("again", rest, alone)

    def clock(self) -> Op:
        """Returns seconds since the run began on the host's clock, for deadlines."""
        return Op("clock")

    def sample(self, name: str, value: float) -> Op:
        """Writes one number into the record.

        name:   the Sample's name
        value:  the number
        """
        return Op("sample", name, value)

    def _collective(self, verb: str, *args: Any) -> Op:
        """Builds an Op that all ranks of the group must make."""
        op = Op(verb, *args)
        op.measures = self.phase == "evaluation"
        return op


class Member(Rank):
    """A Rank in a group: `index` and `size` are the group's. Everything else is the rank's own."""

    def __init__(self, whole: Rank, group: Group) -> None:
        self._whole, self.within = whole, group
        self.index, self.size = group.index(whole.id), len(group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def group(self, *dims: str) -> Rank:
        return self._whole.group(*dims)

    def _collective(self, verb: str, *args: Any) -> Op:
        assert self.within is not None
        if self.within.generation != self.mesh.generation:
            raise StrategyError(
                f"group {self.within} is out of date, because the ranks are now arranged as {self.mesh}: call "
                f"rank.group() again"
            )
        op = Op(verb, *args)
        op.measures, op.group = self.phase == "evaluation", self.within
        return op

    def broadcast(self, x: Tensor, source: int = 0, name: str = "") -> Op:
        self._known(source)
        return super().broadcast(x, source, name)

    def send(self, tensor: Tensor, to: int, kind: str = "") -> Op:
        return Op("send", tensor, self._known(to), self._own(kind))

    async def recv(self, into: Tensor | None, source: int | None = None, kind: str = "") -> Any:  # type: ignore[override]
        got = await Op("recv", into, None if source is None else self._known(source), self._own(kind))
        assert self.within is not None
        return None if got is None else (got[0], self.within.index(got[1]))

    def _known(self, index: int) -> int:
        """Returns the number in the run of the group's rank `index`."""
        assert self.within is not None
        if not 0 <= index < self.size:
            raise StrategyError(f"rank {index} of group {self.within}: there are 0 to {self.size - 1}")
        return self.within.ranks[index]

    def _own(self, kind: str) -> str:
        """Returns a message kind that no other group uses."""
        return f"{kind} in {self.within}".lstrip()
