"""Noisy ranks on a virtual clock, with the part of a lab's interface that a tuner uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from workbench import simulate
from workbench.experiment import Experiment
from workbench.record.timeline import Rows
from workbench.settings import KnobError
from workbench.sim import Costs

AHEAD = 80  # steps that are simulated after a change
EACH = 2  # steps that the ranks make between two reads of `live`


class VirtualRanks:
    """`costs` are the real costs. The tuner gets different ones.

    refuses: returns why ranks refuse an experiment, or None
    loss:    returns the loss of a step under an experiment; None: no losses
    on_step: called with the ranks' present step
    """

    def __init__(self, e: Experiment, costs: Costs, *, steps: int = 10**6, refuses: Callable[[Any], str | None] = str,
                 loss: Callable[[int, Experiment], float] | None = None) -> None:  # fmt: skip
        self.experiment, self.costs, self.steps = e, costs, steps
        self.refuses = (lambda _: None) if refuses is str else refuses
        self.loss = loss
        self.changes: list[Any] = []
        self.state = "running"
        self.members = tuple(range(e.ranks))
        self.now = 29
        self.on_step: Callable[[int], None] = lambda step: None
        self.lost: list[tuple[int, float, dict[str, Any]]] = []
        self._segments: list[tuple[int, Experiment]] = []
        self._made: dict[int, Rows] = {}
        self._experiments = [(0, e)]
        self._segments.append((0, e))

    def _simulated(self, first: int, e: Experiment) -> Rows:
        """Returns rank 0's steps from `first` on. Several changes before one step cost a single simulation."""
        if first not in self._made:
            spans = simulate(replace(e, steps=AHEAD, seed=first), costs=self.costs).timeline.spans.rows()
            spans = spans[spans.equal("lane", "step") & (spans.rank == 0)]
            self._made[first] = spans.replaced(step=spans.step + first)
        return self._made[first]

    @property
    def live(self) -> bool:
        self.on_step(self.now)
        if self.state == "running":
            self.now = min(self.now + EACH, self.steps, self._segments[-1][0] + AHEAD - 1)
        return self.now < self.steps

    @property
    def run_now(self) -> Any:
        parts = []
        for (first, e), stop in zip(self._segments, [s for s, _ in self._segments[1:]] + [10**9], strict=True):
            if first < min(stop, self.now + 1):
                rows = self._simulated(first, e)
                parts.append(rows[(rows.step >= first) & (rows.step < min(stop, self.now + 1))])
        spans = Rows({name: np.concatenate([getattr(p, name) for p in parts]) for name in ("rank", "step", "t0", "t1")}
                     | {"lane": np.concatenate([np.full(len(p), "step", object) for p in parts])})  # fmt: skip
        steps = np.arange(self.now + 1 if self.loss else 0)
        values = np.array([self.loss(int(s), self.at(int(s))) for s in steps] if self.loss else [], float)
        samples = Rows({"step": steps, "value": values, "name": np.full(len(steps), "loss", object)})
        tables = {name: SimpleNamespace(rows=lambda rows=rows: rows) for name, rows in
                  (("spans", spans), ("samples", samples))}  # fmt: skip
        return SimpleNamespace(timeline=SimpleNamespace(**tables), details=lambda name: list(self.lost))

    def at(self, step: int) -> Experiment:
        return next(e for first, e in reversed(self._experiments) if first <= step)

    def set(self, path: str, value: Any) -> Any:
        wanted = self.experiment.set(path, value)
        number = f"change {len(self.changes)}"
        change = SimpleNamespace(id=number, path=path, value=value, applied_at=None, refused=None)
        self.changes.append(change)
        if reason := self.refuses(wanted):
            change.refused = reason
        else:
            self.experiment, change.applied_at = wanted, self.now + 1
            self._experiments.append((self.now + 1, wanted))
            self._segments.append((self.now + 1, wanted))
        change.wait = lambda seconds: self._answer(change)
        return change

    @staticmethod
    def _answer(change: Any) -> Any:
        if change.refused:
            raise KnobError(change.refused)
        return change
