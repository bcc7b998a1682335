"""Captures prints, warnings and log messages of a rank's training threads, by their names' prefix.

Other output goes its usual way, such as that of `%%px` and of forked children, which lack the thread that records.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

MAX_LINES_PER_SECOND = 40  # lines captured each second; further lines are counted
MAX_LINE_LENGTH = 4000  # characters kept of a line

Sink = Callable[[str, str], None]


class OutputCapture:
    """Diverts the output of threads called `prefix...` to `sink(stream, text)`, line by line."""

    def __init__(self, prefix: str, sink: Sink) -> None:
        self.prefix = prefix
        self.sink = sink
        self._pid = os.getpid()
        self._second, self._captured_count, self._skipped_count = 0, 0, 0
        self._lock = threading.Lock()

    def is_captured(self) -> bool:
        name = threading.current_thread().name
        return name.startswith(self.prefix) and not name.endswith("recorder") and os.getpid() == self._pid

    def hand_on(self, stream: str, text: str) -> None:
        """Passes one line on, up to the limit per second."""
        with self._lock:
            if (now := int(time.monotonic())) != self._second:
                left, self._second, self._captured_count, self._skipped_count = self._skipped_count, now, 0, 0
                if left:
                    self._hand_on(stream, f"... {left} more lines in that second")
            if self._captured_count >= MAX_LINES_PER_SECOND:
                self._skipped_count += 1
                return
            self._captured_count += 1
        self._hand_on(stream, text)

    def _hand_on(self, stream: str, text: str) -> None:
        try:
            self.sink(stream, text[:MAX_LINE_LENGTH])
        except Exception:  # noqa: S110 (a print must never stop the training)
            pass

    def end_lines(self) -> None:
        """Passes on text without a newline, before a session's record closes."""
        for split in self._splits:
            split.end_lines()

    def __enter__(self) -> OutputCapture:
        self._splits = [_SplitStream(self, "stdout", sys.stdout), _SplitStream(self, "stderr", sys.stderr)]
        sys.stdout, sys.stderr = self._splits
        self._usual_show, warnings.showwarning = warnings.showwarning, self._capture_warning  # type: ignore[assignment]
        self._handler = _LogHandler(self)
        logging.getLogger().addHandler(self._handler)
        return self

    def __exit__(self, *rest: object) -> None:
        self.end_lines()
        logging.getLogger().removeHandler(self._handler)
        warnings.showwarning = self._usual_show
        for name in ("stdout", "stderr"):
            if isinstance(ours := getattr(sys, name), _SplitStream):
                setattr(sys, name, ours.usual_stream)

    def _capture_warning(self, message: Any, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        if self.is_captured():
            self.hand_on("warning", f"{category.__name__}: {message} ({filename}:{lineno})")
        else:
            self._usual_show(message, category, filename, lineno, *rest)


class _SplitStream:
    """Sends the training's lines to the capture, other text to the usual stream."""

    def __init__(self, capture: OutputCapture, name: str, usual: Any) -> None:
        self.capture, self.name, self.usual_stream = capture, name, usual
        self._unfinished_lines: dict[threading.Thread, str] = {}  # without a newline yet, at most LONGEST characters

    def write(self, text: str) -> int:
        if not self.capture.is_captured():
            return self.usual_stream.write(text)
        self.end_lines(only_ended=True)
        me = threading.current_thread()
        *lines, rest = (self._unfinished_lines.pop(me, "") + text).split("\n")
        if rest:
            self._unfinished_lines[me] = rest[:MAX_LINE_LENGTH]
        for line in lines:
            self.capture.hand_on(self.name, line)
        return len(text)

    def end_lines(self, only_ended: bool = False) -> None:
        """Passes on begun lines of all threads, or only of ended ones."""
        for thread in list(self._unfinished_lines):
            if not (only_ended and thread.is_alive()) and (text := self._unfinished_lines.pop(thread, "")):
                self.capture.hand_on(self.name, text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if not self.capture.is_captured():
            self.usual_stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.usual_stream, name)


class _LogHandler(logging.Handler):
    """Captures the training's log records; leaves other threads to logging."""

    def __init__(self, capture: OutputCapture) -> None:
        super().__init__()
        self.capture = capture
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if self.capture.is_captured():
            try:
                text = self.format(record)
            except Exception:  # as in any logging handler
                return self.handleError(record)
            self.capture.hand_on("log", text)
        elif (last := logging.lastResort) and logging.getLogger().handlers == [self] and record.levelno >= last.level:
            last.handle(record)
