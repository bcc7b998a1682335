"""Measures every compressor on four links against dense fp32 and bf16, for docs/project/compression.md.

    python -m tests.bench.compression [--minutes 30] [--only PART ...] [--page-only]

Under DDP the losses do not depend on the link. So the loss by step is found once per compressor, in the simulator with
real tensors. The time of a step is found once per compressor and link, on real ranks at a stated pace. Their product is
the time to a loss, and one complete run per link verifies it. Measurements with unchanged inputs are not repeated.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tests.bench import compression_page as page
from tests.bench import compression_studies as studies
from tests.bench import compression_tuned as tuned
from tests.bench.__main__ import ROOT, machine
from tests.bench.beside import seconds
from tests.bench.cells import RANKS, SEEDS, Cell, Results, keep, kept, reached
from tests.bench.slow_link import curve
from tests.bench.strategies import CORES, campaign, rounds
from workbench.compressors import Compressor
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.lab import Lab
from workbench.run import Run
from workbench.settings import KnobError, from_plain, members, to_plain
from workbench.sim import Costs
from workbench.tasks import ByteGPT

DATA = ROOT / "docs" / "data" / "compression"
PAGE = ROOT / "docs" / "project" / "compression.md"
TASK = ByteGPT(layers=2, width=96, heads=4, context=32)
STEPS, EVERY, BUCKET = 300, 20, 0.25
PACE, SETTLE, COUNTED = 60.0, 4, 20  # ms of compute per step; steps before counting, counted steps
LINKS = {"unlimited": 0.0, "1 Gbit/s": 1000.0, "200 Mbit/s": 200.0, "50 Mbit/s": 50.0}
COSTS = Costs(forward=0.01, backward=0.02, update=0.005)  # of the simulated runs, whose times are not used
WRAPPERS = {"ErrorFeedback", "WarmUp", "Layers"}  # their results depend on the wrapped compressor
SETTINGS: dict[str, Any] = {  # instead of the bare name's settings: DGC's momentum is SGD's, and the task has AdamW
    "Dense": "Dense", "Cast(to=bf16)": {"Cast": {"to": "bf16"}}, "DGC(momentum=0)": {"DGC": {"momentum": 0.0}},
}  # fmt: skip


def rows() -> dict[str, Any]:
    """Returns the compressors to measure by label: dense, bf16, then each with its bare name's settings."""
    found, left_out = dict(SETTINGS), WRAPPERS | {label.partition("(")[0] for label in SETTINGS}
    for name, cls in members(Compressor).items():
        if cls.__module__.startswith("workbench.") and name not in left_out:
            found[name] = to_plain(cls.usual())
    return found


def losses(part: str = "loss") -> list[Cell]:
    """Returns the cells of loss by step, seed by seed; `part` is one of LOSSES."""
    return [
        Cell(part=part, row=label, where="any link", seed=seed, method="DDP", codec=codec, task=TASK,
             steps=STEPS, every=EVERY, bucket_mb=BUCKET)
        for seed in SEEDS for label, codec in LOSSES[part]().items()
    ]  # fmt: skip


LOSSES: dict[str, Callable[[], dict[str, Any]]] = {
    "loss": rows, "accordion": studies.accordions, "levels": studies.rounders,
}  # fmt: skip


def fabric(link: str) -> Fabric:
    return Fabric(link=Link(bandwidth=LINKS[link], latency=0.2 if LINKS[link] else 0.0))


def steps() -> list[Cell]:
    """Returns the cells of step times by link, with a second dense run at the end as a control."""
    return [
        Cell(part="step", row=label, where=link, seed=0, method="DDP", codec=codec, task=TASK, fabric=fabric(link),
             steps=SETTLE + COUNTED, every=0, bucket_mb=BUCKET)
        for link in LINKS for label, codec in (*rows().items(), (page.AGAIN, "Dense"))
    ]  # fmt: skip


def experiment(cell: Cell) -> Experiment:
    """Returns a cell's experiment with a pace."""
    return replace(cell.asked()[0], pace=PACE)


