"""Exercises that check themselves by runs, not by typed answers. They give one hint at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from random import Random
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from widgets import hints as hinting
from widgets.charts.board import Board
from widgets.charts.refresh import RefreshTimer
from widgets.teach.said import ShownText
from widgets.teach.worksheet import count_try, store_hints, store_note
from widgets.views import all_views
from workbench import analysis
from workbench.analysis import find_straggler
from workbench.experiment import Experiment, user_input
from workbench.run import Run, simulate
from workbench.settings import in_words, resolve, short

PHASES = ("forward", "backward")
SLOW_FACTOR = 2.5  # how much longer the riddle's phase takes: easy to see on the timeline
ASKED = {"longest_waiting": "'cause' or 'victim'", "phase": "'forward' or 'backward'"}  # in addition to the rank
HUSH = "A riddle is running. This view appears after you answer it or give up."
NO_MORE = "That was the last hint."
SHOWS, HIDES, WAYS = 0.25, 0.15, 2  # shares of a step that waits for the network: much, hardly any
MIN_STEPS, SETTLE_STEPS = 8, 2  # steps that suffice, after those that a change disturbs
SAME, MAY = ("fabric", "pace"), ("strategy", "compressor", "bucket_mb", "partition")

ExerciseResult = tuple[bool, str]  # whether it is solved, and the reply


class Exercise:
    """A question. `judge` gets the answer of `check` and returns whether it is right, with a reply.

    hints: sentences, vaguest first; or their lesson's number

    >>> half = Exercise("Half of four?", lambda n: (n == 2, "Right." if n == 2 else "Not that."), ["It is even."])
    >>> half.check(3)
    'Not that.'
    >>> half.hint(), half.hint()
    ('Hint 1 of 1: It is even.', 'That was the last hint.')
    >>> half.check(2)
    'Right.'
    """

    def __init__(self, question: str, judge: Callable[..., ExerciseResult], hints: Sequence[str] | str = ()) -> None:
        self.question, self._judge, self._hints, self._told = question, judge, hinting.find_hints(hints), 0
        store_note("exercise", question)

    def check(self, *answer: Any, **named: Any) -> str:
        """Judges an answer, any number of times. An answer with a None does not count.

        >>> Exercise("Half of four?", lambda n: (n == 2, "Right.")).check(n=None)
        'Write down your answer first: n is None.'
        """
        if missing := [name for name, value in (*enumerate(answer, start=1), *named.items()) if value is None]:
            which = ", ".join(name if isinstance(name, str) else f"answer {name}" for name in missing)
            return ShownText(f"Write down your answer first: {which} {'are' if len(missing) > 1 else 'is'} None.")
        right, said = self._judge(*answer, **named)
        answers = ", ".join([*map(short, answer), *(f"{k}={short(v)}" for k, v in named.items())])
        count_try(self.question, answers, bool(right))  # a judge may return a numpy bool
        return ShownText(said)

    def hint(self) -> str:
        """Returns the next hint, vaguest first."""
        if self._told == len(self._hints):
            return ShownText(NO_MORE if self._hints else "There are no hints here.")
        self._told += 1
        store_hints(self.question, self._told)
        return ShownText(f"Hint {self._told} of {len(self._hints)}: {self._hints[self._told - 1]}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.question}"


class Riddle(Exercise):
    """A run in which one hidden rank is slow. You find it on the timeline.

    The same seed gives the same riddle. Until you answer it or give up, dashboards hide the culprit and the fault.

    asks: the second question, after the rank: "longest_waiting" or "phase"
    """

    def __init__(self, lab: Any, experiment: Any, seed: int, asks: str = "longest_waiting") -> None:
        last = {"longest_waiting": "Who waits longest has arrived first.",
                "phase": "Lay its forward and its backward beside those of another rank: which is longer?"}  # fmt: skip
        super().__init__(f"one of {lab.ranks} ranks is slow: which{', and in what' * (asks == 'phase')}?", self._look, (
            "All steps are equally long, for all wait for the last. Do not compare steps.",
            "Hold a step still. On the network lines, who waits, and who never does?",
            f"Who never waits arrives last: the cause. {last[asks]}",
        ))  # fmt: skip
        self.asks = asks
        generator = Random(seed)
        self._rank, self._phase = generator.randrange(lab.ranks), generator.choice(PHASES)
        fault = {"Slow": {"rank": self._rank, "factor": SLOW_FACTOR, "phase": self._phase}}
        self.run = lab.run(experiment.set("ranks", lab.ranks).set("fabric.faults", [fault]), secret=HUSH)
        self.run.secret = HUSH  # also if the cell runs again

    def show(self) -> Board:
        views = tuple(v for v in all_views().values() if v.name == "timeline")
        board = Board(self.run, views=views)
        RefreshTimer(board).start()
        return board

    def check(self, rank: int | None, longest_waiting: str | None = None, phase: str | None = None) -> str:
        """Compares your answers with the record: the slow rank, and `longest_waiting` or `phase`."""
        answer = phase if self.asks == "phase" else longest_waiting
        if rank is None or answer is None or (self.asks == "phase" and phase not in PHASES):
            return ShownText(f"Write down your answers first: rank=..., {self.asks}={ASKED[self.asks]}.")
        return super().check(rank=rank, **{self.asks: answer})

    def _look(self, rank: int, longest_waiting: str = "victim", phase: str = "") -> ExerciseResult:
        found = find_straggler(self.run.timeline)
        if found is None or found.rank != self._rank:
            return False, "The record does not show it clearly yet. Let it run for 20 more steps, then check again."
        if rank != found.rank:
            return False, f"Not rank {rank}: it arrives early and waits: a victim. Look for the rank that never waits."
        if longest_waiting != "victim":
            return False, f"Rank {rank} is right. But who waits longest arrived first: how can it be the cause?"
        if self.asks == "phase" and phase != self._phase:
            return False, f"Rank {rank} is right. But its {phase} takes as long as on the other ranks."
        self.run.secret = ""
        return True, f"Right, on both counts. {found.text}"

    def give_up(self) -> str:
        """Returns the answer, and reveals it to dashboards."""
        self.run.secret = ""
        slow = f"its {self._phase} took {SLOW_FACTOR:g} times as long"
        return ShownText(f"Rank {self._rank} was the cause: {slow}. The other ranks were its victims.")


class Challenge(Exercise):
    """Find settings that make a step short enough. The simulator judges, calibrated from `run`.

    given:   settings that every answer starts from
    at_most: seconds per step
    """

    def __init__(self, run: Any, given: dict[str, Any], at_most: float, hints: Sequence[str] | str = ()) -> None:
        super().__init__(f"a step of at most {at_most * 1e3:.0f} ms", self._look, hints)
        self.run, self.given, self.at_most = run, given, at_most

    def _look(self, settings: dict[str, Any]) -> ExerciseResult:
        """Simulates your settings. Of the given settings, only the strategy can change."""
        if fixed := [path for path in settings if path in self.given and path != "strategy"]:
            return False, f"{', '.join(fixed)} cannot be changed here: the riddle depends on it."
        try:
            took = self.run.what_if({**self.given, **settings}).other
        except ValueError as error:
            return False, f"It cannot be simulated: {error}"
        goal = f"the limit is {self.at_most * 1e3:.0f} ms"
        if took <= self.at_most:
            return True, f"Found: {took * 1e3:.0f} ms per step, and {goal}."
        return False, f"Not yet: {took * 1e3:.0f} ms per step, and {goal}. Which cost grows with the ranks?"


class Goal(Exercise):
    """Find settings that train as well for less, by real training on a virtual clock.

    cost: the quantity to reduce, from `run.summary()`, such as "seconds"; "bytes_per_step" is the mean over all steps
    at_most: the allowed share of the start's cost
    loss: the allowed ratio of the held-out losses, 1.02 for 2 % more
    may: settings that an answer may change, with their inner settings

    The first check trains the start once. `check` reports errors as text and raises none.
    """

    def __init__(self, start: Experiment, cost: str, at_most: float, loss: float = 1.02,
                 may: Sequence[str] = ("strategy", "compressor"),
                 hints: Sequence[str] | str = ()) -> None:  # fmt: skip
        question = f"{cost.replace('_', ' ')}: at most {at_most * 100:g} % of the start's, at {loss:g} times its loss"
        super().__init__(question, self._look, hints)
        self.start, self.cost, self.at_most, self.loss, self.may = start, cost, at_most, loss, tuple(may)
        self.runs: list[Run] = []  # of all answers that could be trained

    @cached_property
    def base(self) -> Run:
        """The start, trained."""
        return simulate(self.start, real=True)

    def _look(self, settings: Mapping[str, Any]) -> ExerciseResult:
        if fixed := why_forbidden(settings, self.may, self.start):
            return False, fixed
        try:
            run = simulate(user_input.turned(self.start, settings.items()), real=True)
        except ValueError as error:
            return False, f"It cannot be trained: {error}"
        self.runs.append(run)
        held_out = run.summary()["held_out"]
        if held_out is not None and not math.isfinite(held_out):
            return False, "Not yet: it diverges, and its held-out loss is NaN or infinite."
        cost, loss = self.beside(run)
        good, asked = cost <= self.at_most and loss <= self.loss, f"limit {self.at_most * 100:g} %"
        said = (f"{cost * 100:.3g} % of the start's {self.cost.replace('_', ' ')} ({asked}), "
                f"{loss:.3f} times its held-out loss (limit {self.loss:g}).")  # fmt: skip
        return good, f"{'Found' if good else 'Not yet'}: {said}"

    def beside(self, run: Run) -> tuple[float, float]:
        """Returns its cost and its held-out loss, both relative to the start's."""
        loss = run.summary()["held_out"] / self.base.summary()["held_out"]
        return round(self._measure_cost(run) / self._measure_cost(self.base), 4), round(loss, 4)

    def _measure_cost(self, run: Run) -> float:
        if self.cost == "bytes_per_step":
            return float(analysis.bytes_per_step(run.timeline, 0, run.experiment.steps).mean())
        return float(run.summary()[self.cost])


