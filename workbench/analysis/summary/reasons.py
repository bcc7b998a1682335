"""Why an answer about a run is empty, and a frame that shows it."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.analysis.steps.collectives import lined_up
from workbench.analysis.steps.settings import list_stretches
from workbench.analysis.steps.window import Window, last_steps, ranks_of

if TYPE_CHECKING:
    from workbench.record.run import Run

UNSEEN = ("TorchDDP", "TorchFSDP")  # torch makes their exchange


def why_no_step(run: Run, last: int | None = None) -> str:
    """Why there is no step, or "". last: as for `last_steps`"""
    first, stop = last_steps(run.timeline, last)
    if stop > first:
        return ""
    if last is not None and last < 1:
        return f"last={last} must be 1 or more, or None for all steps."
    return "No step has ended on every rank yet." if run.live else "No step ended on every rank."


def why_no_meeting(run: Run, last: int | None = None) -> str:
    """Why the last steps have no recorded collective, or ""."""
    if why := why_no_step(run, last):
        return why
    first, stop = last_steps(run.timeline, last)
    if len(ranks_of(run.timeline.spans.rows())) < 2:
        return "One rank trains, so no rank waits for another."
    c = lined_up(Window(run.timeline, first, stop))
    if ((~np.isnan(c.t0)).sum(axis=1) > 1).any():
        return ""
    name = strategy_at(run, stop - 1)
    if name in UNSEEN:
        return (f"torch itself performs the exchange of {name}, so the record shows it only on an emulated Link. "
        f"Set fabric.link.bandwidth or use the strategy DDP.")  # fmt: skip
    return (f"Ranks met in no collective of steps {first} to {stop - 1} under {name}. They send messages, or train "
            f"alone between their meetings. Look at more steps (last=).")  # fmt: skip


def strategy_at(run: Run, step: int) -> str:
    """The strategy's name at a step."""
    now: Any = next((s.settings for s in reversed(list_stretches(run)) if s.first <= step), run.settings).get(
        "strategy"
    )
    return next(iter(now), "?") if isinstance(now, dict) else str(now)


def explain_empty(frame: Any, why: str) -> Any:
    """A frame that shows why it is empty, also in `attrs["why"]`."""
    if not why:
        return frame
    import pandas as pd

    class Silent(pd.DataFrame):
        def __repr__(self) -> str:
            return f"{super().__repr__()}\n{self.attrs.get('why', '')}"

        def _repr_html_(self) -> str:
            return f"{self.to_html(max_rows=20, max_cols=20, notebook=True)}<p>{escape(self.attrs.get('why', ''))}</p>"

    found = Silent(frame)
    found.attrs["why"] = why
    return found


class EmptyAnswer(list[Any]):
    """An empty list that says why it is empty."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why

    def __repr__(self) -> str:
        return f"[]  # {self.why}"
