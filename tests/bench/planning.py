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
    lines = ["| process | seconds | processor seconds |", "| --- | --- | --- |"]
    middle = {}
    for loaded, name in ((False, "fresh"), (True, "with torch's shapes loaded")):
        mine = [r for r in rows if r["loaded"] is loaded]
        took = [r["seconds"] for r in mine]
        middle[loaded] = statistics.median(took)
        process = statistics.median(r["process"] for r in mine)
        lines.append(f"| {name} | {middle[loaded]:.1f} ({min(took):.1f} to {max(took):.1f}) | {process:.1f} |")
    kept = {True: "kept", False: "NOT kept"}
    return (
        f"`plan` pairs all strategies that claim to be exact with all partitions of ByteGPT. {rows[0]['pairs']} pairs "
        "fit. The planner simulates a few steps of each pair, without tensor values. The table shows medians of "
        f"{len(rows) // 2} processes of each kind, with the smallest and the largest value. The two kinds take turns. "
        "A fresh process takes longer because it imports torch's computation of shapes. The other process has already "
        "planned for a small model on 8 ranks.\n\n"
        + "\n".join(lines)
        + f"\n\nGoal: at most {ASKED:g} s. Fresh process: {kept[middle[False] <= ASKED]}. "
        + f"Process with loaded shapes: {kept[middle[True] <= ASKED]}.\n"
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
