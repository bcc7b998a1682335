"""Measures each method under its paper's conditions, tuned like its baseline.

    python -m tests.bench.home [--minutes 60] [--only METHOD ...] [--workers 2] [--plan] [--confirm] [--page-only]

Runs use the simulator with real tensors and a virtual clock, so other load only makes the campaign slower. Results are
kept cell by cell in docs/data/home/, and an interrupted campaign resumes. A cell runs again if its inputs changed: its
settings, costs or strategy. `--confirm` checks whether the rest of the code still gives the same results: it repeats a
few cells of each row, and measures the row again if they differ. The campaign writes the first table of
docs/project/strategies.md.
"""

from __future__ import annotations

import argparse
import datetime
import math
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any
from zlib import crc32

import torch

from tests.bench import strategies, strategies_page
from tests.bench.__main__ import machine
from tests.bench.cells import costs_as_plain, key
from tests.bench.home_claims import CLAIMS
from tests.bench.home_looks import Claim, wanted
from tests.bench.home_page import DATA
from tests.bench.home_rows import FRESH, SEEDS, Book, Row, Trial, short, told
from workbench.settings import KnobError
from workbench.sim import Costs

Asked = tuple[Row, Trial, int]


class Campaign:
    """Runs the cells of claims, one claim after the other, and keeps each cell at once.

    until: no cell begins later; workers: single-threaded processes, each with a cell
    """

    def __init__(self, costs: Costs, book: Book, until: float, workers: int = 1) -> None:
        self.costs, self.book, self.until, self.workers = costs, book, until, workers
        self.failed: set[str] = set()
        self._keys: dict[str, str] = {}
        self.about = {"commit": machine()["commit"], "date": datetime.date.today().isoformat()}

    def key(self, row: Row, trial: Trial, seed: int) -> str:
        """Returns the hash of a cell's inputs; "" if it cannot run."""
        name = f"{row.name} {told(trial)} {seed}"
        if name not in self._keys:
            try:
                self._keys[name] = key(row.cell(trial, seed), self.costs)
            except KnobError:
                self._keys[name] = ""
        return self._keys[name]

    def there(self, row: Row, trial: Trial, seed: int) -> bool:
        """Whether a kept cell has unchanged inputs, or the cell has failed in this campaign."""
        if f"{row.name} {told(trial)} {seed}" in self.failed:
            return True
        line = self.book.line(row, trial, seed)
        return line is not None and line["key"] == self.key(row, trial, seed)

    def run(self, claims: Iterable[Claim]) -> bool:
        """Runs all cells of these claims; returns False if the time ended first."""
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.workers, spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for claim in claims:
                while todo := wanted(claim, self.book, self.there):
                    if not self._batch(pool, todo):
                        return False
        return not self.failed

    def _batch(self, pool: ProcessPoolExecutor, todo: list[Asked]) -> bool:
        under_way: dict[Future[Any], Asked] = {}
        plain = costs_as_plain(self.costs)
        while (todo and time.time() < self.until) or under_way:
            while todo and len(under_way) < self.workers and time.time() < self.until:
                row, trial, seed = todo.pop(0)
                under_way[pool.submit(strategies.ran, row.cell(trial, seed), plain)] = row, trial, seed
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                self._take(future, *under_way.pop(future), left=len(todo))
        return not todo

    def _take(self, future: Future[Any], row: Row, trial: Trial, seed: int, left: int) -> None:
        cell = row.cell(trial, seed)
        said = f"{cell.row}, {cell.where}, seed {seed}"
        if (error := future.exception()) is not None:
            self.failed.add(f"{row.name} {told(trial)} {seed}")
            print(f"{said} FAILED: {type(error).__name__}: {error}", flush=True)
            return
        found, seconds = future.result()
        about = {"key": self.key(row, trial, seed), "seconds": round(seconds, 1), **self.about}
        self.book.keep(row, trial, seed, found, **about)
        result = found.get("refused") or (found["curve"][-1][2] if found["curve"] else found["samples_per_s"])
        print(f"{said}: {result} ({seconds:.1f} s; {left} left of these)", flush=True)


