"""What all tests share: a time limit for each mark, and the marks written into the report of `make test`."""

from __future__ import annotations

import signal

import pytest

# The slowest mark that a test carries decides after how many seconds it hangs for certain, also on a busy machine.
LIMITS = {"slow": 900, "long": 900, "browser": 450, "notebook": 360, "gpu": 360, "netns": 360, "engine": 240,
          "ranks": 180}  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marks = [mark for mark in LIMITS if item.get_closest_marker(mark)]
        item.user_properties.append(("marks", " ".join(marks) or "quick"))
        if marks and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(max(LIMITS[mark] for mark in marks)))


def pytest_configure() -> None:
    """Interrupts are heard, though a shell that starts the tests in the background has them ignored."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Numbers do not depend on how many cores are free."""
    import torch

    torch.set_num_threads(1)
