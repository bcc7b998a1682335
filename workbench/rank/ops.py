"""What a strategy may see and ask for: the verbs of a Rank, and the values that pass through them.

No clock, no wire, no thread lives here. A verb builds an `Op`; awaiting it hands the Op to whichever host
drives the coroutine (the engine on the wall clock, the simulator on a virtual one) and resumes with the
host's answer. See "The trampoline" in workbench/DESIGN.md.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any

from workbench.rank.bucket import Bucket, Memory, Part

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Backward", "Bucket", "Forward", "Handle", "Memory", "Op", "Part", "Rank", "StrategyError", "message"]


REDUCTIONS = ("sum", "mean", "max", "min")  # what an all-reduce can make of the ranks' tensors


def message(verb: str, kind: str, **other: int | None) -> str:
    """The name of a message's Span: `message("send", "ask", to=2)` is "send ask to 2"; both hosts write it."""
    ends = [f"{end} {rank}" for end, rank in other.items() if rank is not None]
    return " ".join([verb, *([kind] if kind else []), *ends])


class StrategyError(RuntimeError):
    """A strategy or compressor asked for something that cannot be."""


class Op:
    """One thing asked of the host: `verb` with its arguments. A Span is an Op plus when.

    measures: it is asked only to see what another one does; a host writes its Span into the lane "measuring"
    """

    __slots__ = ("args", "measures", "verb")

    def __init__(self, verb: str, *args: Any) -> None:
        self.verb = verb
        self.args = args
        self.measures = False

    def __await__(self) -> Generator[Op, Any, Any]:
        return (yield self)

    def __repr__(self) -> str:
        return f"{self.verb}({', '.join(map(str, self.args))})"


class Handle:
    """A child that was started and has not been waited for; `wait` it once."""

    __slots__ = ("_state", "lane", "name")

    def __init__(self, name: str, lane: str) -> None:
        self.name = name
        self.lane = lane
        self._state: Any = None  # the host's own


class Forward:
    """The forward pass: await it for the loss, or iterate to be asked before each bucket's layers are computed.

    Iterating hands out the parameters, bucket by bucket, in the order in which layers use them (the last bucket
    first); the layers of a bucket run when the next one is asked for. Awaited then, it computes what is left. The
    host sets `loss` at the end.
    """

    __slots__ = ("_begun", "_state", "loss", "micro", "x")

    def __init__(self, x: Any, micro: int) -> None:
        self.x = x
        self.micro = micro
        self.loss: Any = None
        self._state: Any = None  # the host's own
        self._begun = False

    def __await__(self) -> Generator[Op, Any, Any]:
        if not self._begun:
            return (yield Op("forward", self.x, self.micro))
        try:
            while True:
                yield Op("next_params", self)
        except StopAsyncIteration:
            return self.loss

    def __aiter__(self) -> Forward:
        return self

    def __anext__(self) -> Op:
        if self._begun:
            return Op("next_params", self)
        self._begun = True
        return Op("forward_buckets", self)


class Backward:
    """The backward pass: iterate to receive buckets as they fill, or await it to keep gradients at home.

    Awaited, it returns the gradient of the forward's `x` if that was an activation, else None.
    """

    __slots__ = ("_begun", "grad", "micro")

    def __init__(self, grad: Any, micro: int) -> None:
        self.grad = grad
        self.micro = micro
        self._begun = False

    def __await__(self) -> Generator[Op, Any, Any]:
        return (yield Op("backward", self.grad, self.micro))

    def __aiter__(self) -> Backward:
        return self

    def __anext__(self) -> Op:
        if self._begun:
            return Op("next_bucket")
        self._begun = True
        return Op("backward_buckets", self.grad, self.micro)


