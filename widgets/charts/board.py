"""The widget that shows all charts of a run, live or recorded. Only new rows are sent.

    board = Board(run)                 # or Board() and board.show(run) later
    refresh = RefreshTimer(board); refresh.start()

A page sends "hello" when it shows the board. It acknowledges each drawn message. The board sends only to pages. It
waits for the acknowledgement, so a slow browser has no backlog. After "hello" the page gets the run from its first
step. A reload also sends "hello". A page without plotly.js requests it once.
"""

from __future__ import annotations

import gzip
import importlib.resources
import threading
import time
from functools import cache
from typing import Any

import anywidget
import traitlets

from widgets.charts.feed import Feed, Message
from widgets.static import read_static
from widgets.views._base import Setter, View
from workbench.record.free_memory import READER_INTERVAL, MemoryRelease

_ELSEWHERE = 600.0  # seconds without a page for which a person still counts as watching
_SILENCE = 6.0  # seconds before a silent page is gone
_PATIENCE = 3.0  # seconds that an unacknowledged message delays the next
PAGE_JS = read_static("hearing.js", "chart.js", "panel.js", "pulse.js", "keys.js", "player.js", "board.js")
PAGE_CSS = read_static("board.css")


@cache
def plotly_js() -> bytes:
    """Returns plotly's own plotly.js, gzip-compressed."""
    source = importlib.resources.files("plotly").joinpath("package_data/plotly.min.js")
    return gzip.compress(source.read_bytes(), 6)


class Board(anywidget.AnyWidget):
    """All charts of one run as a DOM widget of its layout's whole width.

    run:    the Run to show (live or recorded), or None until `show`
    views:  the View classes to show; None: all
    setter: sets a knob of the run's lab (path, value), or None
    looks:  choices on a page: `tables` (open ones), `rank` (with highlighted curves), `pin` (a box of the timeline),
            `theme` ("light", "dark"; none: the page's own)

    A live run needs a `RefreshTimer`, which calls `send_news`.
    """

    _esm = PAGE_JS
    _css = PAGE_CSS
    looks = traitlets.Dict().tag(sync=True)

    def __init__(self, run: Any = None, *, views: tuple[type[View], ...] | None = None,
                 setter: Setter | None = None, **more: Any) -> None:  # fmt: skip
        self._lock = threading.RLock()
        self._kinds = views
        self._setter = setter
        self._run = run
        self.window: dict[str, Any] = {}  # {"at": the first step, "steps": number of steps}
        self._feed: Feed | None = None  # None: pages lack this run's charts
        self._pages: dict[str, float] = {}  # page -> last message
        self._waiting: set[str] = set()  # pages with an unacknowledged message
        self._heard = float("-inf")  # any page's last message
        self._number, self._sent_at = 0, 0.0
        self._tables: dict[str, float] = {}  # open tables -> when last sent
        self.woken = threading.Event()  # set after a page's message, for an earlier send
        self._tidy = MemoryRelease(READER_INTERVAL, own=True)  # this thread computes charts
        self.refreshing = False
        super().__init__(**more)
        self.on_msg(self._receive_message)

    @property
    def run(self) -> Any:
        return self._run

    def show(self, run: Any) -> None:
        """Shows another run. None keeps the present charts."""
        with self._lock:
            if run is self._run:
                return
            self._run, self._feed = run, None
            self.window.pop("at", None)
            self._waiting.clear()
        if self.looks.get("pin"):
            self.looks = {**self.looks, "pin": None}
        self._request_send()

    def look(self, looks: dict[str, Any], window: dict[str, Any]) -> None:
        with self._lock:
            self.looks, self.window, self._feed = looks, window, None
            self._waiting.clear()
        self._request_send()

    def draw_again(self) -> None:
        """Draws the run again after a change of the run next to it."""
        with self._lock:
            self._feed = None
            self._waiting.clear()
        self._request_send()

    @property
    def shown(self) -> bool:
        limit = time.monotonic() - _SILENCE
        with self._lock:
            self._pages = {page: at for page, at in self._pages.items() if at > limit}
            return bool(self._pages)

    @property
    def watched(self) -> bool:
        """Whether a page shows this board, or recently did."""
        return self.shown or time.monotonic() - self._heard < _ELSEWHERE

    def send_news(self) -> bool:
        """Sends new rows if a page is ready. Returns whether it sent."""
        self._tidy.due()
        with self._lock:
            if not self.shown or self._run is None or self._is_drawing:
                return False
            if self._feed is None:
                self._feed = Feed(self._run, self._kinds, self._setter)
                if self.window and (timeline := self._feed.find_view("timeline")):
                    timeline.ask(self.window)
                news: Message | None = self._feed.make_opening()
            else:
                news = self._feed.make_news()
            if news is None:
                return False
            self._number += 1
            self._waiting, self._sent_at = set(self._pages), time.monotonic()
            self.send({**news[0], "number": self._number, "tables": self._due_tables()}, news[1])
        return True

    def report_trouble(self, text: str) -> None:
        self.send({"kind": "trouble", "trouble": text})

    @property
    def _is_drawing(self) -> bool:
        return bool(self._waiting & set(self._pages)) and time.monotonic() - self._sent_at < _PATIENCE

    def _due_tables(self) -> dict[str, Any]:
        now, out = time.monotonic(), {}
        for name in [name for name, at in self._tables.items() if now - at >= 1.0]:
            self._tables[name] = now
            out[name] = self._feed.make_table(name) if self._feed else {}
        return out

    def _receive_message(self, _: Any, said: dict[str, Any], __: list[bytes]) -> None:
        page = str(said.get("page", ""))
        with self._lock:
            self._pages[page] = self._heard = time.monotonic()
            if said.get("kind") in ("hello", "here"):
                self.send({"kind": "alive"})  # else the page assumes that the kernel is gone
            match said.get("kind"):
                case "hello":
                    self._feed = None
                    self._waiting.clear()
                    self._tables.clear()
                case "plotly":
                    self.send({"kind": "plotly"}, [plotly_js()])
                case "ack":
                    if said.get("number") == self._number:
                        self._waiting.discard(page)
                case "away":
                    self._pages.pop(page, None)
                    self._waiting.discard(page)
                case "ask":
                    if self._feed and (view := self._feed.find_view(said["view"])):
                        view.ask(said["request"])
                        if view.tools:
                            self.window |= said["request"]
                case "table":
                    self._show_table(said["view"], said["open"])
        self._request_send()

    def _show_table(self, name: str, opened: bool) -> None:
        self._tables.pop(name, None)
        if opened and self._feed:
            self._tables[name] = time.monotonic()
            self.send({"kind": "tables", "tables": {name: self._feed.make_table(name)}})

    def _request_send(self) -> None:
        self.woken.set()
        if not self.refreshing:
            self.send_news()
