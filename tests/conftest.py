"""Shared by all tests: a time limit for each mark, and the marks in the report of `make test`."""

from __future__ import annotations

import signal
from collections import defaultdict
from pathlib import Path
from zlib import crc32

import pytest

from tests.run_all import says

# Seconds after which a test certainly hangs, also on a busy machine. The slowest of its marks decides.
LIMITS = {"slow": 900, "long": 900, "every": 900, "browser": 900, "notebook": 900, "gpu": 360, "netns": 600,
          "engine": 600, "ranks": 400}  # fmt: skip
# Of a test's cases on real ranks, `make test` runs one in ONE_IN, and at least one. Of the remaining cases, `make
# test-long` and CI run one in ONE_LATER, and at least one if they ran none otherwise; EVERY=1 runs all.
ONE_IN, ONE_LATER = 8, 64
# Of the tests that take seconds each, `make test` runs one in ONE_OF, and of the lessons one in ONE_LESSON_OF. Of the
# remaining tests, `make test-long` and CI run 80 % with engines or a browser, 20 % with ranks on threads, and all
# lessons. EVERY=1 runs all.
ONE_OF, ONE_LESSON_OF = 6, 12
LATER = {**dict.fromkeys(("engine", "browser", "notebook"), pytest.mark.slow), "ranks": pytest.mark.long}
REST = {"engine": {5}, "browser": {5}, "notebook": set[int](), "ranks": {1, 3, 4, 5}}  # of the numbers 1 to 5

collect_ignore = ["scripts_ddp"]  # scripts for torchrun: tests run them, and they contain no tests


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item, mark in left_for_later(items):
        item.add_marker(mark)
    later = [(item, mark) for item in items if (mark := put_off(item))]
    texts: dict[Path, str] = {}
    for item in items:
        marks = [mark for mark in LIMITS if item.get_closest_marker(mark)]
        if marks and item.path not in texts:
            texts[item.path] = item.path.read_text("utf8")
        if hidden := [mark for mark in marks if not says(texts[item.path], mark)]:
            raise pytest.UsageError(f"{item.nodeid} is marked {hidden[0]}, which its file does not say: "
                                    f"tests/run_all.py does not find it then")  # fmt: skip
        item.user_properties.append(("marks", " ".join(marks) or "quick"))
        if marks and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(max(LIMITS[mark] for mark in marks)))
    for item, mark in later:  # the timeout is set by now; the later mark must not change it
        item.add_marker(mark)


def put_off(item: pytest.Item) -> pytest.MarkDecorator | None:
    """Returns the mark that leaves this test to `make test-long` or EVERY=1, if any. Its name decides."""
    marks = [mark for mark in LIMITS if item.get_closest_marker(mark)]
    number = crc32(item.nodeid.partition("[")[0].encode()) % (ONE_LESSON_OF if "notebook" in marks else ONE_OF)
    if not marks or set(marks) - set(LATER) or not number:
        return None
    if all(number in REST[mark] for mark in marks):
        return pytest.mark.every
    return next(mark for name, mark in LATER.items() if name in marks)


def left_for_later(items: list[pytest.Item]) -> list[tuple[pytest.Item, pytest.MarkDecorator]]:
    """Returns cases to leave out of `make test`, for tests that do not choose themselves (see tests/thinned.py).

    A case's own name decides, so hardly any other case changes when a family gets another member.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("ranks"):
            cases[item.nodeid.partition("[")[0]].append(item)
    later = []
    for each in cases.values():
        if not any(item.get_closest_marker(mark) for item in each for mark in ("long", "every")):
            each.sort(key=lambda item: crc32(item.nodeid.partition("[")[2].encode()))
            left = each[-(-len(each) // ONE_IN) :]
            seen = put_off(each[0]) != pytest.mark.every  # CI runs a case of this test in any event
            later += [(item, pytest.mark.every if n % ONE_LATER else pytest.mark.long)
                      for n, item in enumerate(left, int(seen))]  # fmt: skip
    return later


def pytest_configure() -> None:
    """Restores SIGINT, which a shell that starts the tests in the background ignores."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Makes numbers independent of how many cores are free."""
    import torch

    from workbench.tasks import byte_gpt

    torch.set_num_threads(1)
    byte_gpt.HELD_OUT = 16
