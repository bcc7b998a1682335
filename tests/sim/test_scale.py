"""How many ranks, steps and buckets fit into a minute and into memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sim.virtual import paced, rows, stack
from workbench import simulate
from workbench.fabric import Noisy

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parent.parent.parent
LARGE = """
import json, resource, sys, time
from tests.sim.virtual import paced, stack
from workbench import simulate
from workbench.fabric import Noisy
e = paced(1024, 100, 100.0, 10_000.0, jitter=0.1, faults=(Noisy(spread=0.3),), task=stack(40, 512), bucket_mb=1.0)
began = time.process_time()
run = simulate(e)
took = time.process_time() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
comm = int(run.timeline.spans.rows().equal("lane", "comm").sum())
print(json.dumps({"seconds": took, "peak": peak, "comm": comm, "state": run.state}))
"""


@pytest.mark.slow
def test_a_thousand_ranks_a_hundred_steps_forty_buckets() -> None:
    """Every rank with its own jitter, every span recorded: a minute of one core and 4 GB at most."""
    done = subprocess.run([sys.executable, "-c", LARGE], cwd=ROOT, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["state"] == "done" and found["comm"] == 1024 * 100 * 40
    assert found["seconds"] <= 60 and found["peak"] <= 4e9, found


def test_a_rank_and_bucket_costs_microseconds() -> None:
    e = paced(512, 3, 100.0, 10_000.0, faults=(Noisy(spread=0.3),), task=stack(40), bucket_mb=0.03)
    began = time.process_time()
    run = simulate(e)
    each = (time.process_time() - began) / (512 * 3 * 40)
    assert len(rows(run, "comm", 0)) == 3 * 40
    assert each < 100e-6, f"{each * 1e6:.0f} us; about 12 are usual"
