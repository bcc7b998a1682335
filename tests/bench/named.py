"""Measures the smallest delay that is blamed on the right rank and phase on real paced ranks, and false alarms.

    python -m tests.bench.named --out docs/data/named.json [--runs DIRECTORY] [--cells NAME ...]

An unannounced plan (`tests.planned`) makes a rank slower by some percent of a step for `WITHIN` steps. Then no rank is
slow for `BETWEEN` steps. After each of these steps the benchmark reads the list of causes
(`workbench.analysis.stragglers.causes`) and the line about stragglers. A trial is right if after `WITHIN` steps the
list has the rank and the cause, and no other rank. A false alarm is a rank blamed when no step in view had a delay.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.planned import Delay, Planned, PlannedCast, PlannedDigits
from tests.spinning import spinning
from workbench import Experiment, Lab
from workbench.analysis import find_causes, find_straggler
from workbench.fabric import Fabric, Link
from workbench.record.timeline import Timeline
from workbench.run import Run

PACE = {4: 0.16, 8: 0.2}  # seconds of a step's compute
WIRE = 0.5  # of that: the exchange
BUCKET_MB = 0.065  # six buckets
BEGIN, WITHIN, BETWEEN, EVERY = 40, 20, 40, 4  # steps; EVERY: steps between looks outside the plan
CAUSES = ("input", "forward", "backward", "optimizer", "network", "codec", "outside")
APART = [("forward", "forward"), ("forward", "backward"), ("outside",), ("frozen",), ("network",)]
STOOD = 3.0  # steps that a "frozen" rank stands still, once
Named = list[tuple[str, list[int]]]


# -- running


def planned(ranks: int, percent: float, trials: int, seed: int, kinds: list[tuple[str, ...]]) -> list[list[Delay]]:
    """Returns the delays of consecutive trials, with kinds in turn and random ranks."""
    rng, found, step = random.Random(seed), [], BEGIN
    for k in range(trials):
        kind = kinds[k % len(kinds)]
        who = rng.sample(range(ranks), len(kind))
        found.append([delay(step, r, cause, percent, lasts(ranks)) for r, cause in zip(who, kind, strict=True)])
        step += WITHIN + BETWEEN
    return found


def delay(step: int, rank: int, cause: str, percent: float, lasts: float) -> Delay:
    """Returns a delay that begins at this step."""
    if cause == "frozen":
        return Delay(step, step + 1, rank, cause, STOOD * lasts)
    return Delay(step, step + WITHIN, rank, cause, percent / 100 * lasts)


def lasts(ranks: int) -> float:
    """Estimates the seconds of a step without a delay: compute, and the exposed exchange."""
    return PACE[ranks] * (1.0 + WIRE / 4)


def record(ranks: int, steps: int, trials: list[list[Delay]], out: Path) -> Run:
    """Records a run of so many steps with this plan."""
    pace, nbytes = PACE[ranks], 2 * PlannedDigits().elements
    mbit = 2 * (ranks - 1) / ranks * nbytes * 8e-6 / (WIRE * pace)
    delays = [d for trial in trials for d in trial]
    plan = json.dumps({"delays": delays, "pace": pace, "wire": WIRE * pace})
    e = Experiment(
        task=PlannedDigits(plan=plan), pace=pace * 1e3, steps=steps, bucket_mb=BUCKET_MB,
        compressor=PlannedCast(), fabric=Fabric(link=Link(bandwidth=mbit), faults=(Planned(),)),
    )  # fmt: skip
    with Lab(ranks=ranks, name="named") as lab:
        run = lab.run(e, out=out)
        run.wait(steps * pace * 10 + 120)
    return run


# -- reading


def as_it_was(run: Run, looks: list[int]) -> Iterator[tuple[int, Timeline]]:
    """Yields (step, the record when all ranks had ended the step before) for these steps in order."""
    spans, marks = run.timeline.spans.rows(), run.timeline.marks.rows()
    tl, at = Timeline(), 0
    for step in looks:
        for table, rows in ((tl.spans, spans), (tl.marks, marks)):
            table.extend(rows[(rows.step >= at) & (rows.step < step)].columns)
        at = step
        yield step, tl


def named(tl: Timeline) -> tuple[Named, Named]:
    """Returns the causes with ranks from the list, and those of the line about stragglers."""
    listed = [(c.cause, list(c.ranks)) for c in find_causes(tl) if c.ranks]
    said = find_straggler(tl)
    return listed, [(said.phase, [said.rank])] if said else []


def look(run: Run, trials: list[list[Delay]], steps: int) -> dict[str, Any]:
    """Returns each trial's looks, and the looks at steps without a delay in view."""
    within = [range(t[0].first, t[0].first + WITHIN + BETWEEN) for t in trials]
    during = {step: k for k, t in enumerate(trials) for step in range(t[0].first + 1, t[0].first + WITHIN + 1)}
    free = [s for s in range(BEGIN, steps, EVERY) if not any(s - 1 in w for w in within)]
    out: dict[str, Any] = {"trials": [{"delays": t, "looks": []} for t in trials], "free": []}
    for step, tl in as_it_was(run, sorted({*during, *free})):
        listed, said = named(tl)
        if step in during:
            trial = out["trials"][during[step]]
            after, before = step - trial["delays"][0].first, trial["looks"][-1:]
            if after == WITHIN or [listed, said] != (before[0][1:] if before else [[], []]):  # if it changed
                trial["looks"].append([after, listed, said])
        elif listed or said:
            out["free"].append([step, listed, said])
    return {**out, "free_looks": len(free), "pace": kept(run)}


