"""A damaged record: the rows that a reader gets, and whether missing rows are reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit import hostile, synthetic
from workbench import Run, RunError
from workbench.entrypoints.report import write_page
from workbench.record import store
from workbench.record.timeline import KINDS

STEPS, BATCHES = 40, 8
DRAWN = 100  # one seed in so many is drawn as a page
Rows = dict[tuple[str, int], list[tuple[Any, ...]]]


class DamagedRecord:
    """Two ranks' rows in several batches. Rank 0 has closed its files; rank 1 was killed."""

    def make(self, folder: Path) -> None:
        changes = ((5, "strategy.every", 4), (20, "compressor", {"TopK": {"density": 0.1}}))
        run = synthetic.run(ranks=2, steps=STEPS, changes=changes)
        store.create(folder, {"experiment": run.settings, "environment": {}, "epoch": 1.0, "started": "", "name": "r"})
        for kind, rank, columns in written(run):
            writer = store.Writer(folder, kind, rank)
            for part in np.array_split(np.arange(len(columns["rank"])), BATCHES):
                writer.append({name: values[part] for name, values in columns.items()})
            writer.abandon() if rank else writer.close()
        self.good = rows_of(Run.open(folder))

    def files(self, folder: Path) -> list[Path]:
        return sorted(file for file in folder.iterdir() if file.is_file())

    def read(self, folder: Path, file: Path, way: str, seed: int) -> tuple[str, str]:
        """refused, warned, same, other; shorter: a file was cut between two batches, as that of a killed rank ends"""
        try:
            run = Run.open(folder)
        except RunError as error:
            return "refused", hostile.sentence(str(error))
        found = rows_of(run)
        if seed % DRAWN == 0:
            write_page(run, folder.parent / "page.html")
        if run.warnings:
            assert all(map(hostile.sentence, run.warnings))
            return "warned", run.warnings[0]
        if found == self.good:
            return "same", ""
        prefix = all(self.good.get(key, [])[: len(rows)] == rows for key, rows in found.items())
        return ("shorter" if way == "cut" and prefix else "other"), f"{file.name} was changed by {way}"


def written(run: Run) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(kind, rank, columns)"""
    for kind, rank in ((kind, rank) for kind in KINDS for rank in range(2)):
        table = run.timeline.table(kind)
        rows = table.rows()
        mine = rows[rows.rank == rank]
        if len(mine):
            yield kind, rank, {name: np.asarray(getattr(mine, name)) for name in table.types}


def rows_of(run: Run) -> Rows:
    """Returns all rows in order, by kind and rank."""
    found: Rows = {}
    for kind in KINDS:
        frame = run.timeline.table(kind).frame()
        for row in json.loads(frame.to_json(orient="values", double_precision=15)):
            found.setdefault((kind, row[list(frame.columns).index("rank")]), []).append(tuple(row))
    return found
