"""What a strategy may see and ask for: the verbs of a Rank, and the values that pass through them.

No clock, no wire, no thread lives here. A verb builds an `Op`; awaiting it hands the Op to whichever host
drives the coroutine (the engine on the wall clock, the simulator on a virtual one) and resumes with the
host's answer. See "The trampoline" in workbench/DESIGN.md.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Op:
    """One thing asked of the host: `verb` with its arguments. A Span is an Op plus when."""

    __slots__ = ("args", "verb")

    def __init__(self, verb: str, *args: Any) -> None:
        self.verb = verb
        self.args = args

    def __await__(self) -> Generator[Op, Any, Any]:
        return (yield self)

    def __repr__(self) -> str:
        return f"{self.verb}({', '.join(map(str, self.args))})"


class Part(NamedTuple):
    """One parameter's place inside a bucket: elements [start, stop) of the bucket's flat data."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Bucket:
    """A flat, named slice of the model's gradients or parameters.

    `data` is 1-D and contiguous; `offset` is where it begins in the model's flat vector. State that belongs
    to it is kept in a `Memory`, by place in the model, so it survives a change of bucket size.
    """

    __slots__ = ("data", "index", "offset", "parts")

    def __init__(self, index: int, data: Tensor, parts: tuple[Part, ...], offset: int) -> None:
        self.index = index
        self.data = data  # (n,) of one dtype; buckets never mix dtypes
        self.parts = parts
        self.offset = offset

    @property
    def name(self) -> str:
        return f"bucket {self.index}"

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def like(self, data: Tensor) -> Bucket:
        """The same place in the model holding other data of the same length."""
        return Bucket(self.index, data, self.parts, self.offset)

    def __repr__(self) -> str:
        return f"{self.name} ({self.nbytes / 1e6:.2f} MB, {len(self.parts)} parameters)"


class Memory:
    """What a compressor or a strategy remembers per element or per parameter, on one rank.

    `flat` keeps one value per element of the model (an error-feedback residual, an anchor); `parts` keeps
    one object per parameter (a PowerSGD factor). Both are addressed by place in the model, never by bucket.
    """

    def __init__(self) -> None:
        self.slots: dict[str, dict[str, Tensor]] = {}  # slot -> parameter -> (n,)
        self.parts: dict[str, dict[str, Any]] = {}  # slot -> parameter -> anything
        self._joined: dict[tuple[str, str], Tensor] = {}

    def flat(self, slot: str, bucket: Bucket) -> Tensor:
        """The slot's values for `bucket`: (n,) in the bucket's dtype, zero when first asked for.

        Contiguous and shared: writing into it is remembered. Cut anew when the bucket's parameters change.
        """
        key = (slot, "/".join(part.name for part in bucket.parts))
        if key not in self._joined:
            self._join(slot, key, bucket)
        return self._joined[key]

    def _join(self, slot: str, key: tuple[str, str], bucket: Bucket) -> None:
        pieces = self.slots.setdefault(slot, {})
        whole = bucket.data.new_zeros(bucket.data.numel())
        for part in bucket.parts:
            if part.name in pieces:
                whole[part.start : part.stop] = pieces[part.name]
        here = {part.name for part in bucket.parts}
        for old in [k for k in self._joined if k[0] == slot and here & set(k[1].split("/"))]:
            del self._joined[old]
        for part in bucket.parts:
            pieces[part.name] = whole[part.start : part.stop]
        self._joined[key] = whole

    def drop(self, slot: str) -> None:
        """Forgets a slot."""
        self.slots.pop(slot, None)
        self.parts.pop(slot, None)
        self._joined = {k: v for k, v in self._joined.items() if k[0] != slot}


class Handle:
    """A child that was started and has not been waited for; `wait` it once."""

    __slots__ = ("_state", "lane", "name")

    def __init__(self, name: str, lane: str) -> None:
        self.name = name
        self.lane = lane
        self._state: Any = None  # the host's own


class Backward:
    """The backward pass: iterate to receive buckets as they fill, or await it to keep gradients at home."""

    __slots__ = ("_begun", "grad", "micro")

    def __init__(self, grad: float | None, micro: int) -> None:
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
    step:         the number of the present step, from 0
    lr:           the present learning rate
    compressor:   what crosses the wire instead of a bucket (its `reduce` is a coroutine)
    memory:       the compressor's memory on this rank
    """

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = size
        self.step = 0
        self.lr = 0.0
        self.compressor: Any = None
        self.memory = Memory()

    # compute
    def forward(self, x: Any = None, micro: int = 0) -> Op:
        """The loss of the next batch, or of `x`."""
        return Op("forward", x, micro)

    def backward(self, grad: float | None = None, micro: int = 0) -> Backward:
        """Gradients of the last forward's loss times `grad`; `async for` hands out buckets as they fill."""
        return Backward(grad, micro)

    def update(self) -> Op:
        """One step of the optimizer with the gradients that are there; gradients are cleared after."""
        return Op("update")

    def params(self) -> Op:
        """The parameters as a list of Buckets that view them: writing into `data` changes the model."""
        return Op("params")

    # collective; `x` is a flat tensor, changed in place where it says so
    def all_reduce(self, x: Tensor, op: str = "sum", name: str = "") -> Op:
        """`x` becomes the sum ("max") over all ranks, in place; returns `x`."""
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

    def broadcast(self, x: Tensor, source: int = 0, name: str = "") -> Op:
        """`x` becomes rank `source`'s `x`, in place; returns `x`."""
        return Op("broadcast", x, source, name)

    # point to point
    def send(self, tensor: Tensor, to: int, kind: str = "") -> Op:
        """Posts `tensor` to rank `to` and returns at once."""
        return Op("send", tensor, to, kind)

    def recv(self, into: Tensor, source: int | None = None, kind: str = "") -> Op:
        """-> (data, source) of the next message of `kind` (from anyone if source is None), None if stopped."""
        return Op("recv", into, source, kind)

    # concurrency
    def start(self, child: Coroutine[Op, Any, Any], lane: str = "comm", name: str = "") -> Op:
        """Starts `child` on `lane`, behind what was started there before; returns a Handle to `wait` for."""
        return Op("start", child, lane, name)

    def wait(self, handle: Handle) -> Op:
        """The result of a started child."""
        return Op("wait", handle)

    def again(self) -> Op:
        """In a background loop: True while the run goes on, the same answer on every rank."""
        return Op("again")

    def sample(self, name: str, value: float) -> Op:
        """Writes one number into the record."""
        return Op("sample", name, value)
