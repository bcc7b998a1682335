"""Waiting for what other threads and processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENT = 120.0  # seconds: others may keep the machine busy, and a test that passes waits for none of them


def until(condition: Callable[[], Any], seconds: float = PATIENT) -> bool:
    """Whether `condition` came true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
