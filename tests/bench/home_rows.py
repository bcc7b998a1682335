"""Regimes, rows and their trials: what each method tries by one common rule, and where numbers are kept.

A regime is a task on ranks and a network with its faults. A row is one method in it with its tuning grid: at most MOST
trials of three seeds each. If the best value is at the edge of an axis, one value beyond that edge is tried. The best
then runs with seeds that no choice depended on. This module knows neither the claims nor the page.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.bench.cells import Cell, reached
from workbench.compressors import Compressor
from workbench.experiment import Experiment
from workbench.fabric import Fabric, TransientStraggler
from workbench.policies import PolicyBase
from workbench.settings import Knob, find, knobs
from workbench.strategies import Strategy
from workbench.tasks import Digits, TaskBase

SEEDS, FRESH = (0, 1, 2), (10, 11, 12, 13, 14)  # seeds for tuning, and for the winner
MOST = 12  # trials of a row before its grid is widened
Trial = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Regime:
    """The conditions under which methods are compared.

    words: the page's description of it
    goal:  the held-out loss that times are measured to and rows are tuned by; 0: rows are tuned by the final loss
    after: steps of DDP at the task's own rate that come before, with the same seed
    real:  real tensors; else sizes only, and rows are tuned by their pace
    looks: evaluations of a run
    """

    name: str
    words: str
    task: TaskBase
    ranks: int = 4
    steps: int = 300
    fabric: Fabric = Fabric()
    goal: float = 0.0
    after: int = 0
    real: bool = True
    looks: int = 20
    batch: int = 0

    def seeded(self, seed: int) -> tuple[TaskBase, Fabric]:
        """Returns the task and the network, with shards and faults that depend on the seed."""
        skewed = isinstance(self.task, Digits) and self.task.shards != "iid"
        task = replace(self.task, shard_seed=seed) if skewed else self.task
        faults = tuple(replace(f, seed=seed) if isinstance(f, TransientStraggler) else f for f in self.fabric.faults)
        return task, replace(self.fabric, faults=faults)

    def score(self, found: Mapping[str, Any]) -> tuple[float, float]:
        """Returns the tuning score; less is better. If neither row reaches the goal, the loss decides."""
        if "refused" in found:
            return math.inf, math.inf
        if not self.real:
            return -float(found["samples_per_s"]), 0.0
        loss = float(found["curve"][-1][2])
        loss = loss if math.isfinite(loss) else math.inf
        seconds = reached(found["curve"], self.goal) if self.goal else None
        return (math.inf if seconds is None else seconds, loss) if self.goal else (loss, 0.0)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method in a regime.

    axes:  values by setting: "rate" in multiples of the task's learning rate, "bucket_mb", a knob of the strategy
           by its name, one of the policy or of the compressor as "policy.decay", "codec.density"
    fixed: knobs of the strategy that are not tuned because the claim is about them
    policy, codec: as plain data, {"TopK": {}}
    """

    regime: Regime
    method: str
    axes: Mapping[str, Sequence[Any]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    codec: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The row's name on the page."""
        inside = ", ".join(f"{k}={v}" for k, v in self.fixed.items())
        more = [next(iter(plain)) for plain in (self.codec, self.policy) if plain]
        return " with ".join([f"{self.method}({inside})" if inside else self.method, *more])

    @property
    def name(self) -> str:
        return f"{self.regime.name}: {self.label}"

    def trials(self) -> list[Trial]:
        """Returns the grid with all combinations."""
        return [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())]

    def cell(self, trial: Trial, seed: int) -> Cell:
        """Returns the run of a trial with a seed."""
        r = self.regime
        own = {k: v for k, v in trial.items() if k not in ("rate", "bucket_mb") and "." not in k}
        task, fabric = r.seeded(seed)
        each = {"policy": self.policy, "codec": self.codec}
        turned: dict[str, Any] = {
            room: {name: {**usual, **{k.partition(".")[2]: v for k, v in trial.items() if k.startswith(f"{room}.")}}}
            for room, plain in each.items() for name, usual in plain.items()
        }  # fmt: skip
        steps = r.after + r.steps
        return Cell(
            part="home", row=self.name, where=words(trial), seed=seed, method=self.method,
            knobs={**self.fixed, **own}, task=task, fabric=fabric, ranks=r.ranks, steps=steps, after=r.after,
            every=max(1, steps // r.looks) if r.real else 0, rate=trial.get("rate", 1.0), real=r.real, batch=r.batch,
            bucket_mb=trial.get("bucket_mb", 1.0), **turned,
        )  # fmt: skip

    def knob(self, axis: str) -> Knob | None:
        """Returns the knob of an axis; None for the learning rate."""
        if axis == "rate":
            return None
        if axis == "bucket_mb":
            return next(k for k in knobs(Experiment) if k.name == axis)
        room, _, name = axis.rpartition(".")
        base: type = {"policy": PolicyBase, "codec": Compressor}.get(room, Strategy)
        member = next(iter(getattr(self, room))) if room else self.method
        return next(k for k in knobs(find(base, member)) if k.name == name)

    def beyond(self, axis: str, value: Any) -> Any:
        """Returns the next value past an edge of an axis; None inside or for an axis without numbers."""
        values = sorted(self.axes[axis]) if all(type(v) in (int, float) for v in self.axes[axis]) else []
        if len(values) < 2 or value not in (values[0], values[-1]):
            return None
        knob, near = self.knob(axis), values[1] if value == values[0] else values[-2]
        further = value * value / near if (knob is None or knob.log) and near else 2 * value - near
        if knob is None:
            return further
        further = min(max(further, knob.low or 0.0), math.inf if knob.high is None else knob.high)
        further = round(further) if knob.kind is int else round(further, 6)
        return None if further == value else further


def words(trial: Mapping[str, Any]) -> str:
    """Formats a trial: rate 2, every 8."""
    return ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in trial.items()) or "as usual"


