"""Summarises traces of another job, one line per rank."""

from __future__ import annotations

import numpy as np

from workbench import analysis
from workbench.record.run import Run


def summarise_traces(run: Run) -> list[str]:
    """Returns each rank's step time, and how much of its communication compute hides."""
    first, stop = analysis.last_steps(run.timeline)
    found, times = analysis.measure_overlap(run.timeline, first, stop), analysis.step_times(run.timeline)
    steps = max(stop - first, 1)
    out = []
    for rank, share, exposed, mine in zip(found.ranks, found.share, found.exposed, times.seconds.T, strict=True):
        known = mine[~np.isnan(mine)]
        step = f"{1e3 * np.median(known):.4g} ms per step" if len(known) else "no whole step"
        hides = "no communication" if share != share else (
            f"{share:.1%} of its communication behind compute, {1e3 * exposed / steps:.3g} ms per step exposed"
        )  # fmt: skip
        out.append(f"rank {rank}: {step}, {hides}")
    return out
