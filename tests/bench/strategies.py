"""Compares every strategy with DDP on four simulated networks, and tests more claims: docs/project/strategies.md.

    python -m tests.bench.strategies [--minutes 45] [--only PART ...] [--plan] [--page-only]

Cells with unchanged inputs are not run again, so an interrupted campaign, or one without minutes left, resumes.
Strategies that do not exist yet are reported and left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from tests.bench import beside, strategies_page
from tests.bench.__main__ import ROOT, machine
from tests.bench.cells import DATA, RANKS, TASK, Cell, costs_as_plain, costs_from_plain, keep, kept, measured
from tests.bench.claims import PARTS, rows, tables
from tests.bench.methods import found, method
from workbench.experiment import Experiment
from workbench.lab import Lab
from workbench.settings import KnobError
from workbench.sim import Costs

CALIBRATION = 80  # steps of the run that measures the cost of compute
PAGE = ROOT / "docs" / "project" / "strategies.md"
CORES = os.cpu_count() or 1


def calibrated(folder: Path = DATA) -> Costs:
    """Returns the costs of compute and of the bare network on this machine, measured once and kept with the data.

    The run has as many ranks as cores, because ranks that share a core would disturb each other. Evaluations cost
    nothing, so times contain only training.
    """
    path = folder / "about.json"
    if path.exists():
        return costs_from_plain(json.loads(path.read_text())["costs"])
    ranks = min(RANKS, CORES)
    print(f"measuring what compute costs: {CALIBRATION} steps on {ranks} real ranks", flush=True)
    with Lab(ranks=ranks, name="costs") as lab:
        run = lab.run(Experiment(task=TASK, ranks=ranks, steps=CALIBRATION, eval_every=0))
        run.wait(180)
    plain = {**costs_as_plain(Costs.measured(run)), "evaluate": 0.0}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"costs": plain, "machine": machine(), "steps": CALIBRATION}, indent=1))
    return costs_from_plain(plain)


def planned(only: Iterable[str] = ()) -> tuple[list[Cell], list[str]]:
    """Returns (all cells of existing strategies, reasons why others do not exist)."""
    every = [*tables(), *(cell for part in PARTS for cell in part.cells())]
    every = [cell for cell in every if not only or cell.part in only]
    cells, lacking = [], dict[str, str]()
    for cell in every:
        try:
            if found(cell.method) is None:
                raise KnobError("there is no such strategy yet")
            method(cell.method).strategy(cell.knobs), method(cell.method).codec()
        except KnobError as reason:
            lacking.setdefault(cell.row, f"skipped {cell.row}: {reason}")
        else:
            cells.append(cell)
    return cells, list(lacking.values())


def rate(costs: Costs) -> float:
    """Measures this machine's seconds for one rank's step per layer, from a short cell."""
    short = Cell(part="trial", row="DDP", where="fast", seed=0, method="DDP", steps=15, every=15)
    measured(short, costs)
    began = time.perf_counter()
    measured(short, costs)
    return (time.perf_counter() - began) / short.work


def ran(cell: Cell, costs: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Runs a cell in a process of the pool; returns its result and its duration."""
    began = time.perf_counter()
    return measured(cell, costs_from_plain(costs)), time.perf_counter() - began


def campaign(cells: list[Cell], costs: Costs, until: float, folder: Path = DATA, workers: int = CORES) -> int:
    """Runs the cells that are not kept and returns how many are left: `workers` at a time, none after `until`."""
    todo = [cell for cell in cells if kept(cell, costs, folder) is None]
    now = {"commit": machine()["commit"], "date": datetime.date.today().isoformat()}
    plain, under_way = costs_as_plain(costs), dict[Future[Any], Cell]()
    done, left = 0, len(todo)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        while (todo and time.time() < until) or under_way:
            while todo and len(under_way) < workers and time.time() < until:
                cell = todo.pop(0)
                under_way[pool.submit(ran, cell, plain)] = cell
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                cell = under_way.pop(future)
                done += 1
                said = f"{done}/{done + len(todo) + len(under_way)} {cell.part}: "
                said += f"{cell.row}, {cell.where}, seed {cell.seed}"
                if (error := future.exception()) is not None:
                    print(f"{said} FAILED: {type(error).__name__}: {error}", flush=True)
                    continue
                values, seconds = future.result()
                keep(cell, costs, values, folder, seconds=round(seconds, 2), **now)
                left -= 1
                print(f"{said}: {seconds:.1f} s{', ' + values['refused'] if 'refused' in values else ''}", flush=True)
    return left


