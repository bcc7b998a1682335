"""Writes the page's section on torch's own schedules next to ours."""

from __future__ import annotations

import statistics
from typing import Any

from tests.bench.ddp import ratios
from tests.bench.page import interval, table

CLOSE = 1e-6  # required of gradients


def section(cells: list[dict[str, Any]]) -> str:
    """Returns step time and bubble of our and torch's schedules, and the distance of their gradients."""
    rows = []
    for c in cells:
        r = ratios([row[:4] for row in c["rows"]])
        ours, control = interval(r["ours"]), interval(r["control"])
        step = statistics.median(row[3] for row in c["rows"] if row[1] == "torch") * 1e3
        still = {s: statistics.median(row[4] for row in c["rows"] if row[1] == s) for s in ("ours", "torch")}
        formula = (c["stages"] - 1) / (c["pieces"] * c["micros"] + c["stages"] - 1)
        rows.append([c["name"], f"{step:.0f} ms", "{:.3f} ({:.3f} to {:.3f})".format(*ours),
                     "{:.3f} ({:.3f} to {:.3f})".format(*control), f"{still['ours']:.3f}", f"{still['torch']:.3f}",
                     f"{formula:.3f}", f"{c['apart']:.1e}"])  # fmt: skip
    about = (
        "Ours is `Pipeline` with recording on. Torch's is `torch.distributed.pipelining` (`PipelineStage`, "
        "`ScheduleGPipe`, `Schedule1F1B`, `ScheduleInterleaved1F1B`) in a plain loop over gloo. Both run in "
        f"alternating blocks of one run, on four ranks with {cells[0]['micros']} micro-batches. The model has eight "
        "equal layers in double precision. A layer sleeps 10 ms forward and 20 ms backward on either side. The bubble "
        "is the share of time in which a stage is idle, from the first pass to the last one, by the layers' own "
        f"clocks. Values are medians of {len(ratios([row[:4] for row in cells[0]['rows']])['ours'])} rounds, with a 95 "
        "% bootstrap interval. The last column compares how one step of plain SGD changes the weights on both sides, "
        "before the blocks. It is the largest difference divided by the largest change, which is that of the "
        "gradients."
    )
    head = ["schedule", "torch's step", "throughput, ours / torch", "A/A control, torch / torch", "our bubble",
            "torch's bubble", "bubble by formula", "difference of gradients"]  # fmt: skip
    far = max(c["apart"] for c in cells)
    verdict = "kept" if far <= CLOSE else "MISSED"
    said = f"Gradients differ by at most {far:.1e} (goal: within {CLOSE:g}): {verdict}."
    left = (
        "Zero bubble is not compared. Torch's `ScheduleInterleavedZeroBubble` and `ScheduleZBVZeroBubble` need at "
        "least two stages on each rank. ZB-H1 has one stage on each rank, and a bubble of its own. So neither is a "
        "yardstick for the other."
    )
    return f"{about}\n\n{table(head, rows)}\n{said}\n\n{left}\n"
