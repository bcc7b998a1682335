"""Measures everything in turn and writes the benchmark pages and prediction.md in docs/project/ from raw samples.

    python -m tests.bench [NAME ...] [--page-only]

Earlier measurements stay unless you ask for them again, so you can resume a campaign. `figures` draws each strategy's
timeline into docs/project/strategies/. `tests.bench.strategies` measures the strategies themselves.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from tests.bench import pages

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "data"
COMMANDS = {
    "ddp": ["tests.bench.ddp"],
    "fsdp": ["tests.bench.ddp", "--strategy", "ZeRO3", "--caps", "1", "5", "--rounds", "12"],
    "beyond": ["tests.bench.beyond"],
    "pipeline": ["tests.bench.pipeline"],
    "schedules": ["tests.bench.schedules"],
    "offload": ["tests.bench.offload"],
    "activations": ["tests.bench.activations"],
    "activations_tuned": ["tests.bench.activations_tuned"],
    "bound": ["tests.bench.bound"],
    "live": ["tests.bench.live"],
    "slow_link": ["tests.bench.slow_link"],
    "netns": ["tests.bench.netns"],
    "algorithms": ["tests.bench.algorithms"],
    "between": ["tests.bench.between"],
    "record": ["tests.bench.record_size"],
    "record_hour": ["tests.bench.record_size", "--rows", "5760000"],
    "checksums": ["tests.bench.record_size", "--checksums"],
    "prediction": ["tests.bench.prediction"],
    "across": ["tests.bench.across"],
    "published": ["tests.bench.published"],
    "published_wire": ["tests.bench.published_wire"],
    "priorities": ["tests.bench.priorities"],
    "shadow": ["tests.bench.shadow"],
    "shadow_quality": ["tests.bench.shadow_quality"],
    "shadow_tables_quality": ["tests.bench.shadow_tables_quality"],
    "memory": ["tests.bench.memory"],
    "second_order": ["tests.bench.second_order"],
    "scale": ["tests.bench.scale"],
    "planning": ["tests.bench.planning"],
    "named": ["tests.bench.named"],
    "tuned": ["tests.bench.tuned"],
    "llama": ["tests.bench.llama"],
    "dashboard": ["tests.bench.dashboard_budget", "--seconds", "120"],
    "dashboard_64": ["tests.bench.dashboard_budget", "--ranks", "64", "--seconds", "120"],
    "dashboard_real": ["tests.bench.dashboard_budget", "--real", "--seconds", "60"],
}


def machine() -> dict[str, str]:
    """Returns the facts about this machine that a reader of the numbers needs."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x.split(":")[1].strip() for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = names[0] if names else model
    return {
        "cpu": f"{os.cpu_count()} cores, {model}", "system": platform.system(), "python": platform.python_version(),
        "torch": torch.__version__, "commit": commit.strip(), "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*COMMANDS, "figures"]))
    ask.add_argument("--page-only", action="store_true")
    said = ask.parse_args()
    known = [*COMMANDS, "figures"]
    if unknown := set(said.names) - set(known):
        ask.error(f"{', '.join(unknown)}: must be among {', '.join(known)}")
    DATA.mkdir(parents=True, exist_ok=True)
    where = DATA / "machines.json"
    machines = json.loads(where.read_text()) if where.exists() else {}
    for name in [] if said.page_only else said.names or known:
        print(f"== {name}", flush=True)
        if name == "figures":
            draw()
            continue
        command = [sys.executable, "-m", *COMMANDS[name], "--out", str(DATA / f"{name}.json")]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            print(f"{name} failed; its older samples stay", flush=True)
            continue
        machines[name] = {**machine(), "command": "python -m " + " ".join(COMMANDS[name]), "load": os.getloadavg()[2]}
        where.write_text(json.dumps(machines, indent=1))
    for name, written in pages.write_pages(DATA).items():
        (ROOT / "docs" / "project" / name).write_text(written)


def draw() -> None:
    """Draws the strategies' timelines, which are simulated and so independent of this machine."""
    from tests.bench.figures import write

    for path in write():
        print(path.relative_to(ROOT), flush=True)


if __name__ == "__main__":
    main()
