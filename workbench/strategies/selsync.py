"""Selective synchronisation (SelSync)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf, isfinite
from typing import Any, ClassVar

import torch

from workbench.rank import Bucket, Rank, as_real, outlined, values_of
from workbench.settings import knob
from workbench.strategies._base import Strategy
from workbench.strategies._examples import injected
from workbench.strategies._mean import mean_of_all

MAX_WINDOW = 1000  # longest window, in steps
MIN_DIVISOR = 1e-30  # smallest divisor, for a norm of zero


class _State:
    """State of one rank: its gradients' norms, their mean at the last step and their relative changes.

    since: steps since the ranks last had the same parameters
    """

    def __init__(self) -> None:
        self.since = 0
        self.norms: deque[float] = deque(maxlen=MAX_WINDOW)
        self.changes: deque[float] = deque(maxlen=MAX_WINDOW)
        self.before: float | None = None


@dataclass(frozen=True, kw_only=True)
class SelSync(Strategy):
    """Synchronises all ranks in a step if the gradient of any rank changes much, else none.

        n_i      <- sum over parameters of ||grad_i||
        change_i <- mean over the last `window` steps of |n_i - n_i before| / n_i before
        params_i <- optimizer_i(params_i, grad_i)                     every step
        params_i <- (1/p) sum_j params_j                              if any change_j >= delta

    Windowed means weigh a value that is k steps old by (1 - smoothing)^k. With `norm_window` > 1 such a mean of norms
    replaces n_i. Until the window is full, every step synchronises. One all-reduce of 8 bytes per step finds the
    largest change, so all ranks decide the same. Only steps that synchronise send 2 (p-1)/p of the model's bytes. Ranks
    wait for both exchanges. The record has each rank's "gradient change" and "synchronised" (1 or 0). The share of
    zeros is the LSSR, and 1 / (1 - LSSR) the saving.

    delta = 0 always synchronises, a large delta never. Each rank keeps its own momentum. `aggregate` = "gradients"
    averages gradients before the update instead. Such a step is DDP's, but ranks keep their differences from other
    steps.

    If ranks have different kinds of data, a share `inject_ranks` of them sends examples to all other ranks. They take
    turns. The batches of the receivers become larger.

    When to use it: the network is slow, and training has calm phases. Compare the recorded changes with delta first. If
    each step's gradient is noisy, all changes may be above delta. Means of norms over 25 steps make changes about 25
    times smaller and steadier. Then delta should shrink as much (0.02 to 0.05). The authors' code takes both means over
    25 steps and averages the parameters before the update. Here ranks are equal after a synchronised step. In a
    simulation with sizes only, every step synchronises and ranks cannot share examples.

    Reference: Tyagi and Swany, "Accelerating Distributed ML Training via Selective Synchronization", CLUSTER 2023,
    https://arxiv.org/abs/2307.07950, and its code, https://github.com/sahiltyagi4/SelSync
    """

    delta: float = knob(
        0.3, 0.0, 1e6, log=True, doc="smallest relative change of the gradient that makes ranks synchronise"
    )
    aggregate: str = knob(
        "parameters", choices=("parameters", "gradients"), doc="what ranks average when they synchronise"
    )
    window: int = knob(25, 1, MAX_WINDOW, unit="steps", log=True, doc="steps over which the change is averaged")
    norm_window: int = knob(
        1, 1, MAX_WINDOW, unit="steps", log=True, doc="steps over which gradient norms are averaged first"
    )
    smoothing: float = knob(0.01, 0.0, 0.9, doc="exponential smoothing: decrease of the weight per older step")
    inject_ranks: float = knob(0.0, 0.0, 1.0, doc="alpha, data injection: share of the ranks that send examples")
    inject_share: float = knob(0.25, 0.0, 1.0, doc="beta, data injection: share of its batch that a sending rank sends")

    alike: ClassVar[bool] = True
    periodic: ClassVar[bool] = True
    exchanges: ClassVar[str] = "parameters"
    sees_all: ClassVar[bool] = True
    own: ClassVar[dict[str, str]] = {"before": "drop", "changes": "drop", "norms": "drop", "since": "drop"}

    def init(self, rank: Rank, params: list[Bucket]) -> _State:
        return _State()

    def steps_apart(self, state: _State) -> int | None:
        return state.since if self.aggregate == "parameters" else None

    async def step(self, rank: Rank, state: _State) -> None:
        await rank.forward(await self._examples(rank))
        await rank.backward()
        grads = await rank.grads()
        due = await self._largest_change(rank, state, grads) >= self.delta
        await rank.sample("synchronised", due)
        if due and self.aggregate == "gradients":
            await mean_of_all(rank, grads)
        await rank.update()
        state.since += 1
        if due and self.aggregate == "parameters":
            await mean_of_all(rank, await rank.params())
            state.since = 0

    async def leave(self, rank: Rank, state: _State) -> None:
        await mean_of_all(rank, await rank.params())

    async def _largest_change(self, rank: Rank, state: _State, grads: list[Bucket]) -> float:
        """Returns the largest smoothed change of any rank, or infinity if a rank cannot measure it."""
        change = inf
        self._look(state, grads)
        if state.changes:
            smooth = self._smooth(state.changes, self.window)
            await rank.sample("gradient change", smooth)
            change = smooth if len(state.changes) >= self.window and isfinite(smooth) else inf
        flag = grads[0].data.new_full((1,), change, dtype=torch.float64)
        await rank.all_reduce(flag, "max", "gradient change")
        return float(values_of(flag, otherwise=inf))

    @outlined(lambda self, state, grads: None)  # sizes only: there are no values
    def _look(self, state: _State, grads: list[Bucket]) -> None:
        parts = [as_real(b.data[p.start : p.stop]) for b in grads for p in b.parts]
        each = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in parts]
        state.norms.append(float(torch.stack(each).sum()))
        now, before = self._smooth(state.norms, self.norm_window), state.before
        if before is not None:
            state.changes.append(abs(now - before) / max(before, MIN_DIVISOR))
        state.before = now

    def _smooth(self, values: Iterable[float], window: int) -> float:
        """Returns the weighted mean of the last `window` values, or of all values if there are fewer."""
        last = list(values)[-window:]
        weights = [(1.0 - self.smoothing) ** age for age in range(len(last))]
        return sum(w * x for w, x in zip(weights, reversed(last), strict=True)) / sum(weights)

    async def _examples(self, rank: Rank) -> Any:
        """Returns this step's batch with shared examples, or None (the next batch) if no rank shares any."""
        giving = self.givers(rank.step, rank.size)
        if not giving or not self.inject_share or rank.size == 1:
            return None
        return await injected(rank, await rank.batch(), giving, self.inject_share)

    def givers(self, step: int, size: int) -> list[int]:
        """Returns the ranks that give examples away in a step. Every step has as many, and ranks take turns."""
        count = ceil(self.inject_ranks * size - 1e-9)
        return sorted((step * count + k) % size for k in range(count))
