"""Settings for a loss or gradient that is not finite and for a loss that diverges."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.experiment.views import ExperimentView

ACTIONS = ("auto", "pause", "stop", "skip", "roll back")
ON_NAN = ("if a loss is not finite or has diverged; auto: pause if somebody watches, else stop; skip: skip the "
"update; roll back: to the last checkpoint")  # fmt: skip
DIVERGED = "a loss has diverged if it is this many times the best one and above the first; 0: off"

NO_ROWS = "the batch has no rows"  # such a loss is a mean over no rows


def explain_refusal(e: ExperimentView) -> str | None:
    """Returns why `e` cannot skip a step as `on_nan` asks, with a remedy; or None."""
    s = e.strategy
    if e.on_nan != "skip" or (s.skips and s.clips and not s.shards and s.workers == 1):
        return None
    name = type(s).__name__
    if not s.skips:
        why = f"{name} stores state of a step's gradients before the update"
    elif s.workers > 1:
        why = f"{s.workers} workers of a rank update one model, each at its own time"
    else:
        why = f"under {name} an update does not see all gradients of a rank"
    return f"on_nan='skip': {why}, so a rank cannot skip a whole step; use on_nan='stop' with it, or DDP or LocalSGD"
