"""Evaluates the model between two steps."""

from __future__ import annotations

from typing import Protocol

from workbench.host.core.rank_view import RankView
from workbench.host.observe.held_out_numbers import Evaluated
from workbench.rank import Bucket


class EvaluationView(RankView, Protocol):
    """A rank that evaluates its model."""

    async def evaluate_mean(self) -> Evaluated:
        """Returns held-out numbers of the mean model, on rank 0, and each rank's drift from it."""

    async def evaluate_known(self, known: list[Bucket]) -> Evaluated:
        """Returns held-out numbers of the parameters in `known`, without waiting for other ranks."""

    def span(self, lane: str, name: str, began: float, nbytes: int = 0) -> None:
        """Records a span from `began` to now."""


async def record_evaluation(run: EvaluationView, together: bool) -> float | None:
    """Evaluates and records the held-out numbers, outside step time. Returns the loss, None if unknown.

    together: of the mean model, for which ranks meet; else of the parameters that this rank knows
    """
    await make_late_updates(run)
    began = run.now
    if together:
        numbers, drift = await run.evaluate_mean()
    else:
        known = await run.experiment.strategy.known(run.rank, run.state)
        numbers, drift = await run.evaluate_known(known or run.layout.list_params())
    run.span("eval", "evaluate", began)
    if drift is not None:
        run.sample("drift", drift)
    for name, value in numbers.items():
        run.sample("held_out" if name == "loss" else f"held_out:{name}", value)
    return numbers.get("loss")


async def make_late_updates(run: RankView) -> None:
    """Makes late updates of earlier steps, while the rate is still theirs."""
    strategy = run.experiment.strategy
    if strategy.late_update:
        await strategy.drain(run.rank.replicas, run.state)
