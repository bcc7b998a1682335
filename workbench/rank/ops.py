"""What a strategy may see and ask for: the verbs of a Rank, among all ranks of the run or among those of a group."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from workbench.rank.arithmetic import Arithmetic
from workbench.rank.awaitables import Backward, Forward, Handle, Op, StrategyError
from workbench.rank.bucket import Bucket, Memory
from workbench.rank.data import Data
from workbench.rank.elsewhere import Elsewhere
from workbench.rank.mesh import Group, Mesh
from workbench.rank.pieces import Pieces

if TYPE_CHECKING:
    from torch import Tensor

REDUCTIONS = ("sum", "mean", "max", "min")  # what an all-reduce can make of the ranks' tensors


class Rank(Arithmetic, Data, Pieces, Elsewhere):
    """All that a strategy may see and ask for. Every verb completes before it returns; `start` overlaps.

    index, size:  this rank and how many there are, here: in the run, or in a group of it
    id:           this rank in the run, for what is written down; an algorithm counts by `index`
    members:      by place the number that each rank keeps for the whole run; (): its place
    mesh:         the named dimensions in which the strategy has arranged the ranks that train
    within:       the group that this Rank stands for; None: all of the run
    worker:       which of the strategy's `workers` on this rank runs, from 0
    role:         "trainer", or "server" where the strategy's `trains` says no
    step:         the number of the present step, from 0
    lr:           the present learning rate
    rated:        rated(step): from here on this step's updates are those of `step`, which lasts at another rate
    clip:         the longest that the gradient may be, 0 for any, where a strategy updates by shards and so sees to it
    compressor:   what crosses the wire instead of a bucket (its `reduce` is a coroutine)
    density:      where there are sizes only: the share of elements that a choice by their values is taken to keep
    memory:       the compressor's memory on this rank
    tables:       where the strategy keeps embedding `tables` on servers, the names of their weights; else none
    phase:        where parameters lie in shards, the pass under way: "forward", "backward" or "evaluation"; else ""
    """

    def __init__(self, index: int, size: int, seed: int = 0) -> None:
        self.id = self.index = index
        self.size = size
        self.members: tuple[int, ...] = ()
        self.within: Group | None = None
        self._groups: dict[tuple[str, ...], Rank] = {}
        self.mesh = Mesh.line(size)
        self.worker = 0
        self.role = "trainer"
        self.step = 0
        self.lr = self.clip = 0.0
        self.rated: Callable[[int], None] = lambda step: None
        self.compressor: Any = None
        self.density = 0.01
        self.memory = Memory(seed * 100_003 + index)
        self.tables: tuple[str, ...] = ()
        self.phase = ""

    def number(self, place: int | None = None) -> int:
        """The number in the run of the rank at `place`, or of this rank: messages for people name ranks by it."""
        place = self.id if place is None else place
        return self.members[place] if self.members else place

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @mesh.setter
    def mesh(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._groups.clear()

    def group(self, *dims: str) -> Rank:
        """This rank among those that differ from it only in the dimensions `dims` of the mesh: the same verbs.

        Several dimensions make one group of all their ranks. Raises StrategyError for a dimension that the mesh has
        not, and on a server, which stands outside the mesh.
        """
        if dims not in self._groups:
            self._groups[dims] = Member(self, self.mesh.group(dims, self.id))
        return self._groups[dims]

    @property
    def replicas(self) -> Rank:
        """This rank among those that hold the same of the model, one of each replica: whom a strategy is about."""
        inside = self.mesh.inside
        return self.group(*[name for name, _ in self.mesh.dims if name not in inside]) if inside else self

    @property
    def inside(self) -> Rank:
        """This rank among those over which its replica is spread. Raises StrategyError where replicas are whole."""
        return self.group(*self.mesh.inside)

    # compute
    def forward(self, x: Any = None, micro: int = 0) -> Forward:
        """The loss of the next batch, or of `x`; on a pipeline stage but the last, the activation made of `x`.

        `micro` names this forward for the backward that belongs to it; several may be open at once.
        """
        return Forward(x, micro)

    def backward(self, grad: float | Tensor | None = None, micro: int = 0) -> Backward:
        """Gradients of `micro`'s forward times `grad` (a number for a loss, a tensor for an activation).

        They add up until `update`; `async for` hands out buckets as they fill, with what has been added so far.
        """
        return Backward(grad, micro)

    def update(self, bucket: Bucket | None = None, by: Callable[[], None] | None = None, on: str = "device") -> Op:
        """One step of the optimizer with the gradients that are there; gradients are cleared after.

        With `bucket` (or a shard of one; element-wise optimizers only) just of its parameters; the whole bucket's
        gradients are cleared after, and `clip` is the strategy's to heed. With `by` that is called in the optimizer's
        place: a strategy's own step, which takes the time of any update. On the "host" its processor steps the shard
        `bucket`, all of which `offload` has brought there, beside whatever the device computes: by the settings of when
        it was asked for, or of the start of the child that asks.
        """
        return Op("update", bucket, by, on)

    def params(self) -> Op:
        """The parameters as a list of Buckets that view them: writing into `data` changes the model."""
        return Op("params")

    def grads(self) -> Op:
        """The gradients that are there as a list of Buckets, zero where none is: what is written is what `update` uses.

        Zeroed, they are used up: for those that step by `params`.
        """
        return Op("grads")

    def slots(self) -> Op:
        """What the optimizer remembers (momenta), as a list of tensors in an order that is the same on all ranks.

        Empty before its first `update`; writing into them in place changes it.
        """
        return Op("slots")

    def hold(self, bucket: Bucket) -> Op:
        """Keeps of a parameter bucket only these elements in memory: a shard's; or all again, which lie in its `data`.

        For a strategy that `shards` "parameters", in its `unshard` and `reshard`. Returns the bucket with its data as
        it lies now; asked for the shard that is held it changes nothing.
        """
        return Op("hold", bucket)

    # collective; `x` is a flat tensor, changed in place where it says so
    def all_reduce(self, x: Tensor, op: str = "sum", name: str = "") -> Op:
        """`x` becomes its sum over all ranks ("mean", "max", "min"), in place; returns `x`.

        Raises StrategyError for another `op`, and for the mean of integers. A mean is the sum divided by the number
        of ranks, once it has come: the same bytes cross the wire.
        """
        if op not in REDUCTIONS:
            raise StrategyError(f"all_reduce: op={op!r} must be one of {', '.join(map(repr, REDUCTIONS))}")
        if op == "mean" and not (x.is_floating_point() or x.is_complex()):
            raise StrategyError(
                f"all_reduce: op='mean' of {x.dtype} elements, which cannot hold it; take 'sum' and divide in float32"
            )
        return self._collective("all_reduce", x, op, name)

    def reduce_scatter(self, x: Tensor, name: str = "") -> Op:
        """(size * n,) -> (n,): this rank's chunk of the sum over ranks."""
        return self._collective("reduce_scatter", x, name)

    def all_gather(self, x: Tensor, name: str = "") -> Op:
        """(n,) -> (size, n): every rank's `x`, in rank order; all must have the same n."""
        return self._collective("all_gather", x, name)

    def all_to_all(self, x: Tensor, name: str = "") -> Op:
        """(size, n) -> (size, n): row j goes to rank j; row i of the answer came from rank i."""
        return self._collective("all_to_all", x, name)

    def all_to_allv(self, rows: list[Tensor], lengths: tuple[tuple[int, ...], ...], name: str = "") -> Op:
        """Rows of any length, one dtype: row j goes to rank j; returns the list of what came from ranks 0, 1, ...

        lengths[i][j] is how many elements rank i sends to rank j, the same on all ranks, who must know it before.
        What is not sent costs nothing: with one row that is not empty per rank it is an exchange in pairs.
        """
        has, said = [row.numel() for row in rows], list(lengths[self.index])
        if has != said:
            raise StrategyError(f"all_to_allv: rank {self.index}'s rows have {has} elements, but `lengths` says {said}")
        return self._collective("all_to_allv", rows, lengths, name)

    def broadcast(self, x: Tensor, source: int = 0, name: str = "") -> Op:
        """`x` becomes rank `source`'s `x`, in place; returns `x`."""
        return self._collective("broadcast", x, source, name)

    # point to point
    def send(self, tensor: Tensor, to: int, kind: str = "") -> Op:
        """Posts a copy of `tensor` to rank `to` and returns None at once; it never occupies a lane."""
        return Op("send", tensor, to, kind)

    def recv(self, into: Tensor | None, source: int | None = None, kind: str = "") -> Op:
        """-> (data, source) of the next message of `kind`, from anyone if source is None.

        `into` None takes the shape that was sent (it travels ahead). Returns None when the run is stopping or
        the strategy is being left, and nothing more can come.
        """
        return Op("recv", into, source, kind)

    # concurrency
    def start(self, child: Coroutine[Op, Any, Any], lane: str = "comm", name: str = "", priority: int = 0,
              share: float = 1.0) -> Op:  # fmt: skip
        """Starts `child` on `lane`; returns a Handle to `wait` for, in this step or a later one.

        Children of a lane run in the order of their start. One with a `priority` overtakes those before it with a lower
        one that have not begun, back to the last that has none, in rank 0's order on every rank. Rank 0 lets the first
        begin whose `share`s make 1 together; what comes then waits for them.
        """
        return self._collective("start", child, lane, name, priority, share)

    def wait(self, handle: Handle) -> Op:
        """The result of a started child."""
        return Op("wait", handle)

    def again(self, rest: float = 0.0, alone: bool = False) -> Op:
        """In a background, after a step and `rest` seconds: its number; 0 when all ranks’, or `alone` its own, end.

        Among a group: when those of its ranks end. Nobody waits for the others, which may serve meanwhile.
        """
        return self._collective("again", rest, alone)

    def clock(self) -> Op:
        """Seconds since the run began, on the host's clock: for deadlines."""
        return Op("clock")

    def sample(self, name: str, value: float) -> Op:
        """Writes one number into the record."""
        return Op("sample", name, value)

    def _collective(self, verb: str, *args: Any) -> Op:
        """What all ranks of the group ask for, where this Rank stands for one."""
        op = Op(verb, *args)
        op.measures = self.phase == "evaluation"
        return op


class Member(Rank):
    """A Rank as one of a group: `index` and `size` are the group's, all else is that of the rank itself."""

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
                f"group {self.within} is over, for the ranks are arranged anew as {self.mesh}: ask rank.group() again"
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
        """The rank of the run that is number `index` here."""
        assert self.within is not None
        if not 0 <= index < self.size:
            raise StrategyError(f"rank {index} of group {self.within}: there are 0 to {self.size - 1}")
        return self.within.ranks[index]

    def _own(self, kind: str) -> str:
        """A kind of message that no other group's is taken for."""
        return f"{kind} in {self.within}".lstrip()
