"""A child of a lane, and its collective."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from workbench.engine.collectives.lane_wires import GroupWires
from workbench.fabric import Load
from workbench.rank import Op


class LaneCalls(NamedTuple):
    """The functions that a lane calls.

    on_child_start: gets the number of a child, before it begins
    on_collective:  called when a child starts a collective
    on_child_end:   called when the child is over, and again when the caller has waited for its value. The collective's
                    memory is held between these calls.
    read_settings:  returns the optimizer's settings at the start of a child
    perform_hop:    performs one message of an all-reduce, in a step
    wireless:       performs ops without a wire, by verb
    """

    on_child_start: Callable[[int], None] = lambda number: None
    on_collective: Callable[[ChildJob, Op], None] = lambda job, op: None
    on_child_end: Callable[[ChildJob, Any], None] = lambda job, value: None
    read_settings: Callable[[], Any] = lambda: None
    perform_hop: Callable[[Op, int], Any] = lambda op, step: None
    wireless: Mapping[str, Callable[[Op, ChildJob], Any]] = MappingProxyType({})


class ChildJob:
    """A child under way."""

    __slots__ = (
        "asked",
        "began",
        "child",
        "done",
        "error",
        "event",
        "flight",
        "kept_arguments",
        "measures",
        "name",
        "number",
        "optimizer_settings",
        "priority",
        "resumed",
        "share",
        "start_event",
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
        by: Any = None,
        priority: int = 0,
        share: float = 1.0,
    ) -> None:
        self.child, self.name, self.asked, self.number = child, name, asked, number
        self.step = step  # all spans belong to the step of its start
        self.done = done  # None if the thread that waits also runs it
        self.priority, self.share = priority, share
        self.value: Any = None
        self.error: BaseException | None = None
        self.flight: PendingCollective | None = None
        self.resumed = self.began = asked  # when its last op was answered, and when it went on
        self.measures = False  # whether its last op is part of a measurement
        self.optimizer_settings = by  # at its start
        self.start_event: Any = None  # on a GPU: the event after which it may begin
        self.event: Any = None  # on a GPU: the event after which it is over
        self.kept_arguments: Any = None  # on a GPU: until it is over

    def keep_arguments(self, after: Any, held: Any) -> None:
        self.start_event, self.kept_arguments = after, held

    def resume(self, now: Any) -> None:
        self.resumed = self.began = now

    def suspend(self, flight: PendingCollective) -> None:
        """Leaves the child in a collective until the caller waits for it."""
        self.flight = flight

    def take_flight(self) -> PendingCollective | None:
        """Undoes `suspend`."""
        flight, self.flight = self.flight, None
        return flight

    def fail(self, error: BaseException) -> None:
        """Ends the child with `error`, unless it has one of its own."""
        self.error, self.flight = self.error or error, None


class PendingCollective:
    """An issued collective that no thread has waited for."""

    __slots__ = ("arrived", "asked", "finished", "hold", "line", "load", "op", "step", "what", "work")

    def __init__(
        self, op: Op, what: str, line: GroupWires, work: Any, asked: Any, arrived: Any, load: Load, hold: Any, step: int
    ) -> None:
        self.op, self.what, self.line, self.work, self.asked, self.arrived = op, what, line, work, asked, arrived
        self.load, self.hold, self.step = load, hold, step
        self.finished = 0.0
