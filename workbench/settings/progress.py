"""Progress of long work at the prompt and on dashboards.

    with doing("planning", total=len(pairs)) as work:
        for pair in pairs:
            ...
            work.step()

Work on the main thread that lasts over `DELAY_BEFORE_BAR` seconds draws a bar in a notebook or at a terminal.
Dashboards list `under_way`. A nested block on the same thread counts as part of the outer one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DELAY_BEFORE_BAR = 2.0  # seconds before progress is shown
UPDATE_INTERVAL = 0.1  # seconds between two updates of the bar

_every: list[Doing] = []
_lock = threading.Lock()
_mine = threading.local()


class Doing:
    """One piece of work under way.

    total: its number of parts; or None
    usual: seconds that work without parts took last time; or None
    """

    def __init__(self, what: str, total: float | None, usual: float | None, within: Doing | None = None) -> None:
        self.what, self.total, self.usual, self.within = what, total, usual, within
        self.done = 0.0
        self.inner: Doing | None = None
        self.began = time.monotonic()
        self._line: Any = None
        self._shown = self._most = 0.0

    def step(self, parts: float = 1.0) -> None:
        self.at(self.done + parts)

    def at(self, done: float) -> None:
        self.done = done
        self.tell()

    def tell(self) -> None:
        outer = self
        while outer.within is not None:
            outer = outer.within
        outer._tell()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def share(self) -> float | None:
        """The share done from 0 to 1; None if unknown."""
        if not self.total:
            return min(self.seconds / self.usual, 0.99) if self.usual else None
        part = (self.inner.share or 0.0) if self.inner is not None else 0.0
        self._most = max(self._most, min(1.0, (self.done + part) / self.total))
        return self._most

    @property
    def to_go(self) -> float | None:
        """Seconds to go at the present speed; None if unknown."""
        share = self.share
        if self.usual and not self.total:
            return max(self.usual - self.seconds, 1.0)
        return self.seconds * (1 - share) / share if share else None

    def _tell(self) -> None:
        if self._line is not None and time.monotonic() - self._shown > UPDATE_INTERVAL and self.share is not None:
            self._shown = time.monotonic()
            self._line.n = round(self.share, 4)
            self._line.update(0)  # redraws the bar when due

    def __repr__(self) -> str:
        share = self.share
        parts = [self.what, "" if share is None else f"{share * 100:.0f} % done", left(self.to_go)]
        return ", ".join(filter(None, parts))


@contextmanager
def doing(what: str, total: float | None = None, usual: float | None = None) -> Iterator[Doing]:
    """Shows `what` as under way until the block ends. See Doing."""
    outer: Doing | None = getattr(_mine, "now", None)
    work = Doing(what, total, usual, outer)
    _mine.now = work
    if outer is not None:
        outer.inner = work
    else:
        with _lock:
            _every.append(work)
        work._line = _line(what)
    try:
        yield work
    finally:
        _mine.now = outer
        if outer is not None:
            outer.inner = None
        else:
            with _lock:
                _every.remove(work)
            if work._line is not None:
                work._line.n = work._line.total  # else a notebook keeps a red bar
                work._line.close()


def under_way() -> list[Doing]:
    """Returns this process's work of over `DELAY_BEFORE_BAR` seconds. The oldest comes first."""
    with _lock:
        return [work for work in _every if work.seconds > DELAY_BEFORE_BAR]


def left(seconds: float | None) -> str:
    """Returns the time to go as text; "" if unknown.

    >>> left(0.4), left(34.2), left(130), left(7300), left(None)
    ('1 s to go', '34 s to go', '2 min 10 s to go', '2 h 2 min to go', '')
    """
    if seconds is None or seconds > 1e7:
        return ""
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s to go"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s to go"
    hours, minutes = divmod(round(whole / 60), 60)
    return f"{hours} h {minutes} min to go"


def seen() -> bool:
    """Whether a user sees this thread's output: main thread in a notebook or at a terminal."""
    in_notebook = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)() is not None
    here = threading.current_thread() is threading.main_thread()
    return here and (in_notebook or sys.stderr.isatty())


def _line(what: str) -> Any:
    """Returns a bar that appears after `DELAY_BEFORE_BAR` seconds; None if nobody sees it."""
    if not seen():
        return None
    from tqdm.auto import tqdm

    bar = "{desc}: {percentage:3.0f}%|{bar}| {elapsed} gone, {remaining} to go"
    return tqdm(total=1.0, desc=what, delay=DELAY_BEFORE_BAR, leave=False, bar_format=bar)
