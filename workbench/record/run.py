"""Run: an experiment, its timeline and its environment. Live, recorded and simulated runs are the same class.

Opens without torch; `experiment` alone needs it. Knows no processes: whoever trains hands rows to `append`. What people
ask of a run besides its data (`workbench.run.Run`) is made of these.
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
hearers: list[Callable[[Any], Any]] = []  # each is given every run that a lab or `simulate` begins


class Standing(NamedTuple):
    """Where a rank of a live run is, since how many seconds, and whether only other ranks can end that."""

    rank: int
    step: int
    op: str
    waits: bool
    seconds: float


class Control(Protocol):
    """What a live run is steered by; a Lab provides it.

    holdup: which ranks hold the run up right now, in words; standing: where every rank is
    """

    @property
    def holdup(self) -> str: ...

    @property
    def standing(self) -> list[Standing]: ...

    def profile(self, rank: int, steps: int) -> Path: ...

    def wait(self, timeout: float | None = None) -> Any: ...

    def stop(self) -> Any: ...

    def keep(self) -> Any: ...

    def saved(self, path: Path, rows: int) -> Any: ...


class Run:
    """What happened when an experiment was run, as far as it got.

    `spans`, `samples` and `marks` are pandas frames; `timeline` is the same, for reading while it grows.
    `live` says whether rows still come; `missing` how many are known to be lost; `unwritten` how many of those that are
    here its run directory lacks (`save` writes them elsewhere); `warnings` what else is wrong.

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
        self.parent: dict[str, Any] = dict(parent or {})  # "checkpoint", "step" and "run" that it went on from
        self.secret = ""  # in a riddle: what is said in place of verdicts and faults, until it is answered
        self.beside: Run | None = None  # another run, which views set beside this one
        self.missing = self.unwritten = self.duplicates = 0
        self.warnings: tuple[str, ...] = ()
        self._environment = dict(environment or {})
        self._control: Control | None = None
        self._following: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()
        self._frames: dict[str, pd.DataFrame] = {}

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """The run recorded in a run directory; also one whose ranks were killed, or still write."""
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
        store.give_back()
        run.missing, run.warnings = loaded.missing + int(about.get("missing") or 0), loaded.warnings
        run.warnings += tuple(str(detail.get("text", "")) for _, _, detail in run.details("memory grows"))
        return run

    def save(self, path: Path | str | None = None) -> Path:
        """Makes the run directory (`path`, or the run's own) with run.json and the rows that are there.

        A live run has none yet: its ranks spool into the directory. Saved elsewhere while it is under way it stays
        where it is, and what is there so far is copied; `lab.notes` say so. `Run.open` reads either. Raises RunError
        where it cannot be kept.
        """
        where = Path(path or self.path or self.name)
        about = {"experiment": self.settings, "environment": self._environment, "epoch": self.epoch}
        about |= {"parent": self.parent} if self.parent else {}
        lost = {"missing": self.missing} if self.missing else {}
        rows = store.keep(where, {**about, "started": self.started, "name": self.name, **lost}, self.timeline)
        if not (self.live and self.path):
            self.path, self.unwritten = where, 0
        if self._control:
            self._control.saved(where, rows)
        return where

    # -- rows come in

    def append(self, kind: str, rank: int, seq: int, columns: Mapping[str, Any]) -> int:
        """Adds rows of one rank; `seq` is the number of the first of them in that rank's table of that kind.

        Rows seen before are dropped, rows that never came are counted in `missing`. Returns how many were new.
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

    # -- what it shows

    @property
    def spans(self) -> pd.DataFrame:
        return self._frame("spans")

    @property
    def samples(self) -> pd.DataFrame:
        return self._frame("samples")

    @property
    def marks(self) -> pd.DataFrame:
        return self._frame("marks")

    def _frame(self, kind: str) -> pd.DataFrame:
        table = self.timeline.table(kind)
        if kind not in self._frames or len(self._frames[kind]) != len(table):
            self._frames[kind] = table.frame()
        return self._frames[kind]

    @property
    def settings_today(self) -> dict[str, Any]:
        """`settings` by the names that they have now, where they have others; what nobody here knows stays."""
        try:
            from workbench.experiment import Experiment
        except ImportError:  # without torch no member can be asked
            return dict(self.settings)
        now = dict(self.settings)
        for k in knobs(Experiment):
            if k.family and k.name in now:
                with contextlib.suppress(KnobError, TypeError):  # a Task of one's own is not in the record
                    now[k.name] = to_plain(from_plain(now[k.name], k.family, k.name))
        return now

    @property
    def experiment(self) -> Experiment:
        """The experiment that the run began with. Needs torch, as its tasks do."""
        if self._experiment is None:
            from workbench.experiment import Experiment

            self._experiment = Experiment.read(self.settings)
        return self._experiment

    @property
    def changes(self) -> tuple[Change, ...]:
        """The knobs that were set, as data, in order."""
        said = [(step, d) for step, _, d in self.details("change") if {"path", "value"} <= d.keys()]
        counts = once([d for _, d in said])
        return tuple(Change.read(d, step) for (step, d), count in zip(said, counts, strict=True) if count)

    def details(self, name: str, rank: int | None = None) -> list[tuple[int, float, dict[str, Any]]]:
        """(step, t, detail) of every mark called `name`, in order of time."""
        return [(step, t, detail) for by, step, t, _, detail in self.said(name) if rank in (None, by)]

    def said(self, *names: str) -> list[tuple[int, int, float, str, dict[str, Any]]]:
        """(rank, step, t, name, detail) of every mark that is called so, in order of time."""
        rows = self.timeline.marks.rows()
        rows = rows[np.logical_or.reduce([rows.equal("name", name) for name in names])]
        columns = rows.rank.tolist(), rows.step.tolist(), rows.t.tolist(), list(rows.name), list(rows.detail)
        found = sorted(zip(*columns, strict=True), key=lambda row: row[2])
        return [(*row, _read(detail)) for *row, detail in found]

    @property
    def environment(self) -> dict[str, Any]:
        """Where it ran: versions and machine, and under "ranks" what each rank said of itself."""
        rows = self.timeline.marks.rows()
        rows = rows[rows.equal("name", "start")]
        said = {int(r): _read(d) for r, d in zip(rows.rank, rows.detail, strict=True)}
        return {**self._environment, **({"ranks": dict(sorted(said.items()))} if said else {})}

    @property
    def state(self) -> str:
        """starting, running, paused, stopping, or one of `FINAL`; or "cut off": recorded without an end."""
        said = self.details("state")
        last = str(said[-1][2].get("state")) if said else "starting"
        return last if self.live or last in FINAL else "cut off"

    @property
    def holdup(self) -> str:
        """Which ranks of a live run are stalled while others wait for them, in words; "" if none does."""
        return self._control.holdup if self.live and self._control else ""

    @property
    def standing(self) -> list[Standing]:
        """Where every rank of a live run is, as it was known a second ago at most; of any other run nothing."""
        return self._control.standing if self.live and self._control else []

    # -- steering a live one

    def profile(self, rank: int = 0, steps: int = 5) -> Path:
        """The next `steps` steps of `rank` are recorded operator by operator, by torch.profiler, while the run goes on.

        Returns where the Chrome trace will be: beside the run, on the rank's host. A Mark "profile" says when it is
        there. The other ranks do nothing for it. Raises KnobError, and RunError where the run is not live.
        """
        if not self.live or self._control is None:
            raise RunError(f"{self!r}: it is not live, and torch.profiler records steps while they are made")
        return self._control.profile(rank, steps)

    def wait(self, timeout: float | None = None) -> Any:
        """Waits until a live run ends; a recorded one has."""
        return self._control.wait(timeout) if self._control else None

    def stop(self) -> Any:
        """Asks a live run to stop at the next step boundary."""
        return self._control.stop() if self._control else None

    def keep(self) -> Any:
        """Asks a live run for a checkpoint at the next step boundary."""
        return self._control.keep() if self._control else None

    @property
    def made(self) -> int:
        """How many steps were made, as far as it shows: one more than the number of the last that has ended."""
        rows = self.timeline.spans.rows()
        ended = rows[rows.equal("lane", "step")] if len(rows) else rows  # an evaluation stands before a next step
        return int(ended.step.max()) + 1 if len(ended) else 0

    def __repr__(self) -> str:
        return f"Run {self.name}: {self.state}"


def _read(detail: str) -> dict[str, Any]:
    """A mark's detail; empty where a hand-made record holds something else."""
    try:
        found = json.loads(detail)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
