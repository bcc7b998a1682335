"""Processes that a run's threads start, such as DataLoader workers. They end with the run."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

TERM_TIMEOUT = 2.0  # seconds from SIGTERM to SIGKILL

_runs: dict[int, ChildProcesses] = {}  # by the run's thread id


class ChildProcesses:
    """One rank's child processes, without those that a `%%px` cell starts: they go on."""

    def __init__(self) -> None:
        self._started: list[BaseProcess] = []

    @contextmanager
    def collect_started(self) -> Iterator[None]:
        patch_process_start()
        _runs[threading.get_ident()] = self
        try:
            yield
        finally:
            del _runs[threading.get_ident()]

    def end(self) -> None:
        """Ends the daemonic ones. Other processes outlive the run, as their starter chose."""
        left = _list_living(self._started)
        if left:
            _shut_down_loaders({process.pid for process in left})
        for process in (left := _list_living(left)):
            process.terminate()
        for process in left:
            process.join(TERM_TIMEOUT)
        for process in _list_living(left):
            process.kill()
            process.join(TERM_TIMEOUT)
        self._started.clear()


def _list_living(processes: list[BaseProcess]) -> list[BaseProcess]:
    return [process for process in processes if process.daemon and process.is_alive()]


def _shut_down_loaders(pids: set[int | None]) -> None:
    """torch reports a worker that just ends as a failure, so this shuts down the iterators that own these worker pids.

    A DataLoader with persistent workers starts new ones when it is read again.
    """
    loaders, iterators = [], {}
    for one in gc.get_objects():
        if type(one) is _MultiProcessingDataLoaderIter and pids & {w.pid for w in one._workers}:
            iterators[id(one)] = one
        elif issubclass(type(one), DataLoader):  # isinstance would run the object's own code
            loaders.append(one)
    for loader in loaders:
        if id(getattr(loader, "_iterator", None)) in iterators:
            loader._iterator = None
    for iterator in iterators.values():
        iterator._shutdown_workers()


@cache
def patch_process_start() -> None:
    """Starts to collect the processes of runs' threads. Other threads are not affected."""
    BaseProcess.start = _wrap_start(BaseProcess.start)  # type: ignore[method-assign, assignment]


def _wrap_start(start: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(start)
    def noted(self: Any) -> None:
        start(self)
        run = _runs.get(threading.get_ident())
        if run is not None:
            run._started.append(self)

    return noted
