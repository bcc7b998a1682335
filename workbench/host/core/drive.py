"""Driving a coroutine: each Op that it asks for is performed, and the answer goes back in, until it ends.

The one loop of the engine, whatever is driven: a step, its background, a child on a lane, or a step from inside
autograd. In the simulator, where an answer may take time, a fiber is the loop (workbench/sim/clock/fiber.py).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from workbench.rank import Op, StrategyError

FREE = nullcontext()


class Later(BaseException):
    """Raised by whoever performs an Op to leave the loop in the middle: the coroutine is resumed by another."""


class Ended(BaseException):
    """Raised by whoever performs an Op when the coroutine, resumed by another meanwhile, has come to its end."""

    def __init__(self, value: Any) -> None:
        self.value = value


def drive(coro: Coroutine[Op, Any, Any], perform: Callable[[Op], Any], alone: AbstractContextManager[Any] = FREE,
          value: Any = None) -> Any:
    """Runs `coro`, which awaits `value`, on to its end; returns what it returns.

    What cannot be (StrategyError) is raised where the coroutine asked for it, and so is the end of a loop over buckets
    (StopAsyncIteration). `alone` is held while it runs, and not while an Op is performed.
    """
    error: Exception | None = None
    while True:
        try:
            with alone:
                op = coro.throw(error) if error is not None else coro.send(value)
        except StopIteration as stop:
            return stop.value
        value, error = None, None
        try:
            value = perform(op)
        except Ended as end:
            return end.value
        except (StrategyError, StopAsyncIteration) as answer:
            if getattr(coro, "cr_frame", coro) is None:  # it has ended with this very error
                raise
            error = answer
