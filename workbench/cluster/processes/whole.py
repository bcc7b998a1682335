"""What is done whole or not at all, whenever the kernel is interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def whole() -> Iterator[None]:
    """An interrupt that comes inside is heard at the end; a second one at once, for somebody does not want to wait."""
    before: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # interrupts come to the main thread only, and where nobody hears them
        return
    came: list[tuple[int, Any]] = []

    def hear(number: int, frame: Any) -> None:
        came.append((number, frame))
        if len(came) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])