def why_forbidden(settings: Mapping[str, Any], may: Sequence[str], start: Experiment) -> str:
    """Returns a sentence with the `settings` that an answer may not set, or "".

    may: allowed settings, with or without their paths. Their inner settings are allowed too

    >>> settings = {"strategy": "LocalSGD", "every": 8, "partition.checkpoint": "units"}
    >>> why_forbidden(settings, ("strategy", "checkpoint"), Experiment())
    ''
    """
    try:
        made = user_input.turned(start, settings.items())
        whole = {path: resolve(made, path)[0] for path in settings}
    except ValueError:  # the judge reports the error
        return ""
    fixed = [path for path, full in whole.items() if not {full.partition(".")[0], full.rpartition(".")[2]} & {*may}]
    return f"{', '.join(fixed)} cannot be changed here. You may set {', '.join(may)}." if fixed else ""


class Hidden(Exercise):
    """Make exposed communication vanish in 2 ways, without changing the network or the compute.

    run: live or not; its record is the judge
    A way is a set of changed settings: strategy, compressor or bucket size. In a live run, ways count only after the
    exercise began. So the lesson's own demonstration is no answer.
    """

    _begun: ClassVar[WeakKeyDictionary[Any, int]] = WeakKeyDictionary()

    def __init__(self, run: Any) -> None:
        super().__init__("make exposed communication vanish in two ways", self._look, (
            "On this wire, gradients take longer than backward. Send less often, or send less.",
            "Set strategy to LocalSGD and raise every. Then DDP again, and TopK as compressor: lower density.",
        ))  # fmt: skip
        self.run = run
        self.since = self._begun.setdefault(run, analysis.last_steps(run.timeline)[1] if run.live else 0)

    def _look(self) -> ExerciseResult:
        shown: dict[str, dict[str, str]] = {}  # by network and pace, the settings of stalled steps
        ways: dict[frozenset[str], str] = {}  # by changed settings, the last values that hid the communication
        for same, may, share, first in self._list_shares():
            if share > SHOWS:
                shown.setdefault(same, may)
            elif share < HIDES and first >= self.since and (was := shown.get(same)):
                changed = {name: said for name, said in may.items() if said != was[name]}
                ways[frozenset(changed)] = ", ".join(f"{name} = {said}" for name, said in changed.items())
        if not shown:
            text = "on no wire so far was the step stalled for long. Lower the bandwidth first, under DDP"
            return False, f"Not yet: {text}."
        said = "; ".join(ways.values())
        if len(ways) < WAYS:
            found = f"one way so far ({said})" if ways else "no way so far"
            return False, f"Not yet: {found}. A setting counts once it has run for {MIN_STEPS + SETTLE_STEPS} steps."
        return True, f"Found: {said}."

    def _list_shares(self) -> Iterator[tuple[str, dict[str, str], float, int]]:
        """Yields (network and pace, changeable settings, share, first step) of each stretch.

        The share is the part of a step that waits for the network. It excludes late ranks and packing, which a busy
        machine causes under any settings.
        """
        tl = self.run.timeline
        until = analysis.last_steps(tl)[1]
        for stretch in analysis.list_stretches(self.run):
            first, stop = stretch.first + SETTLE_STEPS, min(stretch.stop, until)
            if stop - first >= MIN_STEPS:
                found = analysis.break_down(tl, first, stop)
                said = {name: in_words(stretch.settings.get(name)) for name in (*SAME, *MAY)}
                may = {name: said[name].partition("(")[0] for name in MAY}  # another density is not another way
                wire = float((found.exposed - found.held - found.packing).mean() / found.seconds.mean())
                yield " ".join(said[name] for name in SAME), may, wire, stretch.first


def more_steps(run: Any, n: int, timeout: float = 120.0) -> None:
    """Waits until `n` more steps have ended on every rank."""
    goal, end = analysis.last_steps(run.timeline)[1] + n, time.monotonic() + timeout
    while analysis.last_steps(run.timeline)[1] < goal:
        if not run.live:
            raise RuntimeError(f"the run is {run.state}: it makes no more steps")
        if time.monotonic() > end:
            raise TimeoutError(f"not {n} more steps within {timeout:g} s")
        time.sleep(0.1)


def where_time_goes(run: Any, last: int = 10) -> dict[str, int]:
    """Returns mean ms per step over the last steps and all ranks: step, compute, exposed."""
    found = analysis.break_down(run.timeline, *analysis.last_steps(run.timeline, last))
    parts = {"step": found.seconds, "compute": found.compute, "exposed": found.exposed}
    return {name: round(float(seconds.mean()) * 1e3) for name, seconds in parts.items()}
