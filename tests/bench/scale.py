"""How long the simulator takes for a thousand ranks: every strategy, 100 steps, sizes only, each rank by itself.

    python -m tests.bench.scale --out docs/data/scale.json [--only NAME ...]

Seconds are the process's own (`time.process_time`), so that what else the machine does counts little; each strategy has
a process to itself, and its peak of memory. Goes on where it stopped: what the file holds is not run again.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from workbench import simulate
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.settings import KnobError, members
from workbench.strategies import Strategy
from workbench.tasks import ByteGPT

RANKS, STEPS = 1024, 100
ASKED, OF_DDP = 30.0, 10.0  # seconds
LIMIT = 1200.0  # seconds after which a strategy is given up


def experiment(name: str, ranks: int = RANKS, steps: int = STEPS) -> Experiment:
    """What is simulated: ByteGPT and all knobs as usual, at a pace, on 10 Gbit/s."""
    fabric = Fabric(link=Link(bandwidth=10_000.0, latency=0.05))
    usual = members(Strategy)[name].usual()
    return Experiment(task=ByteGPT(), ranks=ranks, steps=steps, strategy=usual, pace=100.0, eval_every=0, fabric=fabric)


def once(name: str, ranks: int, steps: int) -> dict[str, Any]:
    """One simulation; where that cannot be, why."""
    began, wall = time.process_time(), time.perf_counter()
    try:
        run = simulate(experiment(name, ranks, steps))
    except KnobError as error:
        return {"refused": str(error)}
    took = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": took, "wall": time.perf_counter() - wall, "spans": len(run.timeline.spans.rows()), "peak": peak}


def names() -> list[str]:
    """All strategies that ship, by name."""
    return [name for name, cls in members(Strategy).items() if cls.__module__.startswith("workbench.")]


def apart(name: str, ranks: int, steps: int) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.scale", "--one", name, "--ranks", str(ranks), "--steps", str(steps)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return {"refused": f"not over after {LIMIT:g} s"}
    if done.returncode:
        return {"refused": done.stderr.strip().splitlines()[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def text(found: dict[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    ran = {name: row for name, row in found["rows"].items() if "seconds" in row}
    late = [name for name, row in ran.items() if row["seconds"] > (OF_DDP if name == "DDP" else ASKED)]
    lines = ["| strategy | seconds | spans | peak of memory (GB) |", "| --- | --- | --- | --- |"]
    for name, row in sorted(ran.items(), key=lambda pair: pair[1]["seconds"]):
        lines.append(f"| {name} | {row['seconds']:.1f} | {row['spans'] / 1e6:.2f} M | {row['peak'] / 1e9:.2f} |")
    refused = "".join(f"\n- {name}: {row['refused']}" for name, row in found["rows"].items() if "refused" in row)
    verdict = "All of them." if not late else f"Not kept by {', '.join(late)}."
    return (
        f"## The simulator at {found['ranks']} ranks\n\n{found['steps']} steps of ByteGPT, sizes only, every rank by "
        f"itself, knobs as usual; the process's own seconds on one core. Asked: at most {ASKED:g} s, DDP {OF_DDP:g}. "
        f"{verdict}\n\n" + "\n".join(lines) + "\n" + (f"\nNot simulated:\n{refused}\n" if refused else "")
    )


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=None)
    ask.add_argument("--only", nargs="*", default=None, metavar="NAME")
    ask.add_argument("--one", help="a strategy to simulate in this very process")
    ask.add_argument("--ranks", type=int, default=RANKS)
    ask.add_argument("--steps", type=int, default=STEPS)
    a = ask.parse_args()
    if a.one:
        return print(json.dumps(once(a.one, a.ranks, a.steps)))
    found: dict[str, Any] = {"ranks": a.ranks, "steps": a.steps, "rows": {}}
    if a.out and a.out.exists() and (known := json.loads(a.out.read_text()))["ranks"] == a.ranks:
        found["rows"] = known["rows"] if known["steps"] == a.steps else {}
    for name in a.only or names():
        if name not in found["rows"] or a.only:
            found["rows"][name] = row = apart(name, a.ranks, a.steps)
            print(f"{name}: {row.get('refused') or format(row['seconds'], '.1f') + ' s'}", flush=True)
        if a.out:
            a.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
