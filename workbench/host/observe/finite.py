"""Watches one rank's losses for non-finite values, and its gradients if it skips bad steps.

A step costs only a check of its loss. If that is not finite, the rank computes the batch again to find the layer. To
skip steps, it reads all gradients once before each update. Whole replicas need no exchange for that, because they
update by one sum, so a non-finite number reaches all. The ranks of a partition reduce one number, as for `clip`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from workbench.experiment.finite import NO_ROWS
from workbench.host.observe.origin import Found, in_backward, in_forward, in_gradients, in_parameters
from workbench.host.observe.views import WatchedView
from workbench.host.placement.canonical import buffers
from workbench.rank import Op, StrategyError
from workbench.settings import Json

WINDOW = 10  # losses in the mean that is compared with the best mean so far
IN_A_ROW = 20  # more skipped steps in a row are an alarm
R = TypeVar("R")


class Finite:
    """One rank's watch for non-finite and diverging losses.

    alarmed: asks the host to "pause", "stop" or "roll back" the run, as far as it can
    first:   the loss of the run's first step, None before; lower losses never count as diverged
    again:   whether a batch may be computed again
    """

    again = True

    def __init__(self, run: WatchedView, alarmed: Callable[[str], None], first: float | None = None) -> None:
        self.run, self.alarmed, self.first = run, alarmed, first
        self._skipped = -1  # the last skipped step
        self._row = 0  # how many steps were skipped in a row
        self.forget()

    def forget(self) -> None:
        """Forgets earlier losses and alarms, when the run continues after a pause."""
        self._found: Found | None = None  # the cause in the current step
        self._said = False
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._best = math.inf

    def know(self, first: float | None) -> None:
        """Takes the run's first loss, if known, on a rank that joined later."""
        self.first = self.first if first is None else float(first)

    async def agree(self) -> None:
        """Gives all ranks the largest first loss of any rank, after ranks have joined."""
        place = self.run.layout.order[0].param.device
        mine = torch.tensor([-math.inf if self.first is None else self.first], dtype=torch.float64, device=place)
        largest = await self.run.rank.all_reduce(mine, "max", "first loss")
        if not largest.is_meta:  # with sizes only there are no losses
            self.know(float(largest[0]) if math.isfinite(largest[0]) else None)

    # -- losses --

    def passed(self, loss: Tensor, batch: Any) -> None:
        """Checks a forward's loss. If it is not finite, finds the cause before an update hides it."""
        if self._found is None and not math.isfinite(float(loss)):
            self._found = self._blame(batch)

    def told(self, step: int, loss: float) -> None:
        """Checks the mean of a step's losses on this rank, and may raise an alarm."""
        found, self._found = self._found, None
        if step == self._skipped:
            return
        if not math.isfinite(loss):
            self._alarm("nan", {"loss": str(loss), **(found or in_parameters(self.run.model)).plain()})
        elif self._runs_away(loss):
            self._alarm("diverged", {"loss": f"{loss:.4g}", "best": f"{self._best:.4g}"})
        else:
            self._said = False

    def _runs_away(self, loss: float) -> bool:
        """Whether the mean of the last losses exceeds the first loss and `diverged` times the best mean.

        Below the first loss such a rise may be chance.
        """
        times = self.run.experiment.diverged
        self._losses.append(loss)
        self.first = loss if self.first is None else self.first
        mean = sum(self._losses) / len(self._losses)
        self._best = min(self._best, mean)
        return 0 < times * self._best < mean and mean > self.first

    def _alarm(self, name: str, detail: dict[str, Json]) -> None:
        """Records an alarm and acts by `on_nan`, once until a good loss or the end of a pause."""
        if not self._said:
            self._said = True
            self.run.mark(name, {"rank": self.run.rank.number(), **detail})
            policy = self.run.experiment.on_nan
            self.alarmed(policy if policy in ("stop", "roll back") else "pause")

    def _blame(self, batch: Any) -> Found:
        """Finds the layer that made a loss non-finite, or that the batch is empty."""
        if has_no_rows(batch):
            return Found("", NO_ROWS)
        if self._whole:
            return in_forward(self.run.model, self.run.learner.loss, batch)
        return in_parameters(self.run.model)

    @property
    def _whole(self) -> bool:
        """Whether this rank can compute a batch again by itself."""
        run = self.run
        return self.again and run.spread is None and not run.reading.sharded and run.experiment.strategy.workers == 1

    # -- skipped steps --

    def step(self, step: Coroutine[Op, Any, R]) -> Coroutine[Op, Any, R]:
        """Returns `step`, which skips its update for a non-finite gradient if `on_nan` is "skip"."""
        return self._guarded(step) if self.run.experiment.on_nan == "skip" and self._values else step

    @property
    def _values(self) -> bool:
        return not any(p.is_meta for p in self.run.model.parameters() if p.requires_grad and p.numel())

    async def _guarded(self, step: Coroutine[Op, Any, R]) -> R:
        """Passes on the Ops of a step, but replaces the update if a gradient is not finite."""
        before = [(b, b.clone()) for b in buffers(self.run.model)]  # a bad batch spoils running statistics, too
        batch: Any = None
        value: Any = None
        error: Exception | None = None
        try:
            while True:
                try:
                    op = step.throw(error) if error is not None else step.send(value)
                except StopIteration as end:
                    made: R = end.value
                    return made
                value = error = None
                try:
                    if op.verb == "forward" and self._whole:
                        batch = await Op("batch") if op.args[0] is None else op.args[0]
                        op.args = batch, *op.args[1:]
                    elif op.verb == "update" and op.args[0] is None and await self._bad():
                        self._skip(batch, before)
                        op.args = None, partial(_nothing, self.run.model), *op.args[2:]
                    value = await op
                except (StrategyError, StopAsyncIteration) as answer:
                    error = answer
        finally:
            step.close()

    async def _bad(self) -> bool:
        """Whether a gradient of this rank's replica is not finite."""
        bad = not finite(p.grad for p in self.run.model.parameters())
        rank = self.run.rank
        if rank.mesh.inside:
            flag = torch.tensor([float(bad)], device=self.run.layout.order[0].param.device)
            bad = bool(await rank.inside.all_reduce(flag, "max", "finite"))
        return bad

    def _skip(self, batch: Any, before: list[tuple[Tensor, Tensor]]) -> None:
        """Restores the buffers, and records why the update is skipped, as far as this rank knows.

        After more than IN_A_ROW skipped steps it raises an alarm.
        """
        run, step = self.run, self.run.rank.step
        self._row = self._row + 1 if self._skipped == step - 1 else 1
        self._skipped = step
        with torch.no_grad():
            for buffer, was in before:
                buffer.copy_(was)
        own = self._found
        if own is None and batch is not None and self._whole:
            own = in_backward(run.model, run.learner.loss, batch)
        if self._row > IN_A_ROW:
            self._skipped = -1  # skipping did not help
            return self._alarm("nan", {"loss": "", **(own or in_gradients(run.model)).plain(), "row": IN_A_ROW})
        if own is not None or run.rank.id == 0:
            said = (own or in_gradients(run.model)).plain()
            run.mark("nan", {"rank": run.rank.number(), "loss": "", **said, "skipped": True, "own": own is not None})


def finite(grads: Iterable[Tensor | None]) -> bool:
    """Whether all numbers of these gradients (or None) are finite. On a GPU this synchronizes."""
    there = [g.detach() for g in grads if g is not None and g.numel()]
    if not there:
        return True
    real = [torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in there]
    sums = torch.stack([g.sum(dtype=torch.float32) for g in real])  # a sum is the fastest way to read all numbers
    return bool(sums.isfinite().all()) or all(bool(g.isfinite().all()) for g in there)


def has_no_rows(batch: Any) -> bool:
    """Whether a tensor of the batch, at any depth, has a first dimension of 0."""
    if isinstance(batch, Tensor):
        return batch.dim() > 0 and batch.shape[0] == 0
    if isinstance(batch, Mapping):
        return any(map(has_no_rows, batch.values()))
    return any(map(has_no_rows, batch)) if isinstance(batch, list | tuple) else False


def _nothing(model: nn.Module) -> None:
    """Replaces the optimizer's step: zeroes gradients for code that still reads them."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()
