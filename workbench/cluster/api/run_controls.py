"""The methods of Lab that act on a live run.

Kill, freeze, thaw and preempt signal real processes, but only engines that this lab started.
"""

from __future__ import annotations

import signal
import time
from typing import Any

from workbench.cluster.engines.cluster import Cluster
from workbench.cluster.engines.rank_stacks import Stacks, gather_stacks
from workbench.cluster.processes.lab_place import ClusterError
from workbench.cluster.run.run_changes import PendingChange
from workbench.cluster.run.run_controller import RunController
from workbench.cluster.run.run_resize import resize_run
from workbench.record.checkpoint_request import PendingCheckpoint
from workbench.settings import KnobError


class RunControls:
    """The part of a Lab that acts on its run.

    rank:  the number of a rank that trains now. Another number raises KnobError
    """

    cluster: Cluster
    _live: RunController | None

    @property
    def live(self) -> bool:
        """Whether a run is under way."""
        return self._live is not None and not self._live.over.is_set()

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the ranks that train now. Empty without a live run."""
        return self._live.members if self.live and self._live else ()

    def pause(self) -> None:
        """Pauses all ranks at the next step boundary. Raises ClusterError if no run is live."""
        self._send_request("pause")

    def resume(self) -> None:
        """Continues a paused run. Raises ClusterError if no run is live."""
        self._send_request("resume")

    def step(self, n: int = 1) -> None:
        """Trains `n` steps, then pauses.

        n:  number of steps, 1 to 1,000,000

        Raises KnobError for another number. Raises ClusterError if no run is live.
        """
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 10**6:
            raise KnobError(f"n={n!r}: must be an integer in [1, 1000000] steps")
        self._send_request("step", n=n)

    def checkpoint(self) -> PendingCheckpoint:
        """Makes a permanent checkpoint at one of the next step boundaries, and returns at once.

        `lab.checkpoint().wait()` returns its path. Raises ClusterError if no run is live.
        """
        return PendingCheckpoint(self._require_run("checkpoint").run)

    def stop(self) -> None:
        """Stops the run at the next step boundary, and returns at once. A second call aborts the run.

        It takes at most 30 s, or 7 steps if a step takes longer than 3 s. Then the lab ends engines: see `notes`.
        """
        if self.live and self._live:
            self._live.stop()

    def abort(self) -> None:
        """Ends the run at once, in the middle of a step."""
        if self.live:
            self._require_run("abort").abort()

    def resize(self, ranks: int) -> PendingChange:
        """Changes the number of ranks at one of the next steps. Removes ranks or adds idle engines.

        A returning engine gets a new rank number. If too few are idle, the lab starts more on this machine, in some
        seconds; `Lab(spare=1)` keeps some warm. While a run starts, the call waits until its ranks train.

        ranks:  the new number of ranks

        Raises KnobError if the number is impossible. Raises ClusterError if engines do not come up. The run then
        continues unchanged.
        """
        return resize_run(self._require_run("resize"), ranks)

    def evict(self, *ranks: int, replace: bool = False) -> None:
        """Ends the engines of ranks that hang. The remaining ranks continue from the last boundary.

        ranks:    their numbers
        replace:  whether new ranks join

        Raises KnobError or ClusterError if the remaining ranks could not continue. The run then stays unchanged.
        """
        self._require_run("evict").evictions.evict_ranks(ranks, "as asked", replace)

    def stacks(self) -> Stacks:
        """Returns all Python stacks, by rank, to print. Takes some seconds if ranks do not answer."""
        cluster = self.cluster.wait()
        live = self._live if self.live else None
        found = gather_stacks(cluster, [e.rank for e in cluster.engines if live is None or e.rank in live.members])
        for rank in found if live else ():
            step, op = live.hang_monitor.find_place(rank) if live else (0, "")
            found[rank] = f"in {op or 'an unknown operation'} of step {step}\n{found[rank]}"
        return found

    # -- for teaching

    def kill(self, rank: int) -> None:
        """Kills a rank's engine, as a crash would. `on_death` decides what follows.

        Raises ClusterError if the lab did not start this engine.
        """
        self._inject_fault(rank, "kill", "was killed", signal.SIGKILL)

    def freeze(self, rank: int) -> None:
        """Stops a rank's process, as a hanging machine would, until `thaw`."""
        self._inject_fault(rank, "freeze", "was frozen", signal.SIGSTOP)

    def thaw(self, rank: int) -> None:
        """Continues a frozen rank."""
        self._inject_fault(rank, "thaw", "goes on", signal.SIGCONT)

    def preempt(self, rank: int, grace: float = 30.0) -> None:
        """Sends SIGTERM to a rank's engine, as Slurm or a spot instance does, and SIGKILL `grace` seconds later.

        The rank leaves after the current step, and the other ranks continue. The engine usually ends well before
        SIGKILL.

        grace:  seconds between the signals, 0 to 3600

        Raises KnobError for another `grace`. Raises ClusterError if the lab did not start this engine.
        """
        if isinstance(grace, bool) or not isinstance(grace, (int, float)) or not 0 <= grace <= 3600:
            raise KnobError(f"grace={grace!r}: must be a number in [0, 3600] seconds")
        self._inject_fault(rank, "preempt", f"was sent SIGTERM, {grace:g} s before it is killed", signal.SIGTERM)
        self.cluster.health.send_later(rank, signal.SIGKILL, grace)

    def _inject_fault(self, rank: int, what: str, said: str, by: int) -> None:
        live = self._require_run(what)
        if isinstance(rank, bool) or not isinstance(rank, int) or rank not in live.members:
            raise KnobError(f"rank={rank!r}: must be one of those that train now: {', '.join(map(str, live.members))}")
        if not live.cluster.health.is_own(live.cluster.engines[rank]):
            raise ClusterError(f"rank={rank}: its engine is gone, or was not started by this lab, which signals only "
                               f"its own")  # fmt: skip
        live.evictions.record_mark("asked", {"ranks": [rank], "text": f"rank {rank} {said}, as asked"}, besides=[rank])
        live.cluster.health.send_signal(rank, by)

    def _require_run(self, what: str) -> RunController:
        if not self.live or not self._live:
            raise ClusterError(f"{self!r}: there is no run to {what}; start one with lab.run()")
        return self._live

    def _send_request(self, kind: str, **rest: Any) -> None:
        self._require_run(kind).queue_command(
            "request", request={"id": f"{kind} {time.time_ns():x}", "kind": kind, **rest}
        )
