"""The interface of a chip, and its CPU version."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_NOTHING: AbstractContextManager[None] = nullcontext()


class Chip:
    """A CPU needs no streams and no events: an operation is over when its call returns.

    runs_ahead: whether a call returns before its work is done, so that streams keep the order
    """

    runs_ahead = False

    def __init__(self, name: str = "cpu") -> None:
        self.name = name

    def bind_thread(self) -> None:
        """Makes this chip the calling thread's current one. Each thread calls it once."""

    def make_stream(self) -> Any:
        """Returns a new stream."""

    def record_event(self) -> Any:
        """The event comes after all work that the calling thread's stream has so far."""

    def record_timed_event(self) -> Any:
        """The event also knows its time once the chip has reached it."""

    def use_stream(self, stream: Any = None, after: Any = None) -> AbstractContextManager[None]:
        """The calling thread uses `stream` inside the block, after the event `after`."""
        return _NOTHING

    def wait_in_stream(self, event: Any, value: Any = None) -> None:
        """The calling thread's stream, not the host, waits for `event` before it uses `value`."""

    def has_reached(self, event: Any) -> bool:
        """Whether all work before `event` is done. Never blocks."""
        return True

    def block_until(self, event: Any, look: Callable[[], None]) -> None:
        """Blocks the host until `event`. `look` is called again and again, and raises if the rank must leave."""

    def list_arguments(self, child: Any) -> list[Any]:
        """Returns tensors that the caller keeps until the chip has read them: a child may free them sooner."""
        return []

    def make_empty(self, like: Tensor, numel: int) -> Tensor:
        """Returns uninitialised memory: (numel,), of `like`'s dtype and device."""
        return like.new_empty(numel)

    def copy_out(self, x: Tensor) -> tuple[Tensor, Any]:
        """Returns a copy of `x` in the host's memory, and the event after which the host may read it."""
        return x.detach(), None

    def copy_to_host(self, x: Tensor) -> Tensor:
        """Returns `x` in the host's memory, ready to read."""
        return x.detach()

    def copy_from_host(self, into: Tensor, sent: Tensor) -> None:
        """Copies `sent` from the host's memory into `into` of the same shape. The caller may free it at once."""
        into.copy_(sent)

    def seconds_between(self, first: Any, last: Any) -> float:
        return 0.0

    def allocated_bytes(self) -> int:
        """Bytes that this chip's allocator has given out now; 0 on a CPU."""
        return 0

    def peak_bytes(self) -> int:
        return 0

    @staticmethod
    def list_gloo_devices() -> list[str]:
        return ["cpu"] + ["cuda"] * torch.cuda.is_available()
