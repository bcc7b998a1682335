"""Drives a coroutine: performs each Op that it awaits and sends the answer in.

The simulator drives by fibers instead (workbench/sim/clock/fiber.py), because an answer may take time.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from workbench.rank import Op, StrategyError

NO_GUARD = nullcontext()
T = TypeVar("T")


class LeaveLoop(BaseException):
    """Raised by an Op's performer to leave the loop. Another caller resumes the coroutine."""


class CoroutineEnded(BaseException):
    """Raised by an Op's performer if another caller has resumed the coroutine to its end."""

    def __init__(self, value: Any) -> None:
        self.value = value


def drive_coroutine(
    coro: Coroutine[Op, Any, T],
    perform: Callable[[Op], Any],
    alone: AbstractContextManager[None] = NO_GUARD,
    value: Any = None,
) -> T:
    """Sends `value` into `coro`, runs it to its end, and returns its result.

    Throws StrategyError, and StopAsyncIteration at the end of a loop over buckets, into the coroutine. Holds `alone`
    while the coroutine runs, but not while an Op is performed.
    """
    error: Exception | None = None
    while True:
        try:
            with alone:
                op = coro.throw(error) if error is not None else coro.send(value)
        except StopIteration as stop:
            made: T = stop.value
            return made
        value, error = None, None
        try:
            value = perform(op)
        except CoroutineEnded as end:
            ended: T = end.value
            return ended
        except (StrategyError, StopAsyncIteration) as answer:
            if getattr(coro, "cr_frame", coro) is None:  # ended with this error
                raise
            error = answer
