"""Tests that long-running processes regularly return freed memory of their allocators."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from tests import ranks
from tests.unit import synthetic
from widgets.charts.board import Board
from workbench.record import free_memory as tidy

THREAD = """
import threading, numpy as np
from pathlib import Path
from workbench.record.free_memory import release_free_memory, release_thread_memory

def own():
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("Anonymous")) / 1024

def works():
    np.arange(4_000_000.0)  # from now on what is smaller than its 32 MB is no stretch of its own
    for _ in range(2):
        before = own()
        for count, n in ((8, 700_000), (10, 500_000)):
            taken = [np.ones(n) for _ in range(count)]
            del taken
        release_free_memory()
        trimmed = own()
        release_thread_memory()
        print(trimmed - before, own() - before)

thread = threading.Thread(target=works)
thread.start()
thread.join()
"""


@pytest.mark.ranks
def test_each_rank_returns_memory_between_two_steps_after_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(tidy, "release_free_memory", lambda: given.append("back"))
    ranks.run(ranks.experiment(steps=3))
    assert not given
    monkeypatch.setattr(tidy.MemoryRelease.__init__, "__defaults__", (0.0,))
    ranks.run(ranks.experiment(steps=3))
    assert len(given) == 2 * 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it is about glibc")
def test_the_end_of_a_threads_own_heap_is_returned_too() -> None:
    said = subprocess.run([sys.executable, "-c", THREAD], capture_output=True, text=True, check=True).stdout.split()
    left = [float(mb) for mb in said[1::2]]
    assert len(left) == 2 and max(left) < 2, f"MB left by malloc_trim, and then: {said}"


def test_a_board_returns_its_charts_memory_on_the_drawing_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes a recorded run, which no other code looks after."""
    given: list[tuple[str, int]] = []  # a timer of another test's dashboard may add to it, on a thread of its own
    for name in ("release_free_memory", "release_thread_memory"):
        monkeypatch.setattr(tidy, name, lambda name=name: given.append((name, threading.get_ident())))
    monkeypatch.setattr("widgets.charts.board.READER_INTERVAL", 0.0)
    board = Board(synthetic.run("DDP", 2, 10))
    board._receive_message(None, {"kind": "hello", "page": "p"}, [])
    assert [name for name, thread in given if thread == threading.get_ident()] == [
        "release_free_memory",
        "release_thread_memory",
    ]
