"""Kills a kernel with a training lab: nothing of it may remain, or its lab must be found again."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.harm import LIMIT, Stuck
from tests.waiting import until
from workbench.lab import Lab

ROOT = Path(__file__).parents[1]
GONE = 60.0  # seconds within which nothing remains; a hang takes longer, a busy machine does not
BACK = 60.0  # seconds within which a detached lab is found with its whole record
KERNEL = """
import json, sys, time
from tests.torture import start
from workbench.lab import Lab
name, ranks, detached = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "detached"
lab = Lab(ranks=ranks, name=name)
print(json.dumps({"lab": name}), flush=True)
run = lab.run(start(ranks))
while lab._live is None or lab._live.step < 5:
    time.sleep(0.01)
if detached:
    lab.detach()
print(json.dumps({"path": str(run.path)}), flush=True)
time.sleep(1000)
"""


def round_of(rng: random.Random, done: Counter[str], say: Callable[[str], None]) -> dict[str, list[float]]:
    """Kills three kernels: at any moment, during training, and with a detached lab."""
    times: dict[str, list[float]] = {}
    for how in ("at any moment", "training", "detached"):
        name = f"kernel-{rng.randrange(10**9)}"
        command = [sys.executable, "-c", KERNEL, name, str(rng.randint(1, 3)), how]
        kernel = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            assert kernel.stdout is not None
            kernel.stdout.readline()
            if how == "at any moment":
                time.sleep(rng.uniform(0.0, 12.0))
            else:
                json.loads(kernel.stdout.readline())
                time.sleep(rng.uniform(0.0, 2.0))
            done["kernel"] += 1
            took = killed(kernel, how, name, rng)
        finally:
            kernel.kill()
            kernel.wait()
            assert kernel.stdout is not None
            kernel.stdout.close()
        say(f"killed a kernel, {how}: {took:.1f} s")
        times.setdefault(f"kernel {how}", []).append(took)
    return times


def killed(kernel: subprocess.Popen[str], how: str, name: str, rng: random.Random) -> float:
    """Kills the kernel. Returns the seconds until nothing remained, or until its detached lab was found."""
    family = psutil.Process(kernel.pid).children(recursive=True)
    engines = [p for p in family if p.is_running() and "boot.py engine" in " ".join(p.cmdline()) and not p.children()]
    if how == "training" and engines and rng.random() < 0.5:
        rng.choice(engines).send_signal(signal.SIGSTOP)  # it cannot leave by itself
    kernel.send_signal(signal.SIGKILL)
    kernel.wait()
    began = time.monotonic()
    if how != "detached":
        if not until(lambda: not any(map(living, family)), GONE):
            raise Stuck(f"{GONE:g} s after its kernel was killed: {[p for p in family if living(p)]}")
        return time.monotonic() - began
    lab = Lab.attach(name)
    took = time.monotonic() - began
    try:
        run = lab.run_now
        if took > BACK or run is None:
            raise Stuck(f"its lab was there again after {took:.1f} s, and its run is {run}")
        steps = run.spans[run.spans.lane == "step"]
        for rank, mine in steps.groupby("rank").step:
            if sorted(mine) != list(range(len(mine))):
                raise Stuck(f"rank {rank} has steps {sorted(mine)[:3]}... {len(mine)} in all")
        lab.stop()
        run.wait(LIMIT)
    finally:
        lab.close()
    return took


def living(process: Any) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