CONFIRM = 4  # cells of a row to repeat before the row is kept
ROUNDING = 2e-5  # allowed difference of numbers with six digits, because processors sum in different orders


def confirm(claims: Iterable[Claim], campaign: Campaign) -> None:
    """Repeats a few cells of each row, chosen by name, first those measured with other code.

    If they agree, the row is kept as a result of the present code. Otherwise all of it must run again.
    """
    plain = costs_as_plain(campaign.costs)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(campaign.workers, spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for row in rows(claims):
            keys = [(line, campaign.key(row, line["trial"], line["seed"])) for line in campaign.book.kept(row)]
            able = [(line["key"] == key, crc32(f"{told(line['trial'])} {line['seed']}".encode()), line)
                    for line, key in keys if key]  # fmt: skip
            few = [line for _, _, line in sorted(able, key=lambda one: one[:2])[:CONFIRM]]
            if not few or time.time() > campaign.until:
                continue
            cells = [row.cell(line["trial"], line["seed"]) for line in few]
            ran = [found for found, _ in pool.map(strategies.ran, cells, [plain] * len(few))]
            same = [alike(short(found), line["found"]) for found, line in zip(ran, few, strict=True)]
            about = {**campaign.about, "cells": len(few)}
            campaign.book.renew(row, [{**line, "key": key if all(same) else "", "confirmed": about} if key else line
                                      for line, key in keys])  # fmt: skip
            kept = "all" if all(same) else "none"
            print(f"{row.name}: {sum(same)} of {len(few)} the same, {kept} of {len(able)} kept", flush=True)


def alike(a: Any, b: Any) -> bool:
    """Whether two results have the same strings and shapes, and numbers that differ only by rounding.

    >>> alike({"curve": [(0, 2.16768)]}, {"curve": [[0, 2.16769]]}), alike([1.0], [1.001])
    (True, False)
    """
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=ROUNDING) or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def rows(claims: Iterable[Claim]) -> Iterator[Row]:
    """Yields each row once."""
    yield from {row.name: row for claim in claims for row in (claim.against, claim.row)}.values()


def say_plan(claims: Iterable[Claim], campaign: Campaign) -> None:
    """Prints how many cells of each row's grid and winner exist."""
    for row in rows(claims):
        trials = row.trials()
        kept = sum(campaign.there(row, trial, seed) for trial in trials for seed in SEEDS)
        steps = row.regime.ranks * (row.regime.after + row.regime.steps)
        more = f"{len(FRESH)} more or beyond an edge; {steps} steps of a rank each"
        print(f"{row.name}: {kept} of {len(trials) * len(SEEDS)} cells of its grid, then {more}")


def chosen(only: Iterable[str]) -> list[Claim]:
    """Returns the claims of these methods in this order, or all claims. Raises KnobError."""
    names = list(only)
    if unknown := [name for name in names if all(name != claim.method for claim in CLAIMS)]:
        raise KnobError(f"--only {unknown[0]}: no such claim; there are {', '.join(claim.method for claim in CLAIMS)}")
    return [claim for name in names for claim in CLAIMS if claim.method == name] or list(CLAIMS)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--minutes", type=float, default=60.0, help="no cell begins later")
    ask.add_argument("--only", nargs="*", default=[], metavar="METHOD", help="claims as the page names them")
    ask.add_argument("--workers", type=int, default=strategies.CORES, help="cells at a time, of one thread each")
    ask.add_argument("--plan", action="store_true", help="list existing results, and run nothing")
    ask.add_argument("--confirm", action="store_true", help="run a few cells of each row again: is it still true?")
    ask.add_argument("--page-only", action="store_true")
    a = ask.parse_args()
    try:
        claims = chosen(a.only)
    except KnobError as reason:
        ask.error(str(reason))
    if not a.page_only:
        campaign = Campaign(strategies.calibrated(), Book(DATA), time.time() + 60 * a.minutes, a.workers)
        if a.plan:
            say_plan(claims, campaign)
            return
        if a.confirm:
            confirm(claims, campaign)
            return
        print("all is there" if campaign.run(claims) else "something is left: run it again", flush=True)
    strategies.PAGE.write_text(strategies_page.text())


if __name__ == "__main__":
    main()
