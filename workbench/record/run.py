"""A live, recorded or simulated run: experiment, timeline and environment.

Only `experiment` needs torch. `workbench.run.Run` adds the analyses.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np

from workbench.record import store
from workbench.record.marks import once
from workbench.record.store import RunError as RunError
from workbench.record.timeline import Timeline
from workbench.settings import Change, KnobError, from_plain, knobs, short, to_plain

if TYPE_CHECKING:
    import pandas as pd

    from workbench.experiment import Experiment

FINAL = ("done", "stopped", "preempted", "failed")
hearers: list[Callable[[Any], Any]] = []  # called with every run that a lab or `simulate` begins


class Standing(NamedTuple):
    """The present operation of a live rank.

    rank, step: its number, and its present step
    op:         the operation, such as "backward" or "all_reduce"
    waits:      whether only other ranks can end it
    seconds:    since it began
    """

    rank: int
    step: int
    op: str
    waits: bool
    seconds: float


class Control(Protocol):
    """Controls a live run; by Lab.

    holdup:   the ranks that delay the run now, in words
    standing: every rank's present operation
    """

    @property
    def holdup(self) -> str: ...

    @property
    def standing(self) -> list[Standing]: ...

    def profile(self, rank: int, steps: int) -> Path: ...

    def wait(self, timeout: float | None = None) -> Any: ...

    def stop(self) -> Any: ...

    def request_checkpoint(self) -> Any: ...

    def note_saved(self, path: Path, rows: int) -> Any: ...


class Run:
    """The record of an experiment's run so far.

    spans, samples, marks: pandas frames
    experiment:  the settings at the start
    timeline:    the same rows, readable while they grow
    environment: versions and machine
    name:        for people
    path:        the run directory. None: not on disk
    started:     date and time of the start in UTC, as ISO 8601 text
    epoch:       the start in seconds since 1970
    live:        whether rows still arrive
    parent:      "checkpoint", "step" and "run" of the origin if it continues another run
    missing:     number of rows known to be lost
    unwritten:   number of rows that the run directory lacks; `save` writes them elsewhere
    warnings:    other problems

    >>> Run({"strategy": {"LocalSGD": {"every": 8}}, "ranks": 2}, name="tour")
    Run tour: cut off
    """

    def __init__(
        self,
        experiment: Experiment | Mapping[str, Any],
        *,
        timeline: Timeline | None = None,
        environment: Mapping[str, Any] | None = None,
        name: str = "run",
        path: Path | str | None = None,
        started: str = "",
        epoch: float = 0.0,
        live: bool = False,
        parent: Mapping[str, Any] | None = None,
    ) -> None:
        self._experiment = None if isinstance(experiment, Mapping) else experiment
        self.settings: dict[str, Any] = dict(experiment) if isinstance(experiment, Mapping) else experiment.plain()
        self.timeline = timeline or Timeline()
        self.name = name
        self.path = Path(path) if path else None
        self.started = started or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.epoch = epoch
        self.live = live
        self.parent: dict[str, Any] = dict(parent or {})  # "checkpoint", "step" and "run" of the origin
        self.secret = ""  # in a riddle: hides verdicts and faults until it is solved
        self.beside: Run | None = None  # another run, shown next to this one
        self.missing = self.unwritten = self.duplicates = 0
        self.warnings: tuple[str, ...] = ()
        self._environment = dict(environment or {})
        self._control: Control | None = None
        self._following: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()
        self._frames: dict[str, pd.DataFrame] = {}

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Opens the run in a run directory, even if its ranks were killed or still write.

        Old names of settings stay as they were written; `experiment` maps them to the present ones.

        path:  the run directory

        Raises RunError if it cannot be read.
        """
        if not isinstance(path, str | Path) or not str(path) or "\0" in str(path):
            raise RunError(f"path={short(path)}: must be a run directory, such as 'runs/first'")
        path = Path(path)
        about = store.about(path)
        name, started = str(about.get("name") or path.name), str(about.get("started") or "")
        run = cls(about["experiment"], environment=about.get("environment"), name=name, path=path,
                  parent=about.get("parent"))  # fmt: skip
        run.started, run.epoch = started, float(about["epoch"])
        loaded = store.read(path)
        run.timeline, run._following = loaded.timeline, loaded.following
        store.release_free_memory()
        run.missing, run.warnings = loaded.missing + int(about.get("missing") or 0), loaded.warnings
        run.warnings += tuple(str(detail.get("text", "")) for _, _, detail in run.details("memory grows"))
        return run

    def save(self, path: Path | str | None = None) -> Path:
        """Writes a run directory with run.json and the present rows. Returns its path.

        Elsewhere, a live run copies its rows so far and keeps its directory (see `lab.notes`).

        path:  the run directory. None: the run's own

        Raises RunError if writing fails.
        """
        where = Path(path or self.path or self.name)
        about = {"experiment": self.settings, "environment": self._environment, "epoch": self.epoch}
        about |= {"parent": self.parent} if self.parent else {}
        lost = {"missing": self.missing} if self.missing else {}
        rows = store.keep(where, {**about, "started": self.started, "name": self.name, **lost}, self.timeline)
        if not (self.live and self.path):
            self.path, self.unwritten = where, 0
        if self._control:
            self._control.note_saved(where, rows)
        return where

    # -- append rows

    def append(self, kind: str, rank: int, seq: int, columns: Mapping[str, Any]) -> int:
        """Adds rows of one rank. Returns the number of new rows.

        Drops known rows and counts lost rows in `missing`.

        kind:     the table: "spans", "samples" or "marks"
        rank:     the rank that recorded them
        seq:      the first row's number in that rank's table, from 0
        columns:  arrays or lists of equal length by column
        """
        n = len(columns["rank"])
        with self._lock:
            expected = self._following.get((kind, rank), 0)
            known = min(max(expected - seq, 0), n)
            self.duplicates += known
            self.missing += max(seq - expected, 0)
            self._following[kind, rank] = max(expected, seq + n)
            if known:
                columns = {k: v[known:] for k, v in columns.items()}
            if n > known:
                self.timeline.table(kind).extend(columns)
        return n - known

    # -- read

    @property
    def spans(self) -> pd.DataFrame:
        """Operations with a duration: a row per Span. Times are seconds since the run began."""
        return self._frame("spans")

    @property
    def samples(self) -> pd.DataFrame:
        """Numbers at a time, such as losses: a row per Sample."""
        return self._frame("samples")

    @property
    def marks(self) -> pd.DataFrame:
        """Events, such as changes and faults: a row per Mark."""
        return self._frame("marks")

    def _frame(self, kind: str) -> pd.DataFrame:
        table = self.timeline.table(kind)
        if kind not in self._frames or len(self._frames[kind]) != len(table):
            self._frames[kind] = table.frame()
        return self._frames[kind]

    @property
    def settings_today(self) -> dict[str, Any]:
        """`settings` under their current names. Unknown settings stay."""
        try:
            from workbench.experiment import Experiment
        except ImportError:  # members need torch
            return dict(self.settings)
        now = dict(self.settings)
        for k in knobs(Experiment):
            if k.family and k.name in now:
                with contextlib.suppress(KnobError, TypeError):  # a user's own Task may lack its code
                    now[k.name] = to_plain(from_plain(now[k.name], k.family, k.name))
        return now

    @property
    def experiment(self) -> Experiment:
        """The experiment at the run's start. Needs torch for its tasks."""
        if self._experiment is None:
            from workbench.experiment import Experiment

            self._experiment = Experiment.read(self.settings)
        return self._experiment

    @property
    def changes(self) -> tuple[Change, ...]:
        """All applied changes in order, by people and by policies."""
        said = [(step, d) for step, _, d in self.details("change") if {"path", "value"} <= d.keys()]
        counts = once([d for _, d in said])
        return tuple(Change.read(d, step) for (step, d), count in zip(said, counts, strict=True) if count)

    def details(self, name: str, rank: int | None = None) -> list[tuple[int, float, dict[str, Any]]]:
        """Returns `(step, t, detail)` of every mark with this name, in order of time.

        name:  the mark's name, such as "change"
        rank:  the rank that recorded it. None: any

        `t` is in seconds since the run began. `detail` is a dict.
        """
        return [(step, t, detail) for by, step, t, _, detail in self.said(name) if rank in (None, by)]

    def said(self, *names: str) -> list[tuple[int, int, float, str, dict[str, Any]]]:
        """Returns `(rank, step, t, name, detail)` of every mark with these names, in order of time.

        names:  one or more names of marks
        """
        rows = self.timeline.marks.rows()
        rows = rows[np.logical_or.reduce([rows.equal("name", name) for name in names])]
        columns = rows.rank.tolist(), rows.step.tolist(), rows.t.tolist(), list(rows.name), list(rows.detail)
        found = sorted(zip(*columns, strict=True), key=lambda row: row[2])
        return [(*row, _read(detail)) for *row, detail in found]

    @property
    def environment(self) -> dict[str, Any]:
        """Versions and machine. "ranks" has each rank's report."""
        rows = self.timeline.marks.rows()
        rows = rows[rows.equal("name", "start")]
        said = {int(r): _read(d) for r, d in zip(rows.rank, rows.detail, strict=True)}
        return {**self._environment, **({"ranks": dict(sorted(said.items()))} if said else {})}

    @property
    def state(self) -> str:
        """`starting`, `running`, `paused`, `stopping`, one of `FINAL`, or "cut off" (without an end)."""
        said = self.details("state")
        last = str(said[-1][2].get("state")) if said else "starting"
        return last if self.live or last in FINAL else "cut off"

    @property
    def holdup(self) -> str:
        """The stalled ranks that delay a live run, or ""."""
        return self._control.holdup if self.live and self._control else ""

    @property
    def standing(self) -> list[Standing]:
        """Every live rank's operation at most a second ago; else empty."""
        return self._control.standing if self.live and self._control else []

    # -- control a live run

    def profile(self, rank: int = 0, steps: int = 5) -> Path:
        """Records the next `steps` steps of `rank` by operator with torch.profiler. The run goes on.

        Returns the future path of the Chrome trace, next to the run on the rank's host. A Mark "profile" announces it.

        rank:   the rank to record
        steps:  number of steps

        Raises RunError if the run is not live. Raises KnobError for an invalid argument.
        """
        if not self.live or self._control is None:
            raise RunError(f"{self!r}: is not live; torch.profiler can record only a live run")
        return self._control.profile(rank, steps)

    def wait(self, timeout: float | None = None) -> Any:
        """Waits until a live run ends.

        timeout:  seconds to wait. None: no limit

        Raises RankError if a rank failed. Raises TimeoutError after `timeout`; the run then goes on.
        """
        return self._control.wait(timeout) if self._control else None

    def stop(self) -> Any:
        """Asks a live run to stop at the next step boundary."""
        return self._control.stop() if self._control else None

    def keep(self) -> Any:
        """Asks a live run for a checkpoint at the next step boundary."""
        return self._control.request_checkpoint() if self._control else None

    @property
    def made(self) -> int:
        """The number of completed steps."""
        rows = self.timeline.spans.rows()
        ended = rows[rows.equal("lane", "step")] if len(rows) else rows  # an evaluation has the next step's number
        return int(ended.step.max()) + 1 if len(ended) else 0

    def __repr__(self) -> str:
        return f"Run {self.name}: {self.state}"


def _read(detail: str) -> dict[str, Any]:
    """Returns a mark's detail; {} for another type."""
    try:
        found = json.loads(detail)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
