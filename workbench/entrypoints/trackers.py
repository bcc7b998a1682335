"""Sends the metrics of a run's steps to an experiment tracker while it trains.

    sink = log_to(run, "mlflow", project="wires")   # or "wandb", "trackio"; returns at once, and follows the run
    sink.wait()

A tracker is an optional package. If it fails, the sink ends with its message in `sink.error`, and the run continues.
`log_to` also sends earlier steps, so it works for a recorded run too.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np

from workbench.analysis.steps.settings import settings_words
from workbench.analysis.steps.window import Window, last_steps
from workbench.record.run import Run, RunError

POLL_INTERVAL = 2.0  # seconds between checks of a live run
MAX_BATCH_STEPS = 500  # steps per batch
SAMPLES = ("loss", "held_out", "lr")


class Tracker(Protocol):
    """A tracker's interface."""

    def log(self, rows: list[tuple[int, float, dict[str, float]]]) -> None:
        """Takes rows of step, seconds since 1970, and metrics by name."""

    def finish(self, well: bool) -> None: ...


class Sink:
    """Sends a run to a tracker from its own thread; `told` counts the steps sent."""

    def __init__(self, run: Run, tracker: Tracker) -> None:
        self.run, self.tracker = run, tracker
        self.told, self.error = 0, ""
        self._next = last_steps(run.timeline)[0]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="sink of a run", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the sink has sent the ended run, or has failed."""
        self._thread.join(timeout)

    def stop(self) -> None:
        """Sends the steps so far, then ends the sink."""
        self._stop.set()
        self._thread.join()

    def _follow(self) -> None:
        try:
            while True:
                ended = not self.run.live or self._stop.is_set()
                while found := self._fresh():
                    self.tracker.log(found)
                    self.told += len(found)
                if ended:
                    return self.tracker.finish(self.run.state not in ("preempted", "failed"))
                self._stop.wait(POLL_INTERVAL)
        except Exception as error:  # a foreign package must not stop training
            self.error = f"{type(error).__name__}: {error}"

    def _fresh(self) -> list[tuple[int, float, dict[str, float]]]:
        """Returns the next steps that have ended on every rank."""
        first, (begin, stop) = self._next, last_steps(self.run.timeline)
        first = max(first, begin)
        self._next = stop = min(stop, first + MAX_BATCH_STEPS)
        return list_metrics(self.run, first, stop) if stop > first else []


def list_metrics(run: Run, first: int, stop: int) -> list[tuple[int, float, dict[str, float]]]:
    """Returns (step, seconds since 1970, known metrics) for steps [first, stop). Metrics are means over ranks."""
    w, samples = Window(run.timeline, first, stop), run.timeline.samples.rows()
    ended = w.lane("step")
    rows = w.lane("comm")
    sent = w.sum_rows(rows, np.where(w.is_outside(rows), 0, rows.nbytes))
    by = {"step_seconds": w.step_seconds, "exposed_seconds": w.seconds("wait"), "bytes": sent}
    samples = samples[(samples.step >= first) & (samples.step < stop)] if len(samples) else samples
    out = []
    for i in np.flatnonzero(w.complete):
        step = int(w.steps[i])
        found = {name: float(matrix[i].mean()) for name, matrix in by.items()}
        for name in SAMPLES:
            here = samples.equal("name", name) & (samples.step == step)
            values = samples.value[here & np.isfinite(samples.value)]
            if len(values):
                found[name] = float(values.mean())
        out.append((step, run.epoch + float(ended.t1[ended.step == step].max()), found))
    return out


def log_to(run: Run, tracker: str, project: str = "training-workbench") -> Sink:
    """Sends `run` to "mlflow", "trackio" or "wandb", live or afterwards; returns at once.

    run:      a live or ended run
    tracker:  the tracker's name
    project:  the project or experiment at the tracker

    Raises RunError for an unknown tracker, or one that is not installed.
    """
    if tracker not in TRACKERS:
        raise RunError(f"tracker={str(tracker)[:60]!r}: must be one of {', '.join(TRACKERS)}")
    try:
        return Sink(run, TRACKERS[tracker](run, project))
    except ImportError:
        raise RunError(f"tracker={tracker}: is not installed; pip install {tracker}") from None


class MLflow:
    """A run of MLflow in the experiment `project`, stored by MLflow's own settings."""

    def __init__(self, run: Run, project: str) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._client = Metric, MlflowClient()
        known = self._client.get_experiment_by_name(project)
        home = known.experiment_id if known else self._client.create_experiment(project)
        self._id = self._client.create_run(home, run_name=run.name).info.run_id
        self._client.log_batch(self._id, params=[Param(k, v) for k, v in settings_words(run.settings).items()])

    def log(self, rows: list[tuple[int, float, dict[str, float]]]) -> None:
        said = [(name, value, int(t * 1e3), step) for step, t, found in rows for name, value in found.items()]
        every = [self._metric(*one) for one in said]
        for at in range(0, len(every), 1000):  # MLflow's limit per batch
            self._client.log_batch(self._id, metrics=every[at : at + 1000])

    def finish(self, well: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if well else "FAILED")


class Trackio:
    """A run of trackio in `project`."""

    def __init__(self, run: Run, project: str) -> None:
        import trackio

        self._run = trackio.init(project=project, name=run.name, config=settings_words(run.settings), embed=False)

    def log(self, rows: list[tuple[int, float, dict[str, float]]]) -> None:
        for step, _, found in rows:
            self._run.log(found, step=step)

    def finish(self, well: bool) -> None:
        self._run.finish()


class WandB:
    """A run of Weights & Biases in `project`; wandb's WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, run: Run, project: str) -> None:
        import wandb

        settings = settings_words(run.settings)
        self._run = wandb.init(project=project, name=run.name, config=settings, reinit="create_new")

    def log(self, rows: list[tuple[int, float, dict[str, float]]]) -> None:
        for step, _, found in rows:
            self._run.log(found, step=step)

    def finish(self, well: bool) -> None:
        self._run.finish(exit_code=0 if well else 1)


TRACKERS: dict[str, Any] = {"mlflow": MLflow, "trackio": Trackio, "wandb": WandB}
