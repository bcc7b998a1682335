"""Watches one rank's losses for non-finite values, and its gradients if it skips bad steps.

After a non-finite loss the rank computes the batch again to find the layer. To skip steps, it reads all gradients
before each update. Whole replicas update by one sum, so a non-finite number reaches all without an exchange. The ranks
of a partition reduce one number.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from workbench.experiment.non_finite_rules import NO_ROWS
from workbench.host.observe.measuring_view import WatchedView
from workbench.host.observe.non_finite_origin import (
    NonFiniteOrigin,
    find_in_backward,
    find_in_forward,
    find_in_gradients,
    find_in_parameters,
)
from workbench.host.placement.canonical_state import list_buffers
from workbench.rank import Op, StrategyError
from workbench.settings import Json

WINDOW_LOSSES = 10
MAX_SKIPPED = 20  # in a row before an alarm
R = TypeVar("R")


class NonFiniteGuard:
    """One rank's watch for non-finite and diverging losses.

    alarmed: asks the host to "pause", "stop" or "roll back" the run, as far as it can
    first:   the loss of the run's first step; lower losses never count as diverged
    again:   whether a batch may be computed again
    """

    def __init__(self, run: WatchedView, alarmed: Callable[[str], None], first: float | None = None,
                 again: bool = True) -> None:  # fmt: skip
        self.run, self.alarmed, self.first, self.again = run, alarmed, first, again
        self._skipped = -1  # the last skipped step
        self._row = 0  # skipped steps in a row
        self.forget_losses()

    def forget_losses(self) -> None:
        """Forgets losses and alarms after a pause."""
        self._found: NonFiniteOrigin | None = None  # this step's cause
        self._said = False
        self._losses: deque[float] = deque(maxlen=WINDOW_LOSSES)
        self._best = math.inf

    def take_first_loss(self, first: float | None) -> None:
        self.first = self.first if first is None else float(first)

    async def agree_on_first_loss(self) -> None:
        """Takes the largest first loss of all ranks."""
        place = self.run.layout.order[0].param.device
        mine = torch.tensor([-math.inf if self.first is None else self.first], dtype=torch.float64, device=place)
        largest = await self.run.rank.all_reduce(mine, "max", "first loss")
        if not largest.is_meta:  # with sizes only
            self.take_first_loss(float(largest[0]) if math.isfinite(largest[0]) else None)

    # -- losses --

    def check_forward(self, loss: Tensor, batch: object) -> None:
        """Finds a bad loss's cause before an update hides it."""
        if self._found is None and not math.isfinite(float(loss)):
            self._found = self._find_cause(batch)

    def check_step_loss(self, step: int, loss: float) -> None:
        found, self._found = self._found, None
        if step == self._skipped:
            return
        if not math.isfinite(loss):
            self._raise_alarm("nan", {"loss": str(loss), **(found or find_in_parameters(self.run.model)).to_json()})
        elif self._has_diverged(loss):
            self._raise_alarm("diverged", {"loss": f"{loss:.4g}", "best": f"{self._best:.4g}"})
        else:
            self._said = False

    def _has_diverged(self, loss: float) -> bool:
        """Whether the mean of the last losses exceeds the first loss and `diverged` times the best mean.

        Below the first loss such a rise may be chance.
        """
        times = self.run.experiment.diverged
        self._losses.append(loss)
        self.first = loss if self.first is None else self.first
        mean = sum(self._losses) / len(self._losses)
        self._best = min(self._best, mean)
        return 0 < times * self._best < mean and mean > self.first

    def _raise_alarm(self, name: str, detail: dict[str, Json]) -> None:
        """Acts by `on_nan`. Acts again only after a finite loss, or after a pause."""
        if not self._said:
            self._said = True
            self.run.mark(name, {"rank": self.run.rank.number(), **detail})
            policy = self.run.experiment.on_nan
            self.alarmed(policy if policy in ("stop", "roll back") else "pause")

    def _find_cause(self, batch: object) -> NonFiniteOrigin:
        if has_no_rows(batch):
            return NonFiniteOrigin("", NO_ROWS)
        if self._can_recompute:
            return find_in_forward(self.run.model, self.run.learner.loss, batch)
        return find_in_parameters(self.run.model)

    @property
    def _can_recompute(self) -> bool:
        run = self.run
        return self.again and run.spread is None and not run.unsharder.sharded and run.experiment.strategy.workers == 1

    # -- skipped steps --

    def guard_step(self, step: Coroutine[Op, Any, R]) -> Coroutine[Op, Any, R]:
        """Makes `step` skip bad updates if `on_nan` is "skip"."""
        return self._run_guarded(step) if self.run.experiment.on_nan == "skip" and self._has_values else step

    @property
    def _has_values(self) -> bool:
        return not any(p.is_meta for p in self.run.model.parameters() if p.requires_grad and p.numel())

    async def _run_guarded(self, step: Coroutine[Op, Any, R]) -> R:
        before = [(b, b.clone()) for b in list_buffers(self.run.model)]  # a bad batch spoils BatchNorm's statistics
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
                    if op.verb == "forward" and self._can_recompute:
                        batch = await Op("batch") if op.args[0] is None else op.args[0]
                        op.args = batch, *op.args[1:]
                    elif op.verb == "update" and op.args[0] is None and await self._has_bad_gradient():
                        self._skip_update(batch, before)
                        op.args = None, partial(_zero_gradients, self.run.model), *op.args[2:]
                    value = await op
                except (StrategyError, StopAsyncIteration) as answer:
                    error = answer
        finally:
            step.close()

    async def _has_bad_gradient(self) -> bool:
        bad = not is_finite(p.grad for p in self.run.model.parameters())
        rank = self.run.rank
        if rank.mesh.inside:
            flag = torch.tensor([float(bad)], device=self.run.layout.order[0].param.device)
            bad = bool(await rank.inside.all_reduce(flag, "max", "finite"))
        return bad

    def _skip_update(self, batch: object, before: list[tuple[Tensor, Tensor]]) -> None:
        run, step = self.run, self.run.rank.step
        self._row = self._row + 1 if self._skipped == step - 1 else 1
        self._skipped = step
        with torch.no_grad():
            for buffer, was in before:
                buffer.copy_(was)
        own = self._found
        if own is None and batch is not None and self._can_recompute:
            own = find_in_backward(run.model, run.learner.loss, batch)
        if self._row > MAX_SKIPPED:
            self._skipped = -1  # skipping did not help
            return self._raise_alarm(
                "nan", {"loss": "", **(own or find_in_gradients(run.model)).to_json(), "row": MAX_SKIPPED}
            )
        if own is not None or run.rank.id == 0:
            said = (own or find_in_gradients(run.model)).to_json()
            run.mark("nan", {"rank": run.rank.number(), "loss": "", **said, "skipped": True, "own": own is not None})


def is_finite(grads: Iterable[Tensor | None]) -> bool:
    """Whether all are finite. On a GPU this synchronizes."""
    there = [g.detach() for g in grads if g is not None and g.numel()]
    if not there:
        return True
    real = [torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in there]
    sums = torch.stack([g.sum(dtype=torch.float32) for g in real])  # the fastest check
    return bool(sums.isfinite().all()) or all(bool(g.isfinite().all()) for g in there)


def has_no_rows(batch: object) -> bool:
    """Whether a tensor at any depth has a first dimension of 0."""
    if isinstance(batch, Tensor):
        return batch.dim() > 0 and batch.shape[0] == 0
    if isinstance(batch, Mapping):
        return any(map(has_no_rows, batch.values()))
    return any(map(has_no_rows, batch)) if isinstance(batch, list | tuple) else False


def _zero_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()
