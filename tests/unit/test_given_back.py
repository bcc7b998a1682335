"""Tests that a process keeps a read record's rows, but not the memory of reading them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.record_size import rows_like_an_engines, written
from workbench.run import Run

OPENED = """
import json, psutil, sys
from pathlib import Path
from workbench.cluster.transport import disk_rows as spool
from workbench.run import Run
spool.read_pieces(Path(sys.argv[1]), "marks", 0)
before = psutil.Process().memory_info().rss
run = Run.open(sys.argv[1])
after = psutil.Process().memory_info().rss
found = spool.read_pieces(run.path, "spans", 3)
del found
spool.read_pieces(run.path, "marks", 0)
rows = sum(len(t) * sum(c.dtype.itemsize for c in t._columns.values()) for t in [run.timeline.spans])
print(json.dumps([(after - before) / rows, (psutil.Process().memory_info().rss - after) / rows]))
"""

GROWN = """
import json, numpy as np, psutil
from workbench.record.timeline import Table
table, others, rows = Table("spans"), [], 5_000
piece = {k: np.ones(rows, v) for k, v in table.types.items() if k not in table.words}
piece |= {k: ["word"] * rows for k in table.words}
before = psutil.Process().memory_info().rss
for _ in range(220):
    table.extend(piece)
    others.append(bytes(50_000))
held = sum(len(table) * c.dtype.itemsize for c in table._columns.values())
print(json.dumps((psutil.Process().memory_info().rss - before - 50_000 * len(others)) / held))
"""
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="other systems' allocators give nothing back")


def said(script: str, *arguments: str) -> Any:
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@LINUX
def test_a_growing_table_takes_the_memory_of_its_rows() -> None:
    assert said(GROWN) < 1.05


@LINUX
def test_a_read_record_takes_little_more_memory_than_its_rows(tmp_path: Path) -> None:
    path = Run({"ranks": 8}).save(tmp_path / "run")
    written(path, rows_like_an_engines(1_200_000))
    opened, fetched = said(OPENED, str(path))
    assert opened < 2.8 and fetched < 0.1
