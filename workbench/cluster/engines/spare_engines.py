"""Keeps spare engines warm, which the current run has not used, so that a new rank begins at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from workbench.cluster.engines import engine_server
from workbench.cluster.engines.cluster_state import ClusterState
from workbench.cluster.engines.engine_admission import find_start_obstacle, start_more_engines
from workbench.cluster.processes.supervised_thread import SupervisedThread
from workbench.settings.describe_error import text_of

POLL_INTERVAL = 0.5  # seconds
PAUSE_BETWEEN_STARTS = 3.0  # seconds for a new rank alone, before another spare starts
MAX_FAILURES = 3  # spares that fail or end unused, until no more are started
LOAD_TIMEOUT = 120.0  # seconds, for a rank's modules


class SpareEngines:
    """Keeps `count` engines of a cluster warm.

    list_used_ranks: returns ranks of engines that the present or the last run took
    trouble:         why spares are missing
    """

    def __init__(self, cluster: ClusterState, count: int) -> None:
        self.cluster, self.count = cluster, count
        self.list_used_ranks: Callable[[], Collection[int]] = lambda: range(cluster.ranks)
        self.trouble = ""
        self.warm_ranks: set[int] = set()
        self.end_event = threading.Event()
        self._missing_since: float | None = None
        self._failures = 0

    def start_watch(self) -> None:
        if self.count:
            SupervisedThread("spare engines", self._check_spares, self.end_event).start()

    def list_idle(self) -> list[int]:
        used, cluster = self.list_used_ranks(), self.cluster
        busy = {e.process_key for e in cluster.engines if e.rank in used}
        return [e.rank for e in cluster.engines if e.process_key not in busy and not cluster.describe_death(e.rank)]

    def _check_spares(self) -> None:
        lost = {
            rank for rank in self.warm_ranks if rank not in self.list_used_ranks() and self.cluster.describe_death(rank)
        }
        self._failures, self.warm_ranks = self._failures + len(lost), self.warm_ranks - lost
        missing = self.count - len(self.list_idle())
        if missing <= 0:
            self._missing_since = None
        elif self._failures >= MAX_FAILURES:
            self._note_trouble(f"{self._failures} of them ended before they were needed, or did not come up")
        elif self._missing_since is None:
            self._missing_since = time.monotonic()
        elif not self.warm_ranks or time.monotonic() - self._missing_since > PAUSE_BETWEEN_STARTS:
            self._add_spares(missing)
        self.end_event.wait(POLL_INTERVAL)

    def _add_spares(self, missing: int) -> None:
        if why := find_start_obstacle(self.cluster, missing):
            return self._note_trouble(why)
        try:
            for rank in start_more_engines(self.cluster, missing):
                self.cluster.call(self.cluster.engines[rank].id, engine_server.load_modules, timeout=LOAD_TIMEOUT)
                self.warm_ranks.add(rank)
        except Exception as error:
            self._failures += 1
            if not self.cluster.closed:
                self._note_trouble(text_of(error))
            return
        self.trouble = ""

    def _note_trouble(self, why: str) -> None:
        there = len(self.list_idle())
        self.trouble = f"spare={self.count}: {there} spare engines are up, and the lab starts no more: {why}"
