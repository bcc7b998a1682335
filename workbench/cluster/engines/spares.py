"""Keeps spare engines warm: living engines that the current run has not used. So a new rank begins at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from workbench.cluster.engines import engine_server
from workbench.cluster.engines.meeting import cannot_start, start_more
from workbench.cluster.engines.state import ClusterState
from workbench.cluster.processes.supervised_thread import SupervisedThread
from workbench.settings.describe_error import text_of

LOOK = 0.5  # seconds between checks
QUIET = 3.0  # seconds for a new rank alone, before another spare starts
TRIES = 3  # spares that may fail or end unused, before no more are started
WARM = 120.0  # seconds for an engine to load what a rank needs


class SpareEngines:
    """Keeps `count` engines of a cluster warm.

    used:    ranks of engines that the present or the last run took
    trouble: why spares are missing
    """

    def __init__(self, cluster: ClusterState, count: int) -> None:
        self.cluster, self.count = cluster, count
        self.used: Callable[[], Collection[int]] = lambda: range(cluster.ranks)
        self.trouble = ""
        self.warm: set[int] = set()
        self.over = threading.Event()
        self._lacking: float | None = None  # since when spares are missing
        self._failed = 0

    def start_watch(self) -> None:
        if self.count:
            SupervisedThread("spare engines", self._check_spares, self.over).start()

    def list_idle(self) -> list[int]:
        used, cluster = self.used(), self.cluster
        busy = {e.process_key for e in cluster.engines if e.rank in used}
        return [e.rank for e in cluster.engines if e.process_key not in busy and not cluster.describe_death(e.rank)]

    def _check_spares(self) -> None:
        lost = {rank for rank in self.warm if rank not in self.used() and self.cluster.describe_death(rank)}
        self._failed, self.warm = self._failed + len(lost), self.warm - lost
        missing = self.count - len(self.list_idle())
        if missing <= 0:
            self._lacking = None
        elif self._failed >= TRIES:
            self._note_trouble(f"{self._failed} of them ended before they were needed, or did not come up")
        elif self._lacking is None:
            self._lacking = time.monotonic()
        elif not self.warm or time.monotonic() - self._lacking > QUIET:
            self._add_spares(missing)
        self.over.wait(LOOK)

    def _add_spares(self, missing: int) -> None:
        if why := cannot_start(self.cluster, missing):
            return self._note_trouble(why)
        try:
            for rank in start_more(self.cluster, missing):
                self.cluster.call(self.cluster.engines[rank].id, engine_server.load_modules, timeout=WARM)
                self.warm.add(rank)
        except Exception as error:
            self._failed += 1
            if not self.cluster.closed:
                self._note_trouble(text_of(error))
            return
        self.trouble = ""

    def _note_trouble(self, why: str) -> None:
        there = len(self.list_idle())
        self.trouble = f"spare={self.count}: {there} spare engines are there, and no more are started: {why}"
