"""A thread that survives errors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from workbench.settings.describe_error import said

PAUSE_AFTER_ERROR = 0.2  # seconds

_log = logging.getLogger(__name__)


class SupervisedThread:
    """Calls `poll()` until `end_event` is set, and then `finish()`. Logs an error and continues.

    report_error: called with each error; the log does not repeat a text
    """

    def __init__(
        self, name: str, poll: Callable[[], object], end_event: threading.Event,
        report_error: Callable[[BaseException], object] = lambda error: None,
        finish: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.poll, self.end_event, self.report_error, self.finish = poll, end_event, report_error, finish
        self._logged = ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> SupervisedThread:
        self._thread.start()
        return self

    def join(self, timeout: float) -> bool:
        """Returns whether the thread has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self.end_event.is_set():
            try:
                self.poll()
            except BaseException as error:  # nothing may end this thread
                self._note_error(error)
                self.end_event.wait(PAUSE_AFTER_ERROR)
        self.finish()

    def _note_error(self, error: BaseException) -> None:
        if (text := said(error)) != self._logged:
            self._logged = text
            _log.error("%s: one poll failed; polling goes on", self._thread.name, exc_info=error)
        try:
            self.report_error(error)
        except BaseException:
            _log.exception("%s: its report was not accepted", self._thread.name)
