"""Sync-Switch: synchronous training for quality, then asynchronous training for speed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any, ClassVar

from workbench.policies._base import Decision, Policy, Seen
from workbench.settings import knob, to_plain, with_value

ROUNDING = 1e-9


@dataclass
class _State:
    """The settings before the policy replaced a strategy. Each rank's streak of slow looks."""

    was: Any = None  # as plain JSON
    put: Any = None
    lr: float = 0.0
    streak: dict[int, int] = field(default_factory=dict)  # consecutive looks: above 0 slow, below 0 not slow
    late: set[int] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class SyncSwitch(Policy):
    """Trains the first `fraction` of the steps synchronously, then with an asynchronous server.

        step < fraction * steps    the strategy that the run began with, learning rate n lr, global batch n B
        from there on              AsyncServer, learning rate lr, each push a batch of B

    Each of n ranks has the same batch B in both phases. So only the rate changes, by the factor 1/n. Each push then
    counts in full (`weight` = "sum"). With `lr_scaled` the rate follows by itself, so the policy leaves it alone.
    Momentum stays unchanged: the authors' logs show that zeroing or scaling it costs accuracy. The default fraction
    is the paper's for ResNet-32 on CIFAR-10 with 8 workers. The paper found 12.5 % for ResNet-50 on CIFAR-100, and
    50 % with 16 workers. It halved the fraction in recurring runs while the accuracy stayed.

    In the synchronous phase a rank becomes a straggler after `windows` consecutive slow looks. A look is slow if the
    rank's steps per second are below two limits: the mean of all ranks minus their standard deviation, and 1 - `margin`
    of the mean. After as many other looks the rank is no straggler. `straggler` selects the reaction:

        greedy     asynchronous while there is a straggler, then back
        elastic    ignores the slowest: BackupWorkers with as many backups as stragglers, at (n - stragglers) / n of the
                   usual learning rate; back when no straggler is left
        nothing    the ranks wait for it

    The margin and the way back are ours. Among few equally fast ranks the slowest is nearly always more than a standard
    deviation behind. Only compute counts, not communication. Under "elastic" the paper removes the straggler
    from the cluster. Here it continues to compute gradients that arrive too late: in every step the order of arrival
    decides, not the rank. When ranks return to lockstep, late ranks skip the steps that they missed: the budget counts
    steps instead of examples.

    When to use it: if a parameter server is as fast as an all-reduce (fast links) and ranks are slow for a while.

    Reference: Li, Mangoubi, Xu and Guo, "Sync-Switch: Hybrid Parameter Synchronization for Distributed Deep Learning",
    ICDCS 2021, https://arxiv.org/abs/2104.08364
    """

    fraction: float = knob(0.0625, 0.0, 1.0, doc="share of the steps that are synchronous, from the first on")
    rate: bool = knob(True, doc="divide the learning rate by the number of ranks in asynchronous steps")
    straggler: str = knob("greedy", choices=("greedy", "elastic", "nothing"), doc="reaction to a slow rank")
    windows: int = knob(
        3, 1, 1000, unit="looks", doc="consecutive looks at the record that decide whether a rank is a straggler"
    )
    margin: float = knob(0.1, 0.0, 1.0, doc="share of the mean speed by which a straggler is slower, at least")

    reads: ClassVar[tuple[str, ...]] = ("compute",)

    def init(self) -> _State:
        return _State()

    def next_look(self, experiment: Any, after: int) -> int:
        usual, switch = super().next_look(experiment, after), self._switch(experiment)
        return switch if after < switch < usual else usual

    def _switch(self, experiment: Any) -> int:
        return math.ceil(self.fraction * experiment.steps - ROUNDING)

    def needs(self, experiment: Any) -> str | None:
        if not experiment.steps:
            return "steps=0: a run without an end has no fraction; SyncSwitch waits for a number of steps"
        if self.rate and not experiment.lr:
            return (
                "lr=0: the task's own rate is not known, so SyncSwitch cannot divide it; set lr, or policy.rate=false"
            )
        return None

    def decide(self, seen: Seen, state: _State) -> Iterator[Decision]:
        e, ranks = seen.experiment, seen.experiment.replicas
        late = self._late(seen.numbers["compute"], state)
        ours = state.put is not None and to_plain(e.strategy) == state.put
        if not ours:
            state.was, state.lr, state.put = to_plain(e.strategy), e.lr, None
        wanted, share, reason = state.was, 1.0, f"no rank was slow in {self.windows} consecutive looks"
        if seen.step >= self._switch(e):
            wanted, share = {"AsyncServer": {"weight": "sum"}}, 1 / ranks
            reason = f"{self.fraction:.4g} of {e.steps} steps are made"
        elif late and self.straggler == "greedy":
            wanted, share = {"AsyncServer": {"weight": "sum"}}, 1 / ranks
            reason = self._said(late, seen)
        elif late and self.straggler == "elastic":
            wanted, share = {"BackupWorkers": {"backup": len(late)}}, 1 - len(late) / ranks
            reason = self._said(late, seen)
        now = with_value(e, "strategy", wanted).strategy
        if now == e.strategy:
            return
        state.put = to_plain(now)
        scales = self.rate and not e.lr_scaled
        yield Decision(reason, {"strategy": wanted} | ({"lr": state.lr * share} if scales else {}))

    def _said(self, late: set[int], seen: Seen) -> str:
        rates = {rank: 1 / s for rank, s in enumerate(seen.numbers["compute"]) if s > 0}
        mean = fmean(rates.values())
        told = [f"rank {r} at {rates[r] / mean:.2f} of the mean speed" for r in sorted(late) if r in rates]
        return f"slow in {self.windows} consecutive looks: {', '.join(told) or 'a rank that is silent now'}"

    def _late(self, seconds: Sequence[float], state: _State) -> set[int]:
        """Returns the stragglers after this look, from each rank's compute seconds per step."""
        slow = slower(seconds, self.margin)
        for rank, known in enumerate(seconds):
            if known > 0:
                before = state.streak.get(rank, 0)
                state.streak[rank] = max(before, 0) + 1 if rank in slow else min(before, 0) - 1
        state.late |= {rank for rank, looks in state.streak.items() if looks >= self.windows}
        state.late -= {rank for rank, looks in state.streak.items() if -looks >= self.windows}
        return state.late


def slower(seconds: Sequence[float], margin: float) -> set[int]:
    """Returns the slow ranks from seconds per step. NaN: a rank computed nothing.

    Their steps per second are below mean minus standard deviation, and below 1 - `margin` of the mean.
    """
    rates = {rank: 1 / s for rank, s in enumerate(seconds) if s > 0}
    if len(rates) < 2:
        return set()
    mean, spread = fmean(rates.values()), pstdev(rates.values())
    edge = mean - spread * (1 - ROUNDING)
    return {rank for rank, v in rates.items() if v <= edge and v < (1 - margin) * mean}