def stepped(lab: Lab, cell: Cell) -> dict[str, Any]:
    """Runs 20 paced steps on real ranks: seconds, bytes per rank, seconds of codec work and waiting."""
    run = ended(lab, experiment(cell), 120)
    spans = run.timeline.spans.rows()
    spans = spans[spans.step >= SETTLE]

    def per_step(lane: str, column: np.ndarray) -> float:
        return float(column[spans.equal("lane", lane)].sum() / RANKS / COUNTED)

    lasts = spans.t1 - spans.t0
    return {
        "step_s": seconds(run), "bytes": per_step("comm", spans.nbytes), "codec_s": per_step("codec", lasts),
        "wait_s": per_step("wait", lasts),
    }  # fmt: skip


def stamp() -> dict[str, Any]:
    return {"commit": machine()["commit"], "date": datetime.date.today().isoformat()}


def ended(lab: Lab, e: Experiment, limit: float) -> Run:
    run = lab.run(e)
    run.wait(limit)
    if run.state != "done":
        raise RuntimeError(f"{e.compressor} ended as {run.state}")
    return run


def in_full(found: Any) -> Iterator[tuple[Cell, float, float]]:
    """Yields (cell, target loss, predicted seconds) for dense and for each link's winner."""
    for link in LINKS:
        best = page.ranking(found, link)
        for label in dict.fromkeys(["Dense", *(row.label for row in best[:1])]):
            row = next((r for r in best if r.label == label), None)
            if row is not None and row.time:
                count = min(STEPS, int(row.steps * 1.25 / EVERY + 1) * EVERY)
                cell = Cell(part="full", row=label, where=link, seed=0, method="DDP", codec=rows()[label], task=TASK,
                            fabric=fabric(link), steps=count, every=EVERY, bucket_mb=BUCKET)  # fmt: skip
                yield cell, page.target(found), row.time


def real(until: float, only: set[str]) -> None:
    """Runs the cells on real ranks."""
    now = stamp()
    with Lab(ranks=RANKS, name="compression") as lab:
        for cell in steps() if not only or "step" in only else ():
            if kept(cell, COSTS, DATA) is not None or time.time() > until:
                continue
            try:
                values = stepped(lab, cell)
            except Exception as error:  # a cell that fails must not stop the next ones
                print(f"{cell.row}, {cell.where} failed on real ranks: {error}", flush=True)
                continue
            keep(cell, COSTS, values, DATA, **now)
            print(f"{cell.row}, {cell.where}: {values['step_s'] * 1e3:.1f} ms", flush=True)
        for cell, goal, product in list(in_full(page.results(DATA))) if not only or "full" in only else ():
            if kept(cell, COSTS, DATA) is not None or time.time() > until:
                continue
            run = ended(lab, experiment(cell), 600)
            values = {"target": goal, "product_s": product, "time_s": reached(curve(run), goal)}
            keep(cell, COSTS, values, DATA, **now)
            print(f"in full, {cell.row}, {cell.where}: {values}", flush=True)


def possible(cells: list[Cell]) -> list[Cell]:
    """Returns the cells whose compressor exists with these knobs."""
    good = []
    for cell in cells:
        try:
            from_plain(cell.codec, Compressor)
        except KnobError as reason:
            print(f"skipped {cell.row}: {reason}")
        else:
            good.append(cell)
    return good


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--minutes", type=float, default=30.0, help="no cell begins later")
    ask.add_argument("--workers", type=int, default=CORES, help="simulated cells at a time")
    known = f"{', '.join(LOSSES)}, tuned, step, full, studies"
    ask.add_argument("--only", nargs="*", default=[], metavar="PART", help=known)
    ask.add_argument("--page-only", action="store_true")
    a = ask.parse_args()
    until, only = time.time() + 60 * a.minutes, set(a.only)
    if not a.page_only:
        cells = [cell for part in LOSSES if not only or part in only for cell in losses(part)]
        left = campaign(possible(cells), COSTS, until, DATA, a.workers)
        if not only or "tuned" in only:
            left += rounds(lambda: tuned.cells(Results.of(DATA)), COSTS, until, DATA, a.workers)
        if not only or only & {"step", "full"}:
            real(until, only)
        if (not only or "studies" in only) and time.time() < until:
            studies.measure(DATA / "studies", TASK, stamp())
        print(f"{left} cells are left: run it again" if left else "all simulated cells are there", flush=True)
    PAGE.write_text(page.text(DATA, ROOT / "docs" / "data"))


if __name__ == "__main__":
    main()
