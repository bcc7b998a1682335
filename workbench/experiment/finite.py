"""What is done about a loss or a gradient that is no number, and about a loss that runs away: the choices, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.experiment.experiment import Experiment

ACTIONS = ("auto", "pause", "stop", "skip", "roll back")
ON_NAN = ("when a loss is no number, or has run away; auto: pause if somebody watches, else stop; skip: no update "
          "then; roll back: to the last checkpoint")  # fmt: skip
DIVERGED = "a loss so many times the best of before, and above the first, has run away; 0 is off"

NO_ROWS = "the batch has no rows"  # why a loss is no number: it is a mean over nothing


def refused(e: Experiment) -> str | None:
    """Why a step of `e` cannot be skipped, where it is to be, in a sentence that says what would do; or None."""
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
