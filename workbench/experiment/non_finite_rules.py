"""Settings for a loss or gradient that is not finite, and for a loss that diverges."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.experiment.views import ExperimentView

ACTIONS = ("auto", "pause", "stop", "skip", "roll back")
ON_NAN = ("when a loss is no number, or has run away; auto: pause if somebody watches, else stop; skip: no update "
          "then; roll back: to the last checkpoint")  # fmt: skip
DIVERGED = "a loss so many times the best of before, and above the first, has run away; 0 is off"

NO_ROWS = "the batch has no rows"  # such a loss is a mean over no rows


def explain_refusal(e: ExperimentView) -> str | None:
    """Returns why `e` cannot skip a step as `on_nan` asks, and what to do instead; or None."""
    s = e.strategy
    if e.on_nan != "skip" or (s.skips and s.clips and not s.shards and s.workers == 1):
        return None
    name = type(s).__name__
    if not s.skips:
        why = f"{name} remembers something of a step's gradients before its update"
    elif s.workers > 1:
        why = f"{s.workers} workers of a rank update one model, each when it will"
    else:
        why = f"under {name} no update has all of a rank's gradients before it"
    return f"on_nan='skip': {why}, so no step can be left out whole; use on_nan='stop' with it, or DDP or LocalSGD"
