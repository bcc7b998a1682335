"""Measures how long a plan for 4,096 ranks takes, in a fresh process and in one that has loaded torch.

    python -m tests.bench.planning --out docs/data/planning.json

Each plan has its own process. "Loaded": the process has planned for a small model on 8 ranks before, which imports
torch's computation of shapes without values. It keeps no result of that plan.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from workbench import Experiment
from workbench.sim.plan.planner import plan
from workbench.tasks import ByteGPT

RANKS, ASKED, ROUNDS = 4096, 10.0, 5


def one(loaded: bool) -> dict[str, Any]:
    """Returns the seconds of one plan in this process."""
    if loaded:
        plan(Experiment(task=ByteGPT(layers=2, width=16, heads=2, context=8), ranks=8, pace=100.0))
    began, cpu = time.perf_counter(), time.process_time()
    found = plan(Experiment(task=ByteGPT(), ranks=RANKS, pace=100.0))
    return {"loaded": loaded, "pairs": len(found), "seconds": time.perf_counter() - began,
            "process": time.process_time() - cpu}  # fmt: skip


def section(rows: list[dict[str, Any]]) -> str:
    """Returns the section of a page of docs/project/benchmarks/."""
    lines = ["| process | seconds | of the process |", "| --- | --- | --- |"]
    middle = {}
    for loaded, name in ((False, "fresh"), (True, "torch's shapes loaded")):
        mine = [r for r in rows if r["loaded"] is loaded]
        took = [r["seconds"] for r in mine]
        middle[loaded] = statistics.median(took)
        process = statistics.median(r["process"] for r in mine)
        lines.append(f"| {name} | {middle[loaded]:.1f} ({min(took):.1f} to {max(took):.1f}) | {process:.1f} |")
    kept = {True: "kept", False: "NOT kept"}
    return (
        f"`plan` of ByteGPT with all strategies that claim to be exact and all ways "
        f"to cut it; {rows[0]['pairs']} pairs fit and are simulated, sizes only. Medians of {len(rows) // 2} processes "
        f"of either kind in turn, with the least and the most. What a fresh one takes longer are torch's imports.\n\n"
        + "\n".join(lines)
        + f"\n\nAsked: at most {ASKED:g} s. Fresh: {kept[middle[False] <= ASKED]}; "
        + f"loaded: {kept[middle[True] <= ASKED]}.\n"
    )


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=None)
    ask.add_argument("--one", choices=["fresh", "loaded"], help="a plan in this very process")
    a = ask.parse_args()
    if a.one:
        return print(json.dumps(one(a.one == "loaded")))
    rows = []
    for _ in range(ROUNDS):
        for kind in ("fresh", "loaded"):
            command = [sys.executable, "-m", "tests.bench.planning", "--one", kind]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{kind}: {rows[-1]['seconds']:.1f} s", flush=True)
    if a.out:
        a.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
