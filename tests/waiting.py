"""Waits for effects of other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENT = 120.0  # seconds; only a failing test waits so long, also on a busy machine


def until(condition: Callable[[], Any], seconds: float = PATIENT) -> bool:
    """Returns whether `condition` came true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
