"""The awaitables that a Rank's verbs return, and the names of their Spans.

A verb builds an `Op`. Awaiting it hands the Op to the host that drives the coroutine and resumes it with the answer.
The engine is a host on the wall clock, the simulator on a virtual one. See "The trampoline" in workbench/DESIGN.md.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from workbench.rank.errors import StrategyError as StrategyError  # older scripts and pickles name it here

if TYPE_CHECKING:
    from workbench.rank.mesh import Group


@lru_cache(1 << 16)  # a server of 1,000 ranks needs few names
def message_name(verb: str, kind: str, **other: int | None) -> str:
    """Returns the name of a message's Span: `message_name("send", "ask", to=2)` is "send ask to 2"."""
    ends = [f"{end} {rank}" for end, rank in other.items() if rank is not None]
    return " ".join([verb, *([kind] if kind else []), *ends])


def collective(op: Op, child: str = "") -> str:
    """Returns the name of a collective's Span: verb and name, with the group unless it is all ranks.

    child: the name of the child that runs it, for an operation without a name
    """
    name = f"{op.verb} {op.args[-1] or child}".rstrip()
    return name if op.group is None else f"{name} in {op.group}"


class Op:
    """One request to the host: `verb` and its arguments.

    measures: the request only serves a measurement. The host writes its Span into the lane "measuring"
    group:    the ranks of a collective or of a child's. None: all ranks of the run
    """

    __slots__ = ("args", "group", "measures", "verb")

    def __init__(self, verb: str, *args: Any, group: Group | None = None) -> None:
        self.verb = verb
        self.args = args
        self.measures = False
        self.group = group

    def __await__(self) -> Generator[Op, Any, Any]:
        return (yield self)

    def __repr__(self) -> str:
        return f"{self.verb}({', '.join(map(str, self.args))})"


class Handle:
    """A started child. Pass it to `wait` once."""

    __slots__ = ("_state", "lane", "name")

    def __init__(self, name: str, lane: str, state: Any = None) -> None:
        """state: the host's own"""
        self.name = name
        self.lane = lane
        self._state = state


class Forward:
    """The forward pass: await it for the loss, or iterate over parameter buckets.

    Iterating yields the parameters bucket by bucket, in the order in which layers use them (the last bucket first).
    Requesting the next bucket runs the layers of the present one. Awaiting after that computes the remaining layers.
    The host sets `loss` at the end.
    """

    __slots__ = ("_begun", "_state", "loss", "micro", "x")

    def __init__(self, x: Any, micro: int) -> None:
        self.x = x
        self.micro = micro
        self.loss: Any = None
        self._state: Any = None  # the host's own
        self._begun = False

    def note_begun(self, state: Any) -> None:
        """For the host: it delivers the parameters bucket by bucket. state: the host's own"""
        self._state = state

    def note_ended(self, loss: Any) -> None:
        """For the host: the pass is over."""
        self.loss, self._state = loss, None

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
    """The backward pass: iterate for buckets as they fill, or await it to keep gradients on this rank.

    Awaiting returns the gradient of the forward's `x` if that was an activation, else None.
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
