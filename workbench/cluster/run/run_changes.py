"""Changes of a live run: checked, then applied or refused by all ranks together."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any

from workbench.experiment import Experiment
from workbench.settings import NEXT, Change, KnobError, fold, resolved

BEFORE_RUN = "before the run"  # id of such a change


class PendingChange:
    """A requested Change, and its answer to `wait` for.

    applied_at: the first step with the change
    refused:    why it will never be applied
    """

    def __init__(self, change: Change, applied_at: int | None = None) -> None:
        self.change = change
        self.id, self.path, self.value = change.id, change.path, change.value
        self.requested_at = change.requested_at or time.time()
        self.applied_at = applied_at
        self.refused: str | None = None
        self.members: Sequence[int] = ()  # of a resize: the ranks to train with
        self.joining: Sequence[int] = ()  # of a resize: the new ranks
        self.sent = False  # whether the ranks have received it
        self.seconds: float | None = None  # from request to answer
        self.describe_ranks: Callable[[], str] = lambda: "nobody was asked"  # of the ranks
        self._answered = threading.Event()
        if applied_at is not None:
            self._answered.set()

    def wait(self, timeout: float | None = None) -> PendingChange:
        """Waits until the ranks have applied the change, and returns this object.

        timeout:  seconds; None waits as long as it takes

        Raises KnobError if the ranks refuse it. Raises TimeoutError if they do not answer in time.
        """
        if not self._answered.wait(timeout):
            raise TimeoutError(f"{self.path}={self.value}: no answer within {timeout:g} s; {self.describe_ranks()}")
        if self.refused:
            raise KnobError(self.refused)
        return self

    @property
    def request(self) -> dict[str, Any]:
        """The message that asks the ranks."""
        if self.members:
            return {"kind": "resize", "members": list(self.members), "id": self.id}
        return {"kind": "change", **self.change.plain()}

    def answer(self, applied_at: int | None = None, refused: str | None = None) -> None:
        """Notes the ranks' answer, once. The lab calls it.

        applied_at:  the first step with the change
        refused:     why it will never be applied
        """
        if not self._answered.is_set():
            self.applied_at, self.refused = applied_at, refused
            self.seconds = time.time() - self.requested_at
            self._answered.set()

    def __repr__(self) -> str:
        done = f"applied at step {self.applied_at}" if self.applied_at is not None else "requested"
        done = "kept for the next run" if self.id == BEFORE_RUN else done
        done += f" by {self.change.by}, since {self.change.reason}" if self.change.by else ""
        return f"Change {self.change.text}: {'refused: ' + self.refused if self.refused else done}"


class Changes:
    """The ranks' current experiment, and all changes."""

    def __init__(self, experiment: Experiment, history: list[PendingChange]) -> None:
        self.experiment = experiment
        self.history = history
        self._pending: list[PendingChange] = []
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)

    def request_change(self, path: str | Mapping[str, Any], value: Any,
            send: Callable[[PendingChange, list[type]], None]) -> PendingChange:  # fmt: skip
        """Checks a change against the coming settings, then sends it. Raises KnobError if it is invalid."""
        with self._lock:
            number = f"change {next(self._numbers)} {time.time_ns():x}"
            change = Change(NEXT, path, value, number, time.time())
            change, wanted = resolved(self._make_coming_experiment(), change, "; stop it, then set it")
            pending = PendingChange(change)
            send(
                pending,
                list(list_foreign_classes([reduce(getattr, full.split("."), wanted) for full in change.settings])),
            )
            self._pending.append(pending)
            self.history.append(pending)
            return pending

    def _make_coming_experiment(self) -> Experiment:
        waiting = [pending.change for pending in self.list_unanswered() if not pending.members]
        return fold(self.experiment, iter(waiting), Experiment.set, skips=True)[-1][1]

    def note_applied(self, step: int, detail: dict[str, Any], late: bool = False) -> None:
        """Records that a change of any kernel or of a plan took effect.

        late: a later generation has already reported its settings, so `experiment` stays
        """
        with self._lock:
            pending, change = self._pop_pending(detail), Change.read(detail, step)
            if not late:
                self.experiment = self.experiment.set(change.path, change.value)
            if pending is not None:
                pending.answer(applied_at=step)
            elif not (late and change.id and change.id in [known.id for known in self.history]):
                self.history.append(PendingChange(change, step))

    def note_refused(self, detail: dict[str, Any]) -> Sequence[int]:
        """Returns the ranks that would have joined."""
        with self._lock:
            if pending := self._pop_pending(detail):
                pending.answer(refused=detail["reason"])
            return pending.joining if pending else ()

    def _pop_pending(self, detail: dict[str, Any]) -> PendingChange | None:
        found = next((t for t in self._pending if t.id == detail.get("id")), None)
        if found:
            self._pending.remove(found)
        return found

    def request_resize(self, members: Sequence[int], joining: Sequence[int]) -> PendingChange:
        """joining: the new ranks. `note_resized` or `note_refused` answers the request."""
        with self._lock:
            number = f"resize {next(self._numbers)} {time.time_ns():x}"
            pending = PendingChange(Change(NEXT, "ranks", len(members), number, time.time()))
            pending.members, pending.joining = members, joining
            self._pending.append(pending)
            self.history.append(pending)
            return pending

    def note_resized(self, step: int, detail: dict[str, Any]) -> None:
        """Records new settings after a loss or a resize."""
        with self._lock:
            self.experiment = Experiment.read(detail["settings"], self.experiment.task)
            if pending := self._pop_pending(detail):
                pending.answer(applied_at=step)

    def note_superseded_resize(self, step: int, detail: dict[str, Any]) -> Sequence[int]:
        """A later generation may have replaced the resize. Returns its new ranks."""
        with self._lock:
            if pending := self._pop_pending(detail):
                pending.answer(applied_at=step)
            return pending.joining if pending else ()

    def list_unanswered(self) -> list[PendingChange]:
        with self._lock:
            return list(self._pending)

    def refuse_unanswered(self, reason: str) -> None:
        with self._lock:
            for pending in self._pending:
                pending.answer(refused=f"{pending.path}={pending.value}: {reason}")
            self._pending.clear()


def list_foreign_classes(value: Any) -> Iterator[type]:
    """Yields a value's foreign settings classes, which engines need before the change."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from list_foreign_classes(one)
    elif is_dataclass(value) and not isinstance(value, type):
        if not type(value).__module__.startswith("workbench."):
            yield type(value)
        for f in fields(value):
            yield from list_foreign_classes(getattr(value, f.name))
