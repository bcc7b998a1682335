"""A child and its collective under way on a lane."""

from __future__ import annotations

import threading
from collections.abc import Coroutine
from typing import Any

from workbench.engine.collectives.lane_wires import GroupWires
from workbench.fabric import Load
from workbench.rank import Op


class ChildJob:
    """A child under way: its coroutine, result and times."""

    __slots__ = (
        "after",
        "asked",
        "began",
        "by",
        "child",
        "done",
        "error",
        "event",
        "flight",
        "held",
        "measures",
        "name",
        "number",
        "priority",
        "resumed",
        "share",
        "step",
        "value",
    )

    def __init__(
        self,
        child: Coroutine[Op, Any, Any],
        name: str,
        asked: Any,
        done: threading.Event | None,
        step: int,
        number: int,
    ) -> None:
        self.child, self.name, self.asked, self.number = child, name, asked, number
        self.step = step  # in which it was started; all its spans belong to this step
        self.done = done  # None if the thread that waits also runs it
        self.priority, self.share = 0, 1.0
        self.value: Any = None
        self.error: BaseException | None = None
        self.flight: PendingCollective | None = None
        self.resumed = self.began = asked  # when its last op was answered, and when it went on
        self.measures = False  # whether its last op is part of a measurement
        self.by: Any = None  # the optimizer's settings at its start
        self.after: Any = None  # on a GPU: the event after which it may begin
        self.event: Any = None  # on a GPU: the event after which it is over
        self.held: Any = None  # on a GPU: its arguments, kept until it is over


class PendingCollective:
    """A collective that was issued and not waited for yet."""

    __slots__ = ("arrived", "asked", "finished", "hold", "line", "load", "op", "step", "what", "work")

    def __init__(
        self, op: Op, what: str, line: GroupWires, work: Any, asked: Any, arrived: Any, load: Load, hold: Any, step: int
    ) -> None:
        self.op, self.what, self.line, self.work, self.asked, self.arrived = op, what, line, work, asked, arrived
        self.load, self.hold, self.step = load, hold, step
        self.finished = 0.0