def rounds(
    plan: Callable[[], list[Cell]], costs: Costs, until: float, folder: Path = DATA, workers: int = CORES
) -> int:
    """Runs campaigns until no cell is left, because the first seed decides the learning rate of other seeds."""
    while (todo := [cell for cell in plan() if kept(cell, costs, folder) is None]) and time.time() < until:
        if left := campaign(todo, costs, until, folder, workers):
            return left
    return len(todo)


def on_real_ranks(costs: Costs, until: float, folder: Path = DATA) -> None:
    """Runs each strategy and torch's DDP once on real ranks."""
    first = {name: (label, knobs) for label, name, knobs in reversed(rows())}
    every = [
        ("TorchDDP", None, {}),
        *((label, method(name), knobs) for name, (label, knobs) in first.items() if found(name)),
    ]
    cells = {
        row: Cell(
            part="real", row=row, where=f"paced {beside.PACE:g} ms", seed=0, method=m.name if m else "DDP", knobs=knobs,
            fabric=beside.BASE.fabric, steps=beside.BASE.steps,
        )
        for row, m, knobs in every
    }  # fmt: skip
    todo = [one for one in every if kept(cells[one[0]], costs, folder) is None]
    if not todo or time.time() > until:
        return
    print(f"on real ranks: {', '.join(row for row, *_ in todo)}", flush=True)
    now = {"commit": machine()["commit"], "date": datetime.date.today().isoformat()}
    for row, values in beside.measured(todo):
        keep(cells[row], costs, values, folder, **now)
        ratio = values["step_s"] / values["simulated_s"]
        print(f"{row}: {values['step_s'] * 1e3:.0f} ms, {ratio:.3f} of the simulated step", flush=True)
        if time.time() > until:
            return


def say_plan(cells: list[Cell], lacking: list[str], costs: Costs) -> None:
    """Prints the number of cells and their approximate duration."""
    each = rate(costs)
    print("\n".join(lacking))
    for part in dict.fromkeys(cell.part for cell in cells):
        mine = [cell for cell in cells if cell.part == part]
        todo = [cell for cell in mine if kept(cell, costs) is None]
        seconds = sum(cell.work for cell in todo) * each
        print(
            f"{part}: {len(mine)} cells, {len(mine) - len(todo)} kept; the others of about "
            f"{seconds / max(1, len(todo)):.1f} s: "
            f"{seconds / 60 / CORES:.0f} min on {CORES} cores",
            flush=True,
        )


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--minutes", type=float, default=42.0, help="no cell begins later")
    ask.add_argument("--only", nargs="*", default=[], metavar="PART", help="table, outer, selsync, gossip, real")
    ask.add_argument("--cells", type=int, default=None, help="at most so many")
    ask.add_argument("--workers", type=int, default=CORES, help="cells at a time")
    ask.add_argument("--plan", action="store_true", help="say what would be run, and how long it would take")
    ask.add_argument("--page-only", action="store_true")
    a = ask.parse_args()
    until = time.time() + 60 * a.minutes
    if not a.page_only:
        costs = calibrated()
        say_plan(*planned(a.only), costs)
        if a.plan:
            return
        left = rounds(lambda: planned(a.only)[0][: a.cells], costs, until, workers=a.workers)
        if not a.only or "real" in a.only:
            on_real_ranks(costs, until)
        print(f"{left} cells are left: run it again" if left else "all cells are there", flush=True)
    PAGE.write_text(strategies_page.text())


if __name__ == "__main__":
    main()
