"""The demo without a browser: 4 real ranks on a slow link, live changes and their recorded effects."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tqdm import tqdm

from workbench import analysis
from workbench.entrypoints.report import write_page
from workbench.experiment import user_input
from workbench.experiment.recipes import slow_link
from workbench.record.run import FINAL, Run, RunError

if TYPE_CHECKING:
    from workbench.lab import Lab

FIRST_STEP_TIMEOUT = 180.0  # seconds before the first step


class TourStop(NamedTuple):
    """A setting of the tour: its setting and its share of the time."""

    title: str
    path: str
    value: str
    share: float


class TourRow(NamedTuple):
    """The figures of consecutive steps."""

    title: str
    steps: int
    rate: float  # steps per second, without evaluations
    nbytes: float  # per step and rank
    exposed: float  # seconds per step of waiting for communication
    before: float
    after: float


TOUR = (
    TourStop("DDP, dense", "strategy", "DDP", 0.3),
    TourStop("Local SGD, every 8", "strategy", "LocalSGD", 0.25),
    TourStop("back to DDP", "strategy", "DDP", 0.15),
    TourStop("DDP, Top-k 1 %", "compressor", "TopK", 0.3),
)


def run_tour(out: Path, ranks: int, seconds: float) -> list[TourRow]:
    """Runs the tour for about `seconds`, prints its table and writes the page `out`."""
    experiment = slow_link().set("ranks", user_input.ranks(ranks))
    from workbench.lab import Lab

    link = experiment.fabric.link
    print(f"{experiment.task} on {ranks} ranks")
    print(f"{link.bandwidth:g} Mbit/s for each rank, {experiment.pace:g} ms of compute per step")
    lab = Lab(ranks=ranks, name="demo")
    try:
        run = lab.run(experiment)
        begins = make_stops(lab, run, seconds)
        lab.stop()
        run.wait()
    finally:
        lab.close()
    found = measure_rows(run, begins)
    print(format_table(found))
    print(f"wrote {write_page(run, out)}")
    return found


def make_stops(lab: Lab, run: Run, seconds: float) -> list[int]:
    """Makes the stops while the ranks train; returns their first steps."""
    begins = [0]
    shape = "{desc} {bar} {n:.0f}/{total_fmt} s{postfix}"
    pause = 0.2 if sys.stderr.isatty() else 10.0
    with tqdm(total=round(seconds), bar_format=shape, mininterval=pause) as bar:
        bar.set_description_str("starting the ranks")
        follow_run(run, bar, FIRST_STEP_TIMEOUT, until_first=True)
        for stop in TOUR:
            if stop is not TOUR[0]:
                begins.append(apply_stop(lab, stop))
            bar.set_description_str(f"{stop.title:<20}")
            follow_run(run, bar, stop.share * seconds)
        bar.update(bar.total - bar.n)
    return begins


def apply_stop(lab: Lab, stop: TourStop) -> int:
    """Sets the stop's knob and returns its first step."""
    change = lab.set(stop.path, stop.value)
    change.wait(60)
    if change.refused or change.applied_at is None:
        raise RunError(f"{stop.path}={stop.value}: {change.refused or 'not applied within 60 s'}")
    return int(change.applied_at)


def follow_run(run: Run, bar: tqdm, seconds: float, until_first: bool = False) -> None:
    """Moves the bar for `seconds`, or until the first step. Raises RunError if the run ends early."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        step = analysis.last_steps(run.timeline)[1]
        if until_first and step:
            return
        if run.state in FINAL:
            run.wait()
            raise RunError(f"the run ended early: {run.state} at step {step}")
        bar.set_postfix_str(f"step {step}", refresh=False)
        time.sleep(0.25)
        if not until_first:
            bar.update(min(time.monotonic() - began - passed, bar.total - bar.n))
    if until_first:
        raise RunError(f"no step was made within {seconds:g} s")


def measure_rows(run: Run, begins: list[int]) -> list[TourRow]:
    """Returns the table's rows, each over the steps from one stop to the next."""
    ends = [*begins[1:], analysis.last_steps(run.timeline)[1]]
    return [measure_row(run, stop.title, *span) for stop, *span in zip(TOUR, begins, ends, strict=True)]


def measure_row(run: Run, title: str, first: int, end: int) -> TourRow:
    """Returns the figures of steps [first, end)."""
    b = analysis.break_down(run.timeline, first, end)
    sent = analysis.bytes_per_step(run.timeline, first, end)
    mean = float(np.mean(b.seconds)) if b.steps else float("nan")
    loss = [find_held_out(run, step) for step in (first, end)]
    return TourRow(
        title, end - first, 1 / mean, float(sent.mean()) if sent.size else 0.0, float(np.mean(b.exposed)), *loss
    )


def find_held_out(run: Run, step: int) -> float:
    """Returns the newest held-out loss at `step`."""
    known = run.samples
    known = known[(known["name"] == "held_out") & (known["step"] <= step)]
    return float(known["value"].iloc[-1]) if len(known) else float("nan")


def format_table(found: list[TourRow]) -> str:
    """Returns the rows as text; speed is relative to the first."""
    head = f"{'steps':>5} {'steps/s':>8} {'speed':>6} {'MB/step/rank':>13} {'exposed ms':>11} {'held-out loss':>15}"
    lines = [f"{'':<20} {head}"]
    for r in found:
        speed, loss = f"{r.rate / found[0].rate:.1f}x", f"{r.before:.2f} -> {r.after:.2f}"
        numbers = f"{r.steps:>5} {r.rate:>8.2f} {speed:>6} {r.nbytes / 1e6:>13.3f} {r.exposed * 1e3:>11.0f} {loss:>15}"
        lines.append(f"{r.title:<20} {numbers}")
    return "\n".join(lines)
