"""Tests a rank's pulse, which reports standstills of its process and distinguishes a machine that slept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.waiting import until
from workbench.engine.record.stall_detector import (
    MIN_STALL_SECONDS,
    READING_INTERVAL,
    ClockReading,
    StallDetector,
    find_clock_gap,
)

BEFORE = ClockReading(running=100.0, asleep=3.0, cpu=10.0)
CODE = """
import sys
from workbench.engine.record.stall_detector import StallDetector
StallDetector(lambda found: print(found["seconds"], found["machine"], found["text"], flush=True), "pulse")
print("ready", flush=True)
sys.stdin.read()
"""


def after(running: float = READING_INTERVAL, asleep: float = 0.0, cpu: float = 0.1) -> dict[str, Any] | None:
    now = ClockReading(BEFORE.running + running, BEFORE.asleep + asleep, BEFORE.cpu + cpu)
    return find_clock_gap(BEFORE, now)


def test_a_slightly_late_beat_is_not_reported() -> None:
    assert after() is None and after(MIN_STALL_SECONDS) is None


def test_a_stopped_process_a_busy_interpreter_and_a_sleeping_machine_are_distinguished() -> None:
    stopped, busy, slept = after(5.5 + READING_INTERVAL), after(5.5 + READING_INTERVAL, cpu=5.0), after(asleep=40.0)
    assert stopped and stopped["text"] == "stood still for 5.5 s: its process was stopped, or got no processor"
    assert busy and "its own code held Python's interpreter" in busy["text"] and busy["seconds"] == 5.5
    assert slept == {"seconds": 40.0, "machine": True, "text": "this machine slept for 40 s"}


def test_a_slow_beat_is_not_reported_as_a_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    running, beats, said = [0.0], [0], list[dict[str, Any]]()
    monkeypatch.setattr(ClockReading, "read_clocks", lambda: ClockReading(running[0], 0.0, 0.0))

    def beat() -> None:
        running[0] += 60
        beats[0] += 1

    pulse = StallDetector(said.append, "pulse", beat)
    assert until(lambda: beats[0] > 2)
    pulse.close()
    assert said == []


def test_a_stopped_process_reports_the_duration() -> None:
    child = subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout and child.stdout.readline() == "ready\n"
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(4.5)
        os.kill(child.pid, signal.SIGCONT)
        seconds, machine, text = child.stdout.readline().split(" ", 2)
        assert float(seconds) > 3.5 and machine == "False" and text.startswith("stood still for ")
    finally:
        child.kill()
        child.communicate()
