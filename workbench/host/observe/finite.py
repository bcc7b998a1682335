"""Finite: one rank's watch over its losses, and over its gradients where a bad step is to be skipped; on both hosts.

A step costs a look at its loss and nothing else: which layer is to blame is looked for once a loss is no number, by
computing that batch once more. Where steps are to be skipped all gradients are read once before each update, as their
norm would be. Of whole replicas nobody asks anybody: they update by one sum, and a number in it that is none is so on
all of them. The ranks of a partition have a part each and add one number up, as for `clip`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.experiment.finite import NO_ROWS
from workbench.host.core.changing import Changing
from workbench.host.observe.origin import Found, in_backward, in_forward, in_gradients, in_parameters
from workbench.host.placement.canonical import buffers
from workbench.rank import Op, StrategyError

WINDOW = 10  # the last losses, whose mean is compared with the best such mean of before
IN_A_ROW = 20  # steps skipped one after the other, after which skipping is no help


class Finite:
    """One rank's. alarmed: tells the host that the run is to "pause", "stop" or "roll back", as far as it can.

    first: the loss of the run's first step, below which none is an alarm; None before
    """

    again = True  # may a batch be computed once more?

    def __init__(self, run: Changing, alarmed: Callable[[str], None], first: float | None = None) -> None:
        self.run, self.alarmed, self.first = run, alarmed, first
        self._skipped = -1  # the last step that was skipped
        self._row = 0  # how many were, one after the other
        self.forget()

    def forget(self) -> None:
        """The run goes on after a pause: what was seen before is settled."""
        self._found: Found | None = None  # in the present step
        self._said = False
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._best = math.inf

    def know(self, first: float | None) -> None:
        """The run began before this rank's did, with that loss, if it is known."""
        self.first = self.first if first is None else float(first)

    async def agree(self) -> None:
        """Ranks of which some have come know one first loss from now on, the largest that one of them had."""
        place = self.run.layout.order[0].param.device
        mine = torch.tensor([-math.inf if self.first is None else self.first], dtype=torch.float64, device=place)
        largest = await self.run.rank.all_reduce(mine, "max", "first loss")
        if not largest.is_meta:  # with sizes only nobody has a loss
            self.know(float(largest[0]) if math.isfinite(largest[0]) else None)

    # -- losses --

    def passed(self, loss: Tensor, batch: Any) -> None:
        """A forward of `batch` came to `loss`. If that is no number, the parameters are still those that made it so."""
        if self._found is None and not math.isfinite(float(loss)):
            self._found = self._blame(batch)

    def told(self, step: int, loss: float) -> None:
        """The mean of a step's losses on this rank, once that is known."""
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
        """Is the mean of the last losses so many times the best such mean? Below the first loss that may be chance."""
        times = self.run.experiment.diverged
        self._losses.append(loss)
        self.first = loss if self.first is None else self.first
        mean = sum(self._losses) / len(self._losses)
        self._best = min(self._best, mean)
        return 0 < times * self._best < mean and mean > self.first

    def _alarm(self, name: str, detail: dict[str, Any]) -> None:
        """Says it once, until there is a good loss again or the run goes on after a pause; and acts by the policy."""
        if not self._said:
            self._said = True
            self.run.mark(name, {"rank": self.run.rank.number(), **detail})
            policy = self.run.experiment.on_nan
            self.alarmed(policy if policy in ("stop", "roll back") else "pause")

    def _blame(self, batch: Any) -> Found:
        """Which layer made a loss no number, or that its batch is empty."""
        if has_no_rows(batch):
            return Found("", NO_ROWS)
        if self._whole:
            return in_forward(self.run.model, self.run.learner.loss, batch)
        return in_parameters(self.run.model)

    @property
    def _whole(self) -> bool:
        """Can this rank compute a batch once more by itself?"""
        run = self.run
        return self.again and run.spread is None and not run.reading.sharded and run.experiment.strategy.workers == 1

    # -- steps that are skipped --

    def step(self, step: Coroutine[Op, Any, Any]) -> Coroutine[Op, Any, Any]:
        """`step`, which leaves its update out where a gradient is not finite, if that is the policy."""
        return self._guarded(step) if self.run.experiment.on_nan == "skip" and self._values else step

    @property
    def _values(self) -> bool:
        return not any(p.is_meta for p in self.run.model.parameters() if p.requires_grad and p.numel())

    async def _guarded(self, step: Coroutine[Op, Any, Any]) -> Any:
        """Passes on what the step asks for, but for an update that is not to be."""
        before = [(b, b.clone()) for b in buffers(self.run.model)]  # a bad batch is in running statistics, too
        batch: Any = None
        value: Any = None
        error: Exception | None = None
        try:
            while True:
                try:
                    op = step.throw(error) if error is not None else step.send(value)
                except StopIteration as end:
                    return end.value
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
        """Is a gradient of this rank's replica not finite?"""
        bad = not finite(p.grad for p in self.run.model.parameters())
        rank = self.run.rank
        if rank.mesh.inside:
            flag = torch.tensor([float(bad)], device=self.run.layout.order[0].param.device)
            bad = bool(await rank.inside.all_reduce(flag, "max", "finite"))
        return bad

    def _skip(self, batch: Any, before: list[tuple[Tensor, Tensor]]) -> None:
        """This step's update is left out: says why, as far as this rank knows."""
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
            self._skipped = -1  # the policy's answer did not help
            return self._alarm("nan", {"loss": "", **(own or in_gradients(run.model)).plain(), "row": IN_A_ROW})
        if own is not None or run.rank.id == 0:
            said = (own or in_gradients(run.model)).plain()
            run.mark("nan", {"rank": run.rank.number(), "loss": "", **said, "skipped": True, "own": own is not None})


def finite(grads: Any) -> bool:
    """Whether all numbers of some gradients, any of which may be None, are finite. On a GPU this waits for it."""
    there = [g.detach() for g in grads if g is not None and g.numel()]
    if not there:
        return True
    real = [torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in there]
    sums = torch.stack([g.sum(dtype=torch.float32) for g in real])  # the fastest way to read them
    return bool(sums.isfinite().all()) or all(bool(g.isfinite().all()) for g in there)


def has_no_rows(batch: Any) -> bool:
    """Whether a tensor of the batch, however it is nested, has a first dimension of 0."""
    if isinstance(batch, Tensor):
        return batch.dim() > 0 and batch.shape[0] == 0
    if isinstance(batch, Mapping):
        return any(map(has_no_rows, batch.values()))
    return any(map(has_no_rows, batch)) if isinstance(batch, list | tuple) else False


def _nothing(model: nn.Module) -> None:
    """In an optimizer's place: the gradients are gone, for whoever still looks at them."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()
