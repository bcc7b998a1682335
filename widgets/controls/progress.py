"""Describes in one line what a run does."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from typing import Any

import numpy as np

from workbench.analysis import checkpoint_progress, last_steps
from workbench.analysis.steps.window import MEASURING, Window, newest_generation
from workbench.record.alarms import NAMES, describe_layer, describe_value
from workbench.settings.progress import DELAY_BEFORE_BAR, left, under_way

DELAY_BEFORE_NOTE = 2.0  # seconds before the line explains a delay
RATE_STEPS = 20  # steps for the speed


class RunProgress:
    """Follows the first training rank's step and speed."""

    def __init__(self) -> None:
        self.run: Any = None
        self.cursor = 0
        self.first = 0  # the rank
        self.step = -1
        self.seen = time.monotonic()
        self.lengths: deque[float] = deque(maxlen=RATE_STEPS)
        self.measures = False  # whether any step was measured

    def follow_run(self, run: Any) -> RunProgress:
        """Reads new rows. Starts again at the first row of another run."""
        if run is not self.run:
            self.__init__()  # type: ignore[misc]
            self.run = run
        if run is None:
            return self
        spans = run.timeline.spans.rows(self.cursor)
        self.cursor += len(spans)
        since = newest_generation(run.timeline)
        self.first = since.members[0] if since is not None else 0
        steps = spans[spans.equal("lane", "step") & (spans.rank == self.first)]
        if len(steps):
            self.seen = time.monotonic()
            self.step = int(steps.step[-1])
            self.lengths.extend((steps.t1 - steps.t0)[-RATE_STEPS:])
            self.measures = self.measures or bool(spans.equal("lane", MEASURING).any())
            if self.measures:
                w = Window(run.timeline, *last_steps(run.timeline, RATE_STEPS))
                self.lengths = deque(w.step_seconds[w.usual, int(w.column_of(np.array(self.first)))], maxlen=RATE_STEPS)
        return self

    @property
    def is_stuck(self) -> bool:
        return time.monotonic() - self.seen > DELAY_BEFORE_NOTE

    @property
    def step_rate(self) -> float | None:
        """Steps per second, without evaluations, pauses and measurements."""
        total = sum(self.lengths)
        return len(self.lengths) / total if total else None

    @property
    def last_step(self) -> int:
        """The planned number of steps; 0 if unknown."""
        if self.run is None:
            return 0
        changed = [change.value for change in self.run.changes if change.path == "steps"]
        return int([self.run.settings.get("steps") or 0, *changed][-1] or 0)

    @property
    def to_go(self) -> float | None:
        """Estimated seconds until the last step ends, or None."""
        if not self.last_step or self.step < 0 or not self.step_rate:
            return None
        return max(self.last_step - self.step - 1, 0) / self.step_rate


def status_line(state: str, progress: RunProgress, ranks: int, detail: str = "") -> str:
    """Returns one line: `running · step 123 of 400 · 8.2 steps/s · 34 s to go · 4 ranks`."""
    many = f"{ranks} rank{'s' * (ranks != 1)}"
    at = f"step {progress.step}" if progress.step >= 0 else ""
    of = f" of {progress.last_step}" if at and progress.last_step else ""
    rate = f"{progress.step_rate:.3g} steps/s" if progress.step_rate else ""
    match state:
        case "starting":
            parts = [f"starting {many}", detail]
        case "idle":
            parts = [_name_end(progress.run), at, many] if progress.run else [f"ready, {many}", "press Start"]
        case "running":
            to_go = left(progress.to_go) if progress.to_go else ""
            parts = ["running", at + of or "first step pending", rate, to_go, many, detail]
        case "paused":
            parts = [f"paused after {at}{of}" if at else "paused", many]
        case _:
            parts = [state, at, detail]
    return " · ".join(p for p in parts if p)


def list_activities(run: Any, state: str, progress: RunProgress) -> list[dict[str, Any]]:
    """Returns long activities: name, share (negative if unknown) and both as text."""
    found = [{"what": d.what, "share": _round_share(d.share), "said": repr(d)} for d in under_way()]
    if run is not None and run.live and (kept := checkpoint_progress(run.timeline)) is not None:
        lasted = time.time() - run.epoch - kept.since
        if lasted > DELAY_BEFORE_BAR:
            share = None if kept.usual is None else min(lasted / max(kept.usual, 0.1), 0.99)
            to_go = "" if kept.usual is None else left(max(kept.usual - lasted, 1.0))
            what = f"writing the checkpoint of step {kept.step}"
            found.append({"what": what, "share": _round_share(share), "said": ", ".join(filter(None, [what, to_go]))})
    if state in ("running", "paused") and progress.last_step and progress.step >= 0:
        share = min((progress.step + 1) / progress.last_step, 1.0)
        said = f"{math.floor(100 * share)} % of {progress.last_step} steps done"
        found.append({"what": "the run", "share": _round_share(share), "said": said})
    return found


def _round_share(share: float | None) -> float:
    return -1.0 if share is None else round(share, 3)


def _name_end(run: Any) -> str:
    return {"done": "finished", "stopped": "stopped"}.get(run.state, run.state)


def describe_trouble(run: Any) -> dict[str, str]:
    """Returns the error of a run, or the NaN that paused it, as title, text and traceback. Else {}."""
    if run is None:
        return {}
    if errors := run.details("error"):
        return _describe_error(errors)
    return _describe_pause(run) if run.state == "paused" else {}


def _describe_pause(run: Any) -> dict[str, str]:
    """Returns the first NaN or divergence since the last resume if it paused the run; or {}."""
    went_on = max((t for _, t, d in run.details("state") if d.get("state") == "running"), default=-math.inf)
    marks, found = run.timeline.marks.rows(), []
    for name in NAMES:
        rows = marks[marks.equal("name", name) & (marks.t >= went_on)]
        every = zip(rows.t, rows.rank, rows.step, map(json.loads, rows.detail), strict=True)
        found += [(float(t), int(r), int(s), name, d) for t, r, s, d in every if not d.get("skipped")]
    if not found:
        return {}
    _, rank, step, name, detail = min(found, key=lambda row: row[:3])
    no_number = f"Rank {rank}'s loss became NaN or infinite at step {step}{describe_layer(detail)}; the run is paused."
    away = f"Rank {rank}'s loss diverged at step {step}: {describe_value(name, detail)}; the run is paused."
    title = no_number if name == "nan" else away
    return {"title": title, "text": "Undo the last change or lower the learning rate, then resume.", "more": ""}


def _describe_error(errors: list[tuple[int, float, dict[str, Any]]]) -> dict[str, str]:
    step, _, first = errors[0]
    same = sorted({int(d.get("rank", 0)) for _, _, d in errors if d.get("text") == first.get("text")})
    who = f"rank {same[0]}" if len(same) == 1 else f"ranks {', '.join(map(str, same))}"
    doing = f", in {first['op']}" if first.get("op") else ""
    text = f"{first.get('type', '')}: {first.get('text', '')}".strip(": ")
    title = f"Error on {who}, step {first.get('step', step)}{doing}:"
    return {"title": title, "text": text, "more": first.get("traceback") or ""}
