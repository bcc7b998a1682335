"""Sync-Switch: in step at first, for quality; then each at its own pace, for speed; nobody waits for who is slow."""

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
    """What it found when it put a strategy in place of another, and for how many looks each rank was slow or not."""

    was: Any = None  # the strategy before, as plain JSON
    put: Any = None  # the strategy that it has put in its place
    lr: float = 0.0  # the learning rate before
    streak: dict[int, int] = field(default_factory=dict)  # looks in a row: above 0 slow, below 0 not
    late: set[int] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class SyncSwitch(Policy):
    """The first `fraction` of the steps synchronously, as the experiment says, the rest against an asynchronous server.

        step < fraction * steps    the strategy that the run began with, learning rate n lr, global batch n B
        from there on              AsyncServer, learning rate lr, each push a batch of B

    Of n ranks each has the same batch B in both phases, so only the rate has to be divided by n; each push then
    counts in full (`weight` = "sum"). With `lr_scaled` the rate follows by itself and is left alone. Momentum is handed
    over and kept as it is: the authors' logs show that zeroing or scaling it costs accuracy. The fraction is the
    paper's for ResNet-32 on CIFAR-10 with 8 workers; it found 12.5 % for ResNet-50 on CIFAR-100 and 50 % with 16
    workers, each by halving it in recurring runs while the accuracy stayed.

    While still synchronous, a rank is a straggler if it computes fewer steps per second than the mean of all ranks less
    their standard deviation, and less than 1 - `margin` of the mean, in `windows` looks in a row; it is none any more
    after as many looks in which that was not so. What is done about one (`straggler`):

        greedy     asynchronous while there is one, then back
        elastic    the slowest are left out: BackupWorkers, with as many backups as there are stragglers, at a learning
                   rate of (n - stragglers) / n of the usual one; back when there is none any more
        nothing    it is waited for

    Margin and the way back are ours: of few ranks that are equally fast the slowest is nearly always more than a
    deviation behind. Only computing is looked at, not the wire. Under "elastic" the paper takes the straggler out of
    the cluster; here it goes on computing gradients that come too late to count, and who is late is told in every step
    by arrival, not by name. Where ranks come back into step, those behind skip what they have not done: a budget of
    steps, not of examples.

    When to use it: a parameter server is as good as an all-reduce here (fast wires), and ranks are slow for a while.

    Reference: Li, Mangoubi, Xu and Guo, "Sync-Switch: Hybrid Parameter Synchronization for Distributed Deep Learning",
    ICDCS 2021, https://arxiv.org/abs/2104.08364
    """

    fraction: float = knob(0.0625, 0.0, 1.0, doc="share of all steps that are made synchronously, at the beginning")
    rate: bool = knob(True, doc="the learning rate is divided by the number of ranks where they are asynchronous")
    straggler: str = knob("greedy", choices=("greedy", "elastic", "nothing"), doc="what is done about a slow rank")
    windows: int = knob(3, 1, 1000, unit="looks", doc="looks in a row that make a straggler of a rank, or none of it")
    margin: float = knob(0.1, 0.0, 1.0, doc="by how much of the mean speed a straggler is slower, at least")

    reads: ClassVar[tuple[str, ...]] = ("compute",)

    def init(self) -> _State:
        return _State()

    def next_look(self, experiment: Any, after: int) -> int:
        usual, switch = super().next_look(experiment, after), self._switch(experiment)
        return switch if after < switch < usual else usual

    def _switch(self, experiment: Any) -> int:
        """The first asynchronous step."""
        return math.ceil(self.fraction * experiment.steps - ROUNDING)

    def needs(self, experiment: Any) -> str | None:
        if not experiment.steps:
            return "steps=0: of a run without an end there is no fraction; SyncSwitch waits for a number of steps"
        if self.rate and not experiment.lr:
            return "lr=0: the task's own rate is not known, so it cannot be divided; give lr, or policy.rate=false"
        return None

    def decide(self, seen: Seen, state: _State) -> Iterator[Decision]:
        e, ranks = seen.experiment, seen.experiment.replicas
        late = self._late(seen.numbers["compute"], state)
        ours = state.put is not None and to_plain(e.strategy) == state.put
        if not ours:
            state.was, state.lr, state.put = to_plain(e.strategy), e.lr, None
        wanted, share, reason = state.was, 1.0, f"no rank has been slow in {self.windows} looks in a row"
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
        """Who is slow, and how much."""
        rates = {rank: 1 / s for rank, s in enumerate(seen.numbers["compute"]) if s > 0}
        mean = fmean(rates.values())
        told = [f"rank {r} at {rates[r] / mean:.2f} of the mean speed" for r in sorted(late) if r in rates]
        return f"slow in {self.windows} looks in a row: {', '.join(told) or 'a rank that is silent now'}"

    def _late(self, seconds: Sequence[float], state: _State) -> set[int]:
        """Who is a straggler after this look, from the seconds that each rank computed per step."""
        slow = slower(seconds, self.margin)
        for rank, known in enumerate(seconds):
            if known > 0:
                before = state.streak.get(rank, 0)
                state.streak[rank] = max(before, 0) + 1 if rank in slow else min(before, 0) - 1
        state.late |= {rank for rank, looks in state.streak.items() if looks >= self.windows}
        state.late -= {rank for rank, looks in state.streak.items() if -looks >= self.windows}
        return state.late


def slower(seconds: Sequence[float], margin: float) -> set[int]:
    """Ranks whose steps per second are below the mean less the standard deviation, and `margin` below the mean.

    NaN stands for a rank that computed nothing.
    """
    rates = {rank: 1 / s for rank, s in enumerate(seconds) if s > 0}
    if len(rates) < 2:
        return set()
    mean, spread = fmean(rates.values()), pstdev(rates.values())
    edge = mean - spread * (1 - ROUNDING)
    return {rank for rank, v in rates.items() if v <= edge and v < (1 - margin) * mean}
