"""Calibration: reads the fields of Costs from the record of a run, as medians over undisturbed steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from workbench.analysis.steps.collectives import Arrivals, lined_up
from workbench.analysis.steps.window import MEASURING, Window, last_steps, ranks_of
from workbench.experiment import Experiment
from workbench.fabric import traffic
from workbench.fabric.load import stretch
from workbench.record.run import Run
from workbench.settings import fold
from workbench.sim.costs.durations import PHASES, AlphaBeta, Duration
from workbench.sim.costs.measure_codecs import By, measure_slowdown, price_codecs
from workbench.sim.costs.measure_own import price_coders, price_flops, price_requests
from workbench.sim.costs.prices import solve_not_negative

UNTYPICAL_STEPS = 2  # at the beginning and after a change
OUTLAST_FACTOR = 3.0  # a transfer that takes this many times the Link's time counts as longer
MIN_COLLECTIVES = 20  # with longer transfers for an estimate, at least
MAX_STEPS = 200  # per median; more only cost time


def measure_costs(run: Run) -> dict[str, Any]:
    """Raises ValueError if the run has too few steps."""
    about = _RecordedSteps(run)
    durations = {phase: about.measure_durations(phase) for phase in PHASES}
    codec, beside = about.measure_codecs()
    rest = {
        "wire": about.fit_wire_price(),
        "late": about.measure_lateness(),
        "between": about.measure_other_time(),
        "slows": about.slows,
    }
    rest |= {"post": fit_message_price(about.spans, about.find_experiment), "linked": about.measure_linked_price()}
    rest |= {"codec": codec, "beside": beside, **about.measure_own_work()}
    return {**durations, **rest, "evaluate": about.measure_evaluation(), "density": about.measure_density()}


class _RecordedSteps:
    """A run's undisturbed steps, and their experiments."""

    def __init__(self, run: Run) -> None:
        self.run = run
        stop = last_steps(run.timeline)[1]
        self.changed = fold(run.experiment, run.changes, Experiment.set)
        fresh = {at + k for at, _ in self.changed for k in range(UNTYPICAL_STEPS)}
        rows = run.timeline.spans.rows()
        aside = set(rows.step[rows.equal("lane", MEASURING)].tolist())
        plain = [s for s in range(stop) if self.find_experiment(s).partition.size == 1 and not self._is_recomputed(s)]
        settled = [s for s in plain if s not in fresh]
        good = [s for s in settled if s not in aside] or settled or plain
        if not good:
            remedy = "record some steps with partition=Whole()" if stop else "it has no complete step; record some"
            raise ValueError(
                f"run {run.name}: costs cannot be measured, because in no step all ranks computed the whole model once "
                f"to the end; {remedy}"
            )
        self.good = good[-MAX_STEPS:]
        self.any = np.array([s for s in range(stop) if s not in fresh and s not in aside][-MAX_STEPS:])
        self.window = Window(run.timeline, self.good[0], stop)
        self.kept = np.isin(self.window.steps, self.good)
        self.spans = self.window.rows
        self.spans = self.spans[np.isin(self.spans.step, self.good)]
        self.listened = np.unique(self.spans.step[self.spans.equal("name", "factors")])
        self.ranks = sorted(int(r) for r in ranks_of(self.spans))
        self.slows, self.least = measure_slowdown(self.spans, self.find_experiment, self._bucket_bytes)

    def find_experiment(self, step: int) -> Experiment:
        return next(e for at, e in reversed(self.changed) if at <= step)

    def _is_recomputed(self, step: int) -> bool:
        return self.find_experiment(step).partition.recompute[0] != "none"

    def measure_durations(self, phase: str) -> tuple[Duration, ...]:
        """Returns by rank a phase's median and spread, without faults."""
        rows = self.spans[self.spans.equal("lane", "compute") & self.spans.phase(phase)]
        rows = rows[~listened] if not (listened := np.isin(rows.step, self.listened)).all() else rows
        rows = rows[np.isin(rows.step, self.least)] if self.slows else rows
        seconds = rows.t1 - rows.t0
        for i, (rank, step) in enumerate(zip(rows.rank.tolist(), rows.step.tolist(), strict=True)):
            if faults := self.find_experiment(step).fabric.faults:
                seconds[i] /= stretch(faults, rank, step, phase)
        found = []
        for rank in self.ranks:
            steps, which = np.unique(rows.step[rows.rank == rank], return_inverse=True)
            mine = np.bincount(which, seconds[rows.rank == rank], len(steps))  # a phase may have paused
            middle = float(np.median(mine)) if len(mine) else 0.0
            spread = 1.4826 * float(np.median(np.abs(mine - middle))) / middle if middle else 0.0
            found.append(Duration(middle, spread if spread > 1e-9 else 0.0))
        return tuple(found) or (Duration(0.0),)

    def measure_codecs(self) -> tuple[By, By]:
        return price_codecs(self.spans, self.find_experiment, self._bucket_bytes)

    def measure_own_work(self) -> dict[str, Any]:
        """Returns prices of codecs inside a model and of strategies' arithmetic, also from spread replicas."""
        rows, samples = self.run.timeline.spans.rows(), self.run.timeline.samples.rows()
        rows = rows[np.isin(rows.step, self.any)]
        return {
            "coder": price_coders(rows, self.find_experiment),
            "flop": price_flops(rows, samples),
            "asked": price_requests(self.spans),
        }

    def _bucket_bytes(self, step: int, name: str) -> int:
        """Returns a bucket's bytes at a step; 0 for other names."""
        sizes: list[int] = []
        for at, _, detail in self.run.details("buckets"):
            if at <= max(step - 1, 0) or not sizes:
                sizes = detail["nbytes"]
        number = name.removeprefix("bucket ")
        return int(sizes[int(number)]) if number.isdigit() and int(number) < len(sizes) else 0

    def _list_collectives(self, shaped: bool) -> tuple[Arrivals, np.ndarray]:
        """Returns collectives, and a mask of complete ones in undisturbed steps on such a Link."""
        c = lined_up(self.window)
        link = np.array([self.find_experiment(int(s)).fabric.path(self.ranks).shaped for s in c.step], bool)
        sent = np.array([str(n).startswith("send ") or n == "send" for n in c.name], bool)
        return c, c.full & np.isin(c.step, self.good) & (link == shaped) & ~sent

    def fit_wire_price(self) -> AlphaBeta:
        """Fits `wire` to the median transfer of each kind and size."""
        c, which = self._list_collectives(shaped=False)
        p = len(self.ranks)
        if not which.any() or p < 2:
            return AlphaBeta()
        took = _transfer_seconds(c)
        found: dict[tuple[int, int], list[float]] = defaultdict(list)
        for i in np.flatnonzero(which):
            messages = traffic(str(c.name[i]).split(" ", 1)[0], 0, p)[1]
            found[messages, int(c.nbytes[i].max())].append(float(took[i]))
        x = np.array(list(found), float)
        y = np.array([np.median(v) for v in found.values()])
        weight = 1.0 / np.maximum(y, 1e-9)  # relative errors, so that the largest bucket does not dominate
        best = solve_not_negative(x * weight[:, None], y * weight)
        return AlphaBeta(*best)

    def _group_shaped(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields groups of equal collectives on a shaped Link: (consecutive messages of each, measured seconds, seconds
        that the ports need). Measured seconds begin at the last arrival.
        """
        c, which = self._list_collectives(shaped=True)
        took = _transfer_seconds(c)
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i in np.flatnonzero(which & ~np.isnan(c.port).all(axis=1)).tolist():
            messages = traffic(str(c.name[i]).split(" ", 1)[0], 0, len(self.ranks))[1]
            found[messages, int(c.nbytes[i].max())].append(i)
        for (messages, _), mine in found.items():
            yield messages, took[mine], np.nanmax(c.port[mine], axis=1)

    def measure_lateness(self) -> float:
        """Returns `late` from collectives that the Link dominates."""
        over = [took - own for _, took, own in self._group_shaped() if not _outlasts_link(took, own)]
        late = float(np.median(np.concatenate(over))) if over else 0.0
        return late if late > 1e-9 else 0.0

    def measure_linked_price(self) -> AlphaBeta:
        """Returns the mean price per message of collectives that outlast their Link."""
        short = [(messages, took) for messages, took, own in self._group_shaped() if _outlasts_link(took, own)]
        if sum(len(took) for _, took in short) < MIN_COLLECTIVES:
            return AlphaBeta()
        return AlphaBeta(float(sum(took.sum() for _, took in short) / sum(n * len(took) for n, took in short)))

    def measure_other_time(self) -> float:
        """A step's median seconds without compute and waiting."""
        w = self.window
        rest = w.step_seconds - w.seconds("compute") - w.seconds("wait")
        rest = rest[self.kept & w.complete & ~w.disturbed]
        middle = float(np.median(rest)) if rest.size else 0.0
        return middle if middle > 1e-9 else 0.0

    def measure_evaluation(self) -> float:
        """Returns an evaluation's seconds on the fastest rank, which waits for no other rank."""
        rows = self.run.timeline.spans.rows()
        rows = rows[rows.equal("lane", "eval")]
        each = [float((rows.t1 - rows.t0)[rows.step == s].min()) for s in np.unique(rows.step)]
        return float(np.median(each)) if each else 0.0

    def measure_density(self) -> float:
        """The share of elements that value-based compressors kept; 0 if unknown."""
        rows = self.run.timeline.samples.rows()
        kept = rows.value[rows.equal("name", "density") & np.isin(rows.step, self.good)]
        return float(np.median(kept)) if len(kept) else 0.0


def _transfer_seconds(c: Arrivals) -> np.ndarray:
    """Returns seconds since the last arrival or the previous collective's end, because collectives cross in turn."""
    end = np.fmax.reduce(c.t1, axis=1)
    before = np.concatenate([[-np.inf], np.fmax.accumulate(end)[:-1]])
    took: np.ndarray = end - np.maximum(c.last, np.where(before < end, before, -np.inf))
    return took


def _outlasts_link(took: np.ndarray, own: np.ndarray) -> bool:
    return bool(took.mean() > OUTLAST_FACTOR * own.mean())


def fit_message_price(spans: Any, at: Callable[[int], Experiment]) -> AlphaBeta:
    """Fits `post` to the median of each size, from the time when the rank could send."""
    found: dict[int, list[float]] = defaultdict(list)
    sent = spans[spans.equal("lane", "comm") & np.array([str(n).startswith("send ") for n in spans.name], bool)]
    sent = sent[np.array([not at(int(step)).fabric.shaped for step in sent.step], bool)]
    for rank in np.unique(sent.rank):
        mine = sent[sent.rank == rank]
        mine = mine[np.argsort(mine.t1, kind="stable")]
        before = np.concatenate([[-np.inf], mine.t1[:-1]])  # messages leave in turn
        for nbytes, took in zip(mine.nbytes.tolist(), mine.t1 - np.maximum(mine.t0, before), strict=True):
            found[nbytes].append(float(took))
    x, y = np.array([(1.0, nbytes) for nbytes in found]), np.array([np.median(v) for v in found.values()])
    if not found or not y.any():
        return AlphaBeta()
    weight = 1.0 / np.maximum(y, 1e-9)
    return AlphaBeta(*solve_not_negative(x * weight[:, None], y * weight))
