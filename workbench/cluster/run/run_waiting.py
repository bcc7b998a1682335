"""Waits for a run at a prompt, with progress and interrupts."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from workbench.cluster.processes.lab_place import ClusterError
from workbench.cluster.run.run_state import RunState
from workbench.settings.progress import doing, seen

if TYPE_CHECKING:
    from workbench.record.run import Run

STOP_TIMEOUT = 60.0  # seconds that a new run waits for the last
POLL_INTERVAL = 0.05  # seconds


def wait_for_stop(live: RunState, patience: float = STOP_TIMEOUT) -> None:
    """Waits until a stopped run is over. Raises ClusterError after `patience` s."""
    with doing(f"waiting for {live.run.name} to stop"):
        if not live.over.wait(patience):
            raise ClusterError(
                f"the run {live.run.name} was asked to stop and is not over after {patience:g} s: "
                f"{live.describe_ranks()}; wait longer with lab.run_now.wait(), or end it at once with lab.abort()"
            )


def wait_for_start(live: RunState) -> None:
    """Waits until the ranks train, or the run is over. The run's own start has a time limit."""
    while live.state == "starting" and not live.over.wait(POLL_INTERVAL):
        pass


def wait_for_run(live: RunState, timeout: float | None = None) -> Run:
    """Waits until the run is over. Returns it, or raises its error.

    The first interrupt stops the run at the next step boundary, the second aborts it. Raises TimeoutError if the run is
    not over in time; it then continues.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    with _make_progress(live) as line:
        while not live.over.is_set():
            try:
                _show_progress(live, line)
                live.over.wait(0.2)
                if deadline is not None and time.monotonic() > deadline and not live.over.is_set():
                    raise TimeoutError(f"the run is not over after {timeout:g} s; it goes on (step {live.step})")
            except KeyboardInterrupt:
                if live.state == "stopping":
                    live.abort()
                    live.over.wait(3.0)
                    raise
                live.stop()
                line.set_postfix_str("stopping at the next step; interrupt again to abort")
        _show_progress(live, line)
    if live.run.unwritten and threading.current_thread() is threading.main_thread():
        print(f"workbench: {live.hang_monitor.record_monitor.last_note}", file=sys.stderr)
    if live.error:
        raise live.error
    return live.run


def _make_progress(live: RunState) -> Any:
    """Returns a progress line that includes earlier steps and time."""
    total, first = live.changes.experiment.steps or None, int(live.run.parent.get("step", 0))
    line = tqdm(total=total, initial=first, unit="step", desc=live.run.name, leave=True, disable=not seen())
    line.n = line.last_print_n = max(first, live.steps_done)
    line.start_t = live.run.epoch
    return line


def _show_progress(live: RunState, line: Any) -> None:
    line.update(max(live.steps_done - line.n, 0))
    if live.state != "stopping":
        text = live.cluster.progress if live.state == "starting" else live.state
        text = text if live.loss is None else f"{text}, loss {live.loss:.3f}"
        line.set_postfix_str(f"{text}; {live.hang_monitor.holdup}" if live.hang_monitor.holdup else text)
