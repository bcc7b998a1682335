"""What all tests share: a time limit for each mark, and the marks written into the report of `make test`."""

from __future__ import annotations

import signal
from collections import defaultdict
from pathlib import Path
from zlib import crc32

import pytest

from tests.run_all import says

# The slowest mark that a test carries decides after how many seconds it hangs for certain, also on a busy machine.
LIMITS = {"slow": 900, "long": 900, "every": 900, "browser": 900, "notebook": 900, "gpu": 360, "netns": 600,
          "engine": 600, "ranks": 400}  # fmt: skip
# Of a test's cases on real ranks `make test` runs one in so many, and at least one; of the others `make test-long` and
# CI run one in so many, and the rest is run with EVERY=1.
ONE_IN, ONE_LATER = 8, 64
# Of the tests that take seconds each people wait for one in so many. Of the others `make test-long` and CI run four in
# five of those with engines or a browser, one in five of those on ranks that are threads of one process, and all
# lessons; EVERY=1 runs the rest.
ONE_OF = 6
LATER = {**dict.fromkeys(("engine", "browser", "notebook"), pytest.mark.slow), "ranks": pytest.mark.long}
REST = {"engine": {5}, "browser": {5}, "notebook": set[int](), "ranks": {1, 3, 4, 5}}  # of the numbers 1 to 5

collect_ignore = ["scripts_ddp"]  # scripts for torchrun: what tests run, and not what they are


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
    for item, mark in later:  # when it hangs for certain is known by then: not later than before
        item.add_marker(mark)


def put_off(item: pytest.Item) -> pytest.MarkDecorator | None:
    """The mark of those whom this test is left to, if people need not wait for it. Its name chooses."""
    marks = [mark for mark in LIMITS if item.get_closest_marker(mark)]
    number = crc32(item.nodeid.partition("[")[0].encode()) % ONE_OF
    if not marks or set(marks) - set(LATER) or not number:
        return None
    if all(number in REST[mark] for mark in marks):
        return pytest.mark.every
    return next(mark for name, mark in LATER.items() if name in marks)


def left_for_later(items: list[pytest.Item]) -> list[tuple[pytest.Item, pytest.MarkDecorator]]:
    """The cases that people need not wait for, of tests that do not choose by themselves (see tests/thinned.py).

    A case's own name chooses, so that hardly any other does when a family gets another member.
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
            later += [(item, pytest.mark.every if n % ONE_LATER else pytest.mark.long) for n, item in enumerate(left)]
    return later


def pytest_configure() -> None:
    """Interrupts are heard, though a shell that starts the tests in the background has them ignored."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Numbers do not depend on how many cores are free."""
    import torch

    from workbench.tasks import byte_gpt

    torch.set_num_threads(1)
    byte_gpt.HELD_OUT = 16