class Rank:
    """All that a strategy may see and ask for. Every verb completes before it returns; `start` overlaps.

    index, size:  this rank and how many there are
    worker:       which of the strategy's `workers` on this rank runs, from 0
    role:         "trainer", or "server" where the strategy's `trains` says no
    step:         the number of the present step, from 0
    lr:           the present learning rate
    compressor:   what crosses the wire instead of a bucket (its `reduce` is a coroutine)
    density:      where there are sizes only: the share of elements that a choice by their values is taken to keep
    memory:       the compressor's memory on this rank
    """

    def __init__(self, index: int, size: int, seed: int = 0) -> None:
        self.index = index
        self.size = size
        self.worker = 0
        self.role = "trainer"
        self.step = 0
        self.lr = 0.0
        self.compressor: Any = None
        self.density = 0.01
        self.memory = Memory(seed * 100_003 + index)

    # compute
    def batch(self) -> Op:
        """The next batch of this rank's data, to be looked at before `forward(batch)`."""
        return Op("batch")

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

    def update(self, bucket: Bucket | None = None, by: Callable[[], None] | None = None) -> Op:
        """One step of the optimizer with the gradients that are there; gradients are cleared after.

        With `bucket` (or a shard of one; element-wise optimizers only) just of its parameters. With `by` that is
        called in the optimizer's place: a strategy's own step, which takes the time of any update.
        """
        return Op("update", bucket, by)

    def params(self) -> Op:
        """The parameters as a list of Buckets that view them: writing into `data` changes the model."""
        return Op("params")

    def grads(self) -> Op:
        """The gradients that are there as a list of Buckets, zero where none is: what is written is what `update` uses.

        Zeroed, they are used up: for strategies that step by `params` instead of `update`.
        """
        return Op("grads")

    def slots(self) -> Op:
        """What the optimizer remembers (momenta), as a list of tensors in an order that is the same on all ranks.

        Empty before its first `update`; writing into them in place changes it.
        """
        return Op("slots")

    def hold(self, bucket: Bucket) -> Op:
        """Keeps of a parameter bucket only these elements in memory: a shard's, or all again with the whole.

        Returns the bucket with its data as it lies now; what was not held before is undefined until written.
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
        return Op("all_reduce", x, op, name)

    def reduce_scatter(self, x: Tensor, name: str = "") -> Op:
        """(size * n,) -> (n,): this rank's chunk of the sum over ranks."""
        return Op("reduce_scatter", x, name)

    def all_gather(self, x: Tensor, name: str = "") -> Op:
        """(n,) -> (size, n): every rank's `x`, in rank order; all must have the same n."""
        return Op("all_gather", x, name)

    def all_to_all(self, x: Tensor, name: str = "") -> Op:
        """(size, n) -> (size, n): row j goes to rank j; row i of the answer came from rank i."""
        return Op("all_to_all", x, name)

    def all_to_allv(self, rows: list[Tensor], lengths: tuple[tuple[int, ...], ...], name: str = "") -> Op:
        """Rows of any length, one dtype: row j goes to rank j; returns the list of what came from ranks 0, 1, ...

        lengths[i][j] is how many elements rank i sends to rank j, the same on all ranks, who must know it before.
        What is not sent costs nothing: with one row that is not empty per rank it is an exchange in pairs.
        """
        has, said = [row.numel() for row in rows], list(lengths[self.index])
        if has != said:
            raise StrategyError(f"all_to_allv: rank {self.index}'s rows have {has} elements, but `lengths` says {said}")
        return Op("all_to_allv", rows, lengths, name)

    def broadcast(self, x: Tensor, source: int = 0, name: str = "") -> Op:
        """`x` becomes rank `source`'s `x`, in place; returns `x`."""
        return Op("broadcast", x, source, name)

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
    def start(self, child: Coroutine[Op, Any, Any], lane: str = "comm", name: str = "", priority: int = 0) -> Op:
        """Starts `child` on `lane`; returns a Handle to `wait` for, in this step or a later one.

        Children of a lane run in the order of their start; a higher `priority` overtakes those that have not
        begun, in rank 0's order on every rank.
        """
        return Op("start", child, lane, name, priority)

    def wait(self, handle: Handle) -> Op:
        """The result of a started child."""
        return Op("wait", handle)

    def again(self, rest: float = 0.0) -> Op:
        """In `Strategy.background`: True while the run goes on, the same answer on every rank, after `rest` seconds."""
        return Op("again", rest)

    def clock(self) -> Op:
        """Seconds since the run began, on the host's clock: for deadlines."""
        return Op("clock")

    def sample(self, name: str, value: float) -> Op:
        """Writes one number into the record."""
        return Op("sample", name, value)
