"""What a process keeps of a record that it has read: its rows, and not what reading them took."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.record_size import rows_like_an_engines, written
from workbench.run import Run

OPENED = """
import json, psutil, sys
from workbench.cluster import spool
from workbench.run import Run
spool.pieces(__import__("pathlib").Path(sys.argv[1]), "marks", 0)
before = psutil.Process().memory_info().rss
run = Run.open(sys.argv[1])
after = psutil.Process().memory_info().rss
found = spool.pieces(run.path, "spans", 3)
del found
spool.pieces(run.path, "marks", 0)
rows = sum(len(t) * sum(c.dtype.itemsize for c in t._columns.values()) for t in [run.timeline.spans])
print(json.dumps([(after - before) / rows, (psutil.Process().memory_info().rss - after) / rows]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' allocators give nothing back")
def test_reading_a_record_takes_little_more_than_its_rows_once_it_is_read(tmp_path: Path) -> None:
    path = Run({"ranks": 8}).save(tmp_path / "run")
    written(path, rows_like_an_engines(1_200_000))
    done = subprocess.run([sys.executable, "-c", OPENED, str(path)], capture_output=True, text=True, timeout=120)
    opened, fetched = json.loads(done.stdout)
    assert opened < 2.8 and fetched < 0.1, done.stderr
