"""Detects a memory leak: a rank's memory on the host that grows evenly."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

SKIPPED_STEPS = 4  # they allocate much that stays
MIN_INTERVAL = 0.004  # seconds between 2 readings, at least
MAX_READINGS = 256  # at this number every second reading is deleted
BLOCK_COUNT = 8  # equal parts of the readings; their medians must rise evenly
MIN_GROWTH_MB = 64.0  # the least growth that is reported
MAX_UNEVENNESS = 3.0  # each block must rise by the mean rise, times or divided by this at most
MIN_LATE_SHARE = 0.8  # the last 3 rises must be at least this share of the first 3
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def read_host_mb() -> float:
    """Returns the MB of this process's resident memory without mapped files."""
    try:
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
        return (int(resident) - int(shared)) * PAGE_BYTES / 1e6
    except OSError:
        return float(psutil.Process().memory_info().rss) / 1e6


def find_growth(steps: np.ndarray, mb: np.ndarray) -> tuple[float, float] | None:
    """Returns (MB per step, total MB) if memory rises evenly over these readings, else None.

    steps, mb: (n,), in order. One jump, or growth that slows down, does not count. Memory that is freed only after the
    last reading looks like a leak.
    """
    if len(steps) < 2 * BLOCK_COUNT:
        return None
    parts = np.array_split(np.arange(len(steps)), BLOCK_COUNT)
    middles = np.array([np.median(mb[part]) for part in parts])
    at = np.array([np.median(steps[part]) for part in parts])
    rises, mean = np.diff(middles), (middles[-1] - middles[0]) / (BLOCK_COUNT - 1)
    grown, passed = float(middles[-1] - middles[0]), float(at[-1] - at[0])
    if (
        grown < MIN_GROWTH_MB
        or passed <= 0
        or (rises < mean / MAX_UNEVENNESS).any()
        or (rises > mean * MAX_UNEVENNESS).any()
    ):
        return None
    if rises[-3:].sum() < MIN_LATE_SHARE * rises[:3].sum():  # a cache or an allocator fills
        return None
    return grown / passed, float(mb[-1] - mb[0])


class LeakDetector:
    """tell: called once, with the detail of a Mark; read: returns the process's MB"""

    def __init__(self, rank: int, tell: Callable[[dict[str, Any]], None], read: Callable[[], float] = read_host_mb,
                 clock: Callable[[], float] = time.monotonic) -> None:  # fmt: skip
        self.rank, self.report_leak, self.read_mb, self.clock = rank, tell, read, clock
        self._steps: list[int] = []
        self._mb: list[float] = []
        self._step_count, self._step_interval, self._has_reported, self._last_reading = 0, 1, False, float("-inf")

    def take_reading(self, step: int) -> None:
        """The rank calls it after each step."""
        self._step_count += 1
        if (
            self._has_reported
            or self._step_count <= SKIPPED_STEPS
            or self._step_count % self._step_interval
            or self.clock() - self._last_reading < MIN_INTERVAL
        ):
            return
        self._last_reading = self.clock()
        self._steps.append(step)
        self._mb.append(self.read_mb())
        if len(self._steps) >= MAX_READINGS:
            del self._steps[::2], self._mb[::2]
            self._step_interval *= 2
        if len(self._steps) % BLOCK_COUNT == 0:
            self._judge_growth()

    def _judge_growth(self) -> None:
        steps, mb = np.array(self._steps), np.array(self._mb)
        half = len(steps) // 2
        if found := find_growth(steps, mb) or find_growth(steps[half:], mb[half:]):
            each, grown = found
            text = (f"rank {self.rank}'s memory grows by {each:.3g} MB a step on its host, {grown:.0f} MB so far; look "
                    f"for what the code keeps from step to step")  # fmt: skip
            self._has_reported = True
            self.report_leak({"rank": self.rank, "mb_per_step": round(each, 4), "mb": round(grown, 1), "text": text})
