"""Summarises a run in plain values and in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.analysis.resources.memory import measure_memory
from workbench.analysis.steps.examples import examples_per_second, recent_steps, serving_ranks
from workbench.analysis.steps.settings import list_stretches
from workbench.analysis.steps.steps import bytes_per_step
from workbench.analysis.steps.window import Window, last_steps, newest_generation, ranks_of, stands_for

if TYPE_CHECKING:
    from workbench.record.run import Run
    from workbench.record.timeline import Timeline

RATE_STEPS = 50  # steps


def summarise_run(run: Run) -> dict[str, Any]:
    """Returns progress, speed (over the last 50 steps) and quality. Times are in seconds.

    strategy, compressor: after the last change
    ranks:      at the start
    steps:      that ended on every training rank (servers make none)
    stands_for: ranks that each recorded rank stands for; 1: all ranks are recorded
    examples_per_second: of all ranks together; None if unrecorded
    missing, unwritten: lost rows, and rows that the run directory lacks
    memory_peak: bytes of the rank with the highest peak; None if unrecorded
    """
    tl, now = run.timeline, list_stretches(run)[-1].settings
    first, stop = _trained_steps(tl)
    w = Window(tl, first, stop)
    seconds = w.step_seconds[w.usual | ~w.complete]  # other ranks count for a skipped step
    times = np.fmax.reduce(seconds, axis=1) if seconds.size else np.empty(0)
    times = times[~np.isnan(times)]
    sent, eps = bytes_per_step(tl, first, stop), examples_per_second(tl, *recent_steps(tl, RATE_STEPS))
    return {
        "name": run.name,
        "state": run.state,
        "strategy": _name_member(now.get("strategy")),
        "compressor": _name_member(now.get("compressor")),
        "ranks": int(run.settings.get("ranks") or len(ranks_of(tl.spans.rows()))),
        "stands_for": stands_for(tl),
        "steps": stop,
        "seconds": round(float(tl.spans.rows().t1.max(initial=0.0)), 3),
        "step_s": round(float(np.median(times)), 6) if len(times) else None,
        "examples_per_second": None if eps is None else round(float(eps) * stands_for(tl), 3),
        "bytes_per_step": float(sent.mean()) if sent.size else None,
        "memory_peak": max((m.peak for m in measure_memory(tl)), default=None),
        "loss": _mean_of_last(run, "loss", stop),
        "held_out": _newest_sample(run, "held_out"),
        "changes": len(run.changes),
        "missing": run.missing + int(_newest_sample(run, "dropped") or 0),
        "unwritten": run.unwritten,
        "warnings": [*run.warnings, *(str(detail.get("text", "")) for _, _, detail in run.details("warning"))],
    }


def _trained_steps(tl: Timeline) -> tuple[int, int]:
    """`[first, stop)` of the last steps that ended on every rank except servers."""
    first, stop = last_steps(tl, RATE_STEPS)
    if not (servers := serving_ranks(tl)):
        return first, stop
    rows = tl.spans.rows()
    ended = rows[rows.equal("lane", "step") & ~np.isin(rows.rank, servers)]
    if (since := newest_generation(tl)) is not None:
        ended = ended[np.isin(ended.rank, since.members) & (ended.t0 >= since.t)]
    furthest = [int(ended.step[ended.rank == rank].max()) for rank in ranks_of(ended)]
    stop = max(stop, min(furthest, default=-1) + 1)
    return max(0, stop - RATE_STEPS), stop


def summary_line(run: Run) -> str:
    """Returns the run in one line."""
    s = summarise_run(run)
    there = s["ranks"] // s["stands_for"]
    few = f" ({there} stand{'s' * (there == 1)} for all)" if s["stands_for"] > 1 else ""
    parts = [f"{s['strategy']}, {s['ranks']} ranks{few}, {s['steps']} steps in {s['seconds']:.1f} s ({s['state']})"]
    parts += [f"{1 / s['step_s']:.1f} steps/s"] if s["step_s"] else []
    parts += [f"held-out {s['held_out']:.3f}"] if s["held_out"] is not None else []
    parts += [f"{s['changes']} change{'s' * (s['changes'] != 1)}"] if s["changes"] else []
    parts += [f"{s['missing']} rows missing"] if s["missing"] else []
    parts += [f"{s['unwritten']} rows not on disk"] if s["unwritten"] else []
    return f"Run {run.name}: {', '.join(parts)}" + (f"; {run.holdup}" if run.holdup else "")


def _name_member(plain: Any) -> str:
    if not isinstance(plain, dict) or len(plain) != 1:
        return str(plain or "?")
    ((name, rest),) = plain.items()
    inner = rest.get("of") if isinstance(rest, dict) else None
    return f"{name}({_name_member(inner)})" if inner else str(name)


def _newest_sample(run: Run, name: str) -> float | None:
    rows = run.timeline.samples.rows()
    hit = np.flatnonzero(rows.equal("name", name)) if len(rows) else np.empty(0, np.int64)
    return float(rows.value[hit[-1]]) if len(hit) else None


def _mean_of_last(run: Run, name: str, stop: int) -> float | None:
    rows = run.timeline.samples.rows()
    hit = rows.equal("name", name) & (rows.step == stop - 1) if len(rows) else np.empty(0, bool)
    return float(rows.value[hit].mean()) if hit.any() else None