class Book:
    """The measurements: a file per row, a line of JSON per cell. A later line of a cell wins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lines: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}

    def path(self, row: Row) -> Path:
        return self.folder / (re.sub(r"[^\w.]+", "-", row.name).strip("-") + ".jsonl")

    def line(self, row: Row, trial: Trial, seed: int) -> dict[str, Any] | None:
        """Returns the kept line of a cell."""
        path = self.path(row)
        if row.name not in self._lines:
            lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
            self._lines[row.name] = {(told(at["trial"]), at["seed"]): at for at in lines}
        return self._lines[row.name].get((told(trial), seed))

    def found(self, row: Row, trial: Trial, seeds: Iterable[int]) -> list[dict[str, Any]] | None:
        """Returns the results of a trial for each seed; None if one is missing."""
        lines = [self.line(row, trial, seed) for seed in seeds]
        return None if None in lines else [line["found"] for line in lines if line]

    def keep(self, row: Row, trial: Trial, seed: int, found: Mapping[str, Any], **more: Any) -> None:
        """Appends a cell's line."""
        self.line(row, trial, seed)
        self.folder.mkdir(parents=True, exist_ok=True)
        line = {"trial": trial, "seed": seed, **more, "found": short(found)}
        with self.path(row).open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._lines[row.name][told(trial), seed] = line

    def kept(self, row: Row) -> list[dict[str, Any]]:
        """Returns all lines of a row."""
        self.line(row, {}, 0)
        return list(self._lines[row.name].values())

    def renew(self, row: Row, lines: Iterable[Mapping[str, Any]]) -> None:
        """Rewrites a row's file with new lines for some of its cells."""
        self.line(row, {}, 0)
        self._lines[row.name].update({(told(line["trial"]), line["seed"]): dict(line) for line in lines})
        texts = [json.dumps(line, separators=(",", ":")) for line in self._lines[row.name].values()]
        self.path(row).write_text("".join(f"{text}\n" for text in texts))

    def lines(self) -> list[dict[str, Any]]:
        """Returns all lines of all rows."""
        paths = sorted(self.folder.glob("*.jsonl"))
        return [json.loads(text) for path in paths for text in path.read_text().splitlines()]


def told(trial: Mapping[str, Any]) -> str:
    return json.dumps(trial, sort_keys=True)


def short(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a run that are kept."""
    kept = ("refused", "samples_per_s", "bytes", "largest", "synced", "curve", "accuracy")
    return {k: found[k] for k in kept if k in found}


# -- tuning --


def mean_score(row: Row, found: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    first, then = zip(*(row.regime.score(f) for f in found), strict=True)
    return statistics.fmean(first), statistics.fmean(then)


def best(row: Row, book: Book, trials: Iterable[Trial]) -> Trial:
    """Returns the best of trials whose seeds are all measured."""
    return min(trials, key=lambda t: mean_score(row, book.found(row, t, SEEDS) or [{"refused": ""}]))


def wider(row: Row, chosen: Trial) -> list[Trial]:
    """Returns one trial beyond each edge at which the best of the grid lies."""
    return [{**chosen, axis: next_} for axis in row.axes if (next_ := row.beyond(axis, chosen[axis])) is not None]


def tried(row: Row, book: Book) -> list[Trial]:
    """Returns the trials that a row needs so far: the grid, and its widening once the grid is complete."""
    first = row.trials()
    if any(book.found(row, trial, SEEDS) is None for trial in first):
        return first
    return [*first, *wider(row, best(row, book, first))]


def winner(row: Row, book: Book) -> Trial | None:
    """Returns the best trial; None while one is missing."""
    trials = tried(row, book)
    return None if any(book.found(row, t, SEEDS) is None for t in trials) else best(row, book, trials)


def needs(row: Row, book: Book, there: Callable[[Row, Trial, int], bool]) -> list[tuple[Row, Trial, int]]:
    """Returns the next cells of a row: the grid's, then beyond its edges, then the winner's other seeds."""
    for trials in (row.trials(), tried(row, book)):
        if todo := [(row, t, seed) for t in trials for seed in SEEDS if not there(row, t, seed)]:
            return todo
    chosen = winner(row, book)
    return [(row, chosen, seed) for seed in FRESH if not there(row, chosen, seed)] if chosen is not None else []
