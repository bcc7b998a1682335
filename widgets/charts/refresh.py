"""The timer of a dashboard. It only sends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from widgets.charts.board import Board
from workbench.settings.describe_error import said


class RefreshTimer:
    """Ticks a board on its own thread at most `hz` times a second while a page shows it.

    also: functions to call as often; they may only set widget traits
    """

    def __init__(self, board: Board, *also: Callable[[], None], hz: float = 6.0) -> None:
        self.board = board
        self.also = also
        self.period = 1.0 / hz
        self.errors: list[str] = []  # each once; also shown on the page
        self._also_at = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._stop.clear()
            self.board.refreshing = True
            self._thread = threading.Thread(target=self._run_timer, name="dashboard refresh", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self.board.woken.set()
        self.board.refreshing = False
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _run_timer(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            if (early := due - time.monotonic()) > 0 and self._stop.wait(early):
                break
            self.board.woken.clear()
            if self._tick_once():
                due = max(due + self.period, time.monotonic() + 0.5 * self.period)
            else:  # looks again soon, or after a page's message
                self.board.woken.wait(0.5 * self.period if self.board.shown else 1.0)

    def _tick_once(self) -> bool:
        try:
            if (now := time.monotonic()) - self._also_at >= self.period:
                self._also_at = now
                for call in self.also:
                    call()
            return self.board.send_news()
        except Exception as error:
            text = f"The charts could not be updated: {said(error)}"
            if text not in self.errors and len(self.errors) < 10:
                self.errors.append(text)
                self.board.report_trouble(text)
            return False
