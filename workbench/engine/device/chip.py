"""A CPU as the engine uses it, which is also what it asks of any other chip: here most of it is nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_NOTHING: AbstractContextManager[None] = nullcontext()


class Chip:
    """A CPU: an operation is over when its call returns, so that streams and events have nothing to say.

    runs_ahead: does a call return before its work is done, so that order is kept by streams and not by the host?
    """

    runs_ahead = False

    def __init__(self, name: str = "cpu") -> None:
        self.name = name

    def bind(self) -> None:
        """Makes this chip the calling thread's own; once in every thread."""

    def stream(self) -> Any:
        """A queue of work beside the others."""

    def mark(self) -> Any:
        """An event behind all that the calling thread's stream was given so far."""

    def moment(self) -> Any:
        """As `mark`, one that knows its time once it is reached."""

    def inside(self, stream: Any = None, after: Any = None) -> AbstractContextManager[None]:
        """Within it the calling thread works on this chip, on `stream`, which first waits for the event `after`."""
        return _NOTHING

    def follow(self, event: Any, value: Any = None) -> None:
        """The calling thread's stream waits for `event`; the host does not. value: made before it, used after it."""

    def reached(self, event: Any) -> bool:
        """Has all work before `event` been done? Never blocks."""
        return True

    def await_host(self, event: Any, look: Callable[[], None]) -> None:
        """The host waits for `event`; `look` is called meanwhile, and raises when it must leave."""

    def held(self, child: Any) -> list[Any]:
        """What a child was given and may free before the chip has read it; to be kept until it has."""
        return []

    def room(self, like: Tensor, numel: int) -> Tensor:
        """(numel,) of `like`'s dtype and device, to be written."""
        return like.new_empty(numel)

    def out(self, x: Tensor) -> tuple[Tensor, Any]:
        """A copy of `x` in the host's memory, and the event after which it may be read."""
        return x.detach(), None

    def to_host(self, x: Tensor) -> Tensor:
        """`x` in the host's memory, to be read at once."""
        return x.detach()

    def fill(self, into: Tensor, sent: Tensor) -> None:
        """Copies `sent`, which lies in the host's memory and may go at once, into `into` of the same shape."""
        into.copy_(sent)

    def seconds(self, first: Any, last: Any) -> float:
        """Between two moments that were reached."""
        return 0.0

    def allocated(self) -> int:
        """Bytes of this chip's own memory that its allocator has given out now; 0 where there is no such thing."""
        return 0

    def peak(self) -> int:
        """The most bytes of this chip's own memory that were in use at a time."""
        return 0

    @staticmethod
    def carries_gloo() -> list[str]:
        """The types of device whose tensors gloo is given."""
        return ["cpu"] + ["cuda"] * torch.cuda.is_available()
