"""Measures the simulator's time for a thousand ranks: every strategy, 100 steps, sizes only.

Each strategy runs once with one simulated replica (`alike=True`) if it permits that, and once with every rank.

    python -m tests.bench.scale --out docs/data/scale.json [--only NAME ...]

Seconds are processor time (`time.process_time`), so other load counts little. Each strategy has its own process, with
its own peak of memory. Shared caches and cores also lengthen these seconds, so the load is recorded. A simulation is
abandoned after ten times the required time. The benchmark resumes: results in the file are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.bench.words import listed
from workbench import simulate
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.settings import KnobError, members
from workbench.strategies import Strategy
from workbench.tasks import ByteGPT

RANKS, STEPS = 1024, 100
ASKED, OF_DDP = 30.0, 10.0  # seconds
LIMIT = 10 * ASKED  # processor seconds after which a simulation is abandoned


def experiment(name: str, ranks: int = RANKS, steps: int = STEPS) -> Experiment:
    """Returns the simulated experiment: ByteGPT with default knobs and a pace on 10 Gbit/s."""
    fabric = Fabric(link=Link(bandwidth=10_000.0, latency=0.05))
    usual = members(Strategy)[name].usual()
    return Experiment(task=ByteGPT(), ranks=ranks, steps=steps, strategy=usual, pace=100.0, eval_every=0, fabric=fabric)


def once(name: str, ranks: int, steps: int, alike: bool = False) -> dict[str, Any]:
    """Runs one simulation; returns the reason if it is impossible."""
    began, wall = time.process_time(), time.perf_counter()
    try:
        run = simulate(experiment(name, ranks, steps), alike=alike)
    except KnobError as error:
        return {"refused": str(error)}
    took = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": took, "wall": time.perf_counter() - wall, "spans": len(run.timeline.spans.rows()), "peak": peak,
            "load": os.getloadavg()[0]}  # fmt: skip


def names() -> list[str]:
    """Returns the names of all shipped strategies."""
    return [name for name, cls in members(Strategy).items() if cls.__module__.startswith("workbench.")]


def apart(name: str, ranks: int, steps: int, alike: bool) -> dict[str, Any]:
    """Runs `once` in its own process."""
    command = [sys.executable, "-m", "tests.bench.scale", "--one", name, "--ranks", str(ranks), "--steps", str(steps)]
    done = subprocess.run(command + ["--alike"] * alike, capture_output=True, text=True, check=False)
    if done.returncode == -signal.SIGXCPU:
        return {"late": LIMIT, "load": os.getloadavg()[0]}
    if done.returncode:
        return {"refused": done.stderr.strip().splitlines()[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def text(found: dict[str, Any]) -> str:
    """Returns the section of a page of docs/project/benchmarks/."""
    rows = {name: row for name, row in found["rows"].items() if "refused" not in row["each"]}
    lines = ["| strategy | seconds, one replica | seconds, every rank | spans | peak memory (GB) | load |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for name, row in sorted(rows.items(), key=lambda pair: count_seconds(pair[1]["each"])):
        each, alike = row["each"], row.get("alike")
        more = f"{each['spans'] / 1e6:.2f} M | {each['peak'] / 1e9:.2f}" if "spans" in each else "- | -"
        lines.append(f"| {name} | {_told(alike)} | {_told(each)} | {more} | {each['load']:.0f} |")
    refused = "".join(f"\n- {name}: {row['each']['refused']}" for name, row in found["rows"].items()
                      if "refused" in row["each"])  # fmt: skip
    best = {name: min(count_seconds(each) for each in row.values()) for name, row in rows.items()}
    late = [name for name, seconds in best.items() if seconds > (OF_DDP if name == "DDP" else ASKED)]
    verdict = f"No way meets the goal for {listed(late)}." if late else "All measured strategies keep it."
    each = [row["each"] for row in rows.values() if "spans" in row["each"]]
    if late and each:
        per = sorted(1e6 * row["seconds"] / row["spans"] for row in each)
        verdict += (f"\n\nA span takes {per[0]:.0f} to {per[-1]:.0f} µs of Python. This includes its messages, "
                    "changes of state and tensors without values. In profiles of KFAC, AsyncDrop and SyncServer no "
                    "function takes 10 % of this time by itself. It takes the same time without garbage "
                    "collection.")  # fmt: skip
    left = [name for name in names() if name not in found["rows"]]
    verdict += f" Not measured yet: {', '.join(left)}." if left else ""
    return (
        f"A simulation has {found['steps']} steps of ByteGPT with default knobs, and no tensor values. Seconds are "
        "processor seconds of one process on one of two cores. The load is the mean number of processes that want to "
        "run in the last minute. A higher load makes these seconds longer.\n\n"
        "- One replica: it stands for all replicas (`alike=True`). A dash: the strategy's ranks are not alike.\n"
        "- Every rank: the simulator runs each rank.\n\n"
        f"Goal: at most {ASKED:g} s in one of these ways, and at most {OF_DDP:g} s for DDP. A simulation is abandoned "
        f"after {LIMIT:g} s. {verdict}\n\n"
        + "\n".join(lines)
        + "\n"
        + (f"\nNot simulated:\n{refused}\n" if refused else "")
    )


def count_seconds(row: dict[str, Any]) -> float:
    """Returns the seconds of a simulation, or those after which it was given up."""
    return float(row.get("seconds", row.get("late", math.inf)))


def _told(row: dict[str, Any] | None) -> str:
    if row is None or "refused" in row:
        return "-"
    return f"{row['seconds']:.1f}" if "seconds" in row else f"over {row['late']:g}"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=None)
    ask.add_argument("--only", nargs="*", default=None, metavar="NAME")
    ask.add_argument("--one", help="a strategy to simulate in this very process")
    ask.add_argument("--alike", action="store_true", help="only with --one")
    ask.add_argument("--ranks", type=int, default=RANKS)
    ask.add_argument("--steps", type=int, default=STEPS)
    a = ask.parse_args()
    if a.one:
        resource.setrlimit(resource.RLIMIT_CPU, (round(time.process_time() + LIMIT), resource.RLIM_INFINITY))
        return print(json.dumps(once(a.one, a.ranks, a.steps, a.alike)))
    found: dict[str, Any] = {"ranks": a.ranks, "steps": a.steps, "rows": {}}
    if a.out and a.out.exists() and (known := json.loads(a.out.read_text()))["ranks"] == a.ranks:
        found["rows"] = known["rows"] if known["steps"] == a.steps else {}
    for name in a.only or names():
        if name not in found["rows"] or a.only:
            found["rows"][name] = row = {"each": apart(name, a.ranks, a.steps, False)}
            if members(Strategy)[name].alike:
                row["alike"] = apart(name, a.ranks, a.steps, True)
            print(f"{name}: {_told(row['each'])} s, alike {_told(row.get('alike'))}", flush=True)
        if a.out:
            a.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
