"""What lessons are made of: a prediction written down before the run, and a riddle that checks its answer.

Predictions are held against the record; a riddle's answer is explained by what `workbench.analysis` reads from it.
"""

from __future__ import annotations

import time
from random import Random
from typing import Any

from widgets.board import Board
from widgets.prediction import Prediction as Prediction
from widgets.refresh import Refresh
from widgets.views import all_views
from workbench.analysis import breakdown, last_steps, straggler
from workbench.doors.priced import priced as priced

PHASES = ("forward", "backward")
FACTOR = 2.5  # how many times longer the riddle's phase lasts: easy to see, once one knows where to look
HUSH = "A riddle is on: what would give it away is said here once it is answered, or given up."


def more_steps(run: Any, n: int, timeout: float = 120.0) -> None:
    """Waits until `n` more steps are over on every rank."""
    goal, end = last_steps(run.timeline)[1] + n, time.monotonic() + timeout
    while last_steps(run.timeline)[1] < goal:
        if not run.live:
            raise RuntimeError(f"the run is {run.state}: it will make no more steps")
        if time.monotonic() > end:
            raise TimeoutError(f"not {n} more steps within {timeout:g} s")
        time.sleep(0.1)


def where_time_goes(run: Any, last: int = 10) -> dict[str, int]:
    """Milliseconds per step, the mean over the last steps and all ranks: the step, its compute, what stood still."""
    found = breakdown(run.timeline, *last_steps(run.timeline, last))
    parts = {"step": found.seconds, "compute": found.compute, "exposed": found.exposed}
    return {name: round(float(seconds.mean()) * 1e3) for name, seconds in parts.items()}


class Riddle:
    """A run in which one rank is slow, and nobody says which: find it on the timeline.

    The same seed gives the same riddle. Until it is answered or given up no dashboard names the culprit, nor shows the
    fault among the controls; `show()` draws the timeline alone.
    """

    def __init__(self, lab: Any, experiment: Any, seed: int) -> None:
        generator = Random(seed)
        self._rank, self._phase = generator.randrange(lab.ranks), generator.choice(PHASES)
        fault = {"Slow": {"rank": self._rank, "factor": FACTOR, "phase": self._phase}}
        self.run = lab.run(experiment.set("ranks", lab.ranks).set("fabric.faults", [fault]), secret=HUSH)
        self.run.secret = HUSH  # also where the cell is run again, and the run was there

    def show(self) -> Board:
        """The timeline alone."""
        views = tuple(v for v in all_views().values() if v.name == "timeline")
        board = Board(self.run, views=views)
        Refresh(board).start()
        return board

    def check(self, rank: int | None, longest_waiting: str | None) -> str:
        """Holds your answers against the record: the slow rank, and what the one that waits longest is."""
        if rank is None or longest_waiting is None:
            return "Write down your answers first: rank=..., longest_waiting='cause' or 'victim'."
        found = straggler(self.run.timeline)
        if found is None or found.rank != self._rank:
            return "The record does not show it clearly yet: let it run for 20 steps more, then check again."
        if rank != found.rank:
            return f"Not rank {rank}: it arrives early and waits: a victim. Look for the rank that never waits."
        if longest_waiting != "victim":
            return f"Rank {rank} is right. But who waits longest arrived first: how can it be the cause?"
        self.run.secret = ""
        return f"Right, on both counts. {found.text}"

    def give_up(self) -> str:
        """The answer; dashboards say again what they see."""
        self.run.secret = ""
        slow = f"its {self._phase} took {FACTOR:g} times as long"
        return f"Rank {self._rank} was the cause: {slow}. The others were its victims."

    def __repr__(self) -> str:
        return f"Riddle: one of {self.run.settings['ranks']} ranks is slow"


class Challenge:
    """Settings to be found with which a step is short enough; the simulator, calibrated from `run`, is the judge.

    given: settings that every answer starts from. at_most: seconds per step.
    """

    def __init__(self, run: Any, given: dict[str, Any], at_most: float) -> None:
        self.run, self.given, self.at_most = run, given, at_most

    def check(self, settings: dict[str, Any]) -> str:
        """Simulates your settings; those that are given cannot be changed, but for the strategy."""
        if fixed := [path for path in settings if path in self.given and path != "strategy"]:
            return f"{', '.join(fixed)} cannot be changed here: it is what makes the riddle."
        try:
            took = self.run.what_if({**self.given, **settings}).other
        except ValueError as error:
            return f"It cannot be simulated: {error}"
        goal = f"at most {self.at_most * 1e3:.0f} ms are asked"
        if took <= self.at_most:
            return f"Found: {took * 1e3:.0f} ms per step, and {goal}."
        return f"Not yet: {took * 1e3:.0f} ms per step, and {goal}. What is it that grows with the ranks?"

    def __repr__(self) -> str:
        return f"Challenge: a step of at most {self.at_most * 1e3:.0f} ms"