def kept(run: Run) -> dict[str, float]:
    """Returns medians and 95th percentiles of a step and of a forward, in seconds."""
    s = run.timeline.spans.rows()
    s = s[s.step > BEGIN // 2]
    steps, forward = s[s.equal("lane", "step")], s[s.equal("lane", "compute") & s.equal("name", "forward")]
    return {f"{name}_{q}": float(np.percentile(x.t1 - x.t0, q))
            for name, x in (("step", steps), ("forward", forward)) for q in (50, 95)}  # fmt: skip


def wanted(trial: dict[str, Any]) -> set[tuple[str, int]]:
    return {(cause, rank) for _, _, rank, cause, _ in trial["delays"]}


def pairs(listed: Named) -> set[tuple[str, int]]:
    return {(cause, rank) for cause, ranks in listed for rank in ranks}


def right(trial: dict[str, Any]) -> bool:
    """Whether the last look names exactly the trial's ranks and causes."""
    return pairs(trial["looks"][-1][1]) == wanted(trial)


def soon(trial: dict[str, Any]) -> int | None:
    """Returns after how many steps all causes were first named."""
    return next((int(after) for after, listed, _ in trial["looks"] if wanted(trial) <= pairs(listed)), None)


# -- all trials


class Cell(NamedTuple):
    """One run: trials of each kind with a delay of `percent` of a step, then steps without a fault.

    busy: processes that compute at the same time
    """

    ranks: int
    percent: float
    each: int
    kinds: list[tuple[str, ...]]
    free: int = 0
    busy: int = 0

    def measured(self, path: Path) -> dict[str, Any]:
        seed = self.ranks + int(self.percent)
        trials = planned(self.ranks, self.percent, self.each * len(self.kinds), seed, self.kinds)
        steps = (trials[-1][0].first + WITHIN + BETWEEN if trials else BEGIN) + self.free
        if not path.exists():
            with spinning(self.busy):
                record(self.ranks, steps, trials, path)
        told = {"ranks": self.ranks, "percent": self.percent, "busy": self.busy, "steps": steps}
        return {**told, **look(Run.open(path), trials, steps)}


ONE = [(cause,) for cause in CAUSES]
CELLS = {f"{ranks} ranks": Cell(ranks, 10, 4, ONE, free=3000) for ranks in PACE}
CELLS |= {f"{ranks} ranks, told apart": Cell(ranks, 10, 5, APART) for ranks in PACE}
CELLS |= {f"{ranks} ranks, {x} %, busy": Cell(ranks, x, 3, ONE, 300, 2) for x in (10, 20, 30) for ranks in PACE}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, required=True)
    ask.add_argument("--runs", type=Path, default=Path("runs/named"), help="existing runs are only analysed again")
    ask.add_argument("--cells", nargs="*", default=list(CELLS), help="only these")
    a = ask.parse_args()
    found = json.loads(a.out.read_text()) if a.out.exists() else {}
    for name in a.cells:
        found[name] = CELLS[name].measured(a.runs / name.replace(" ", "").replace(",", "-").replace("%", ""))
        a.out.write_text(written(found))
        print(told(name, found[name]), flush=True)


def written(found: dict[str, Any]) -> str:
    """Formats the results with a line for each trial."""
    text = json.dumps(found)
    return re.sub(r'(\{"delays"|"trials"|"free"|"pace"|"\d ranks)', r"\n\1", text) + "\n"


def told(name: str, cell: dict[str, Any]) -> str:
    """Formats a cell as one line."""
    trials = cell["trials"]
    waited = sorted(s for t in trials if (s := soon(t)) is not None)
    median = waited[len(waited) // 2] if waited else "-"
    return (f"{name}: {sum(map(right, trials))} of {len(trials)} named rightly, {len(waited)} at any look "
            f"(after {median} steps, median); {len(cell['free'])} of {cell['free_looks']} looks named somebody "
            f"where nothing was wrong; a step {cell['pace']['step_50'] * 1e3:.0f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
