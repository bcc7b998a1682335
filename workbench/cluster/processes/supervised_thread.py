"""A thread that survives errors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from workbench.settings.describe_error import said

PAUSE_AFTER_ERROR = 0.2  # seconds

_log = logging.getLogger(__name__)


class SupervisedThread:
    """Calls `look()` until `over` is set, and then `last()`. Logs an error and continues.

    said: called with each error; the log does not repeat a text
    """

    def __init__(
        self, name: str, look: Callable[[], object], over: threading.Event,
        said: Callable[[BaseException], object] = lambda error: None, last: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.look, self.over, self.said, self.last = look, over, said, last
        self._logged = ""
        self._thread = threading.Thread(target=self._go, name=name, daemon=True)

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

    def _go(self) -> None:
        while not self.over.is_set():
            try:
                self.look()
            except BaseException as error:  # nothing may end this thread
                self._tell(error)
                self.over.wait(PAUSE_AFTER_ERROR)
        self.last()

    def _tell(self, error: BaseException) -> None:
        if (text := said(error)) != self._logged:
            self._logged = text
            _log.error("%s: one poll failed; polling goes on", self._thread.name, exc_info=error)
        try:
            self.said(error)
        except BaseException:
            _log.exception("%s: its report was not accepted", self._thread.name)
