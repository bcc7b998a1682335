"""Compares a search on three fabrics with a sweep of all settings, in result and cost, on paced training ranks.

    python -m tests.bench.tuned --out docs/data/tuned.json [--fabrics NAME ...]

A search (`lab.tune`) runs first. Then every setting of its space is measured like a trial, on the same ranks in the
same run. The ranks learn nothing in this time, so the loss stays on its trend and only the step counts. Earlier
measurements stay unless you ask for them again.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from tests.waiting import until
from workbench import Experiment, Lab
from workbench.fabric import Fabric, Link
from workbench.sim.plan.search_space import list_candidates, space_of
from workbench.sim.plan.trials import Trial
from workbench.sim.tune.trial_runner import TrialLimits, TrialRunner
from workbench.tasks import ByteGPT

PACE, WORSE, LR = 60.0, 0.5, 1e-6  # ms; share by which the loss may be worse; too slow to learn
SPACE = {
    "bucket_mb": [0.05, 0.2, 1.0], "compressor": ["Dense", "Cast", "TopK"],
    "strategy": ["DDP", {"LocalSGD": {"every": 4}}, {"LocalSGD": {"every": 8}}],
}  # fmt: skip
LINKS = {
    "slow bandwidth": Link(bandwidth=40, latency=2.0), "high latency": Link(bandwidth=1000, latency=10.0),
    "fast": Link(bandwidth=20_000, latency=0.01),
}  # fmt: skip
WITHIN, SHARE = 1.05, 0.25  # required, of the sweep's best, and of its steps


def searched(lab: Lab, link: Link) -> dict[str, Any]:
    """Runs a search on this link and then a sweep. Returns both in steps, and the sweep's seconds per step."""
    e = Experiment(task=ByteGPT(layers=2, width=64, heads=2), ranks=2, batch=4, steps=0, pace=PACE, bucket_mb=0.05,
                   lr=LR, eval_every=0, fabric=Fabric(link=link))  # fmt: skip
    run = lab.run(e)
    if not until(lambda: lab._live is not None and lab._live.step >= 20):
        raise TimeoutError(f"no steps are made: {run}")
    found = lab.tune(SPACE, worse=WORSE).wait()
    by_hand = TrialRunner(lab, TrialLimits(worse=WORSE), list(SPACE), lambda: None, lambda trial: None)
    sweep = {
        str(s): by_hand.run_trial(Trial(settings=s), None) for s in list_candidates(space_of(e.checked(), SPACE, {}))
    }
    lab.stop()
    run.wait(60)
    seconds = {name: trial.seconds or 9.0 for name, trial in sweep.items()}
    return {
        "found": str(found.best.settings), "best": min(seconds, key=lambda name: seconds[name]), "seconds": seconds,
        "steps": found.steps, "swept": sum(trial.steps for trial in sweep.values()),
        "trials": [trial.verdict for trial in found.trials],
        "unmeasured": {name: trial.verdict for name, trial in sweep.items() if trial.seconds is None},
    }  # fmt: skip


def ratio(cell: dict[str, Any]) -> float:
    """Returns the search's result over the sweep's best, in seconds per step."""
    return float(cell["seconds"][cell["found"]] / cell["seconds"][cell["best"]])


def section(cells: dict[str, Any]) -> str:
    """Returns the section of a page of docs/project/benchmarks/. `noted` is entered by hand."""
    noted = " " + cells["noted"] if "noted" in cells else ""
    cells = {name: cells[name] for name in LINKS if name in cells}
    lines = ["| link | step, found / best of the sweep | search steps | share of the sweep's steps | found | "
             "best of the sweep |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    kept = []
    for name, cell in cells.items():
        share = cell["steps"] / cell["swept"]
        kept.append(ratio(cell) <= WITHIN and share <= SHARE)
        lines.append(f"| {name} | {ratio(cell):.3f} | {cell['steps']} | {share:.2f} of {cell['swept']} | "
                     f"{_short(cell['found'])} | {_short(cell['best'])} |")  # fmt: skip
    return (
        f"`lab.tune` searches {len(next(iter(cells.values()))['seconds'])} settings of bucket size, compressor and "
        f"strategy on two ranks with {PACE:g} ms of paced compute. Then the same run measures each setting as a trial "
        f"does. This is the sweep. At a learning rate of {LR:g} the model learns nothing. So no loss leaves its trend, "
        "and only the step counts. The settings show bucket size (MB), compressor and strategy.\n\n"
        + "\n".join(lines)
        + f"\n\nGoal: at most {WITHIN:g} times the sweep's best step, with at most {SHARE:g} of its steps: kept on "
        f"{sum(kept)} of {len(kept)} links.{noted} `tests/unit/test_tuning_watched.py` tests the search on a virtual "
        "clock, with costs of codecs that it does not know.\n"
    )


def _short(settings: str) -> str:
    """Returns settings as values without paths."""
    values = re.sub(r"'[a-z_]+': ", "", settings.strip("{}"))
    return f"`{values}`"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, required=True)
    ask.add_argument("--fabrics", nargs="*", default=list(LINKS))
    a = ask.parse_args()
    found = json.loads(a.out.read_text()) if a.out.exists() else {}
    with Lab(ranks=2, name="tuned") as lab:
        for name in a.fabrics:
            found[name] = searched(lab, LINKS[name])
            share = found[name]["steps"] / found[name]["swept"]
            print(f"{name}: {ratio(found[name]):.3f} of the sweep's best, {share:.2f} of its steps", flush=True)
            a.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
