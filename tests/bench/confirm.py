"""Checks cells with changed code by short runs, to confirm that their results are unchanged.

    python -m tests.bench.confirm [--minutes 30] [--workers 2]

A repeated simulated run is bit-identical. So one seed of each row, whose seeds run the same code, runs its first POINTS
evaluations. If step, seconds and loss of each equal the kept ones, all its seeds count as confirmed, with the number of
steps. Rows that differ stay as they are, to be measured again. The check misses code that only acts later: rows that
begin something late run until POINTS evaluations past it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench import compression, compression_tuned, strategies
from tests.bench.cells import DATA, Cell, Results, kept, key
from workbench.sim import Costs

POINTS = 3


def stale(cells: Iterable[Cell], costs: Costs, folder: Path) -> dict[tuple[str, str, str], list[Cell]]:
    """Returns the cells measured with other code, by (part, row, place)."""
    found: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        if (folder / cell.path).exists() and kept(cell, costs, folder) is None:
            found.setdefault((cell.part, cell.row, cell.where), []).append(cell)
    return found


def begun(cell: Cell) -> Cell:
    """Returns the same cell with only its first evaluations."""
    every = cell.every or cell.steps
    late = max([cell.after, cell.knobs.get("warmup", 0)])
    return replace(cell, steps=min(cell.steps, (late // every + POINTS + 1) * every))


def same(cell: Cell, costs: dict[str, Any], was: list[list[float]]) -> int:
    """Returns over how many steps a cell equals `was`; 0 if it does not. Runs in its own process."""
    short = begun(cell)
    found, _ = strategies.ran(short, costs)
    mine = [point for point in found.get("curve", []) if point[0] < short.steps or short.steps == cell.steps]
    return int(mine[-1][0]) if mine and mine == was[: len(mine)] else 0


def confirm(cells: Iterable[Cell], costs: Costs, folder: Path, until: float, workers: int) -> list[str]:
    """Confirms as many rows as it can; returns the rows with different results."""
    rows, other = stale(cells, costs, folder), []
    plain, today = strategies.costs_as_plain(costs), datetime.date.today().isoformat()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        asked = {}
        for row, mine in rows.items():
            was = json.loads((folder / mine[0].path).read_text())["found"]
            if was.get("curve"):
                asked[pool.submit(same, mine[0], plain, was["curve"])] = row
        for n, future in enumerate(as_completed(asked)):
            row = asked[future]
            steps = 0 if future.exception() else future.result()
            print(f"{n + 1}/{len(asked)} {', '.join(row)}: {f'the same over {steps} steps' if steps else 'differs'}")
            other += [] if steps else [", ".join(row)]
            for cell in rows[row] if steps else ():
                restamp(folder / cell.path, cell, costs, steps, today)
            if time.time() > until:
                pool.shutdown(cancel_futures=True)
                break
    return other


def restamp(path: Path, cell: Cell, costs: Costs, steps: int, date: str) -> None:
    """Records in the file that a cell's numbers hold for the present code."""
    held = json.loads(path.read_text())
    held |= {"key": key(cell, costs), "confirmed": {"steps": steps, "date": date}}
    path.write_text(json.dumps(held))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--minutes", type=float, default=30.0, help="no longer than about that")
    ask.add_argument("--workers", type=int, default=strategies.CORES, help="cells at a time")
    a = ask.parse_args()
    until = time.time() + 60 * a.minutes
    compressed = [cell for part in compression.LOSSES for cell in compression.losses(part)]
    compressed += compression_tuned.cells(Results.of(compression.DATA))
    other = confirm(compression.possible(compressed), compression.COSTS, compression.DATA, until, a.workers)
    other += confirm(strategies.planned([])[0], strategies.calibrated(), DATA, until, a.workers)
    print("\n".join(["these differ and are to be measured again:", *other]) if other else "nothing differs")


if __name__ == "__main__":
    main()
