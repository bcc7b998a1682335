"""Answers where a live run's ranks are, and profiles one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cluster.processes.lab_place import ClusterError
from workbench.record.run import Standing
from workbench.settings import KnobError

if TYPE_CHECKING:
    from workbench.cluster.engines.cluster import Cluster
    from workbench.cluster.observe.hang_monitor import HangMonitor


class RunQuestions:
    """Answers a RunController's questions."""

    hang_monitor: HangMonitor
    cluster: Cluster
    members: tuple[int, ...]

    @property
    def holdup(self) -> str:
        """The ranks that hold the run up, or ""."""
        return self.hang_monitor.holdup

    @property
    def standing(self) -> list[Standing]:
        """Every rank's place, at most one second old."""
        table = self.hang_monitor.table
        return [Standing(r, s.step, s.op, s.waits, s.stalled_seconds) for r, s in sorted(table.items())
                if r in self.members]  # fmt: skip

    def profile(self, rank: int, steps: int) -> Path:
        """Returns the trace path of the next `steps` steps of `rank`. See `engine/record/step_profiler.py`."""
        if isinstance(rank, bool) or rank not in self.members:
            raise KnobError(f"rank={rank!r}: must be one of those that train now: {', '.join(map(str, self.members))}")
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 1000:
            raise KnobError(f"steps={steps!r}: must be an integer in [1, 1000] steps")
        trace = self.cluster.rpc.ask_rank(rank, "profile", steps=steps)[0]
        if not isinstance(trace, str):
            raise ClusterError(f"rank={rank}: it is not training; start a run with lab.run()")
        return Path(trace)
