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
        "Our `Pipeline` with recording on against `torch.distributed.pipelining` (`PipelineStage`, `ScheduleGPipe`,"
        " `Schedule1F1B`, `ScheduleInterleaved1F1B`) in a plain loop over gloo, in alternating blocks of one run: four"
        f" ranks, {cells[0]['micros']} micro-batches, eight equal layers that sleep 10 ms forward and 20 ms backward on"
        " either side, in double precision. The bubble is the share of the time from the first pass to the last that a"
        " stage stands still, by the layers' own clocks. Before the blocks one step of each is compared: the largest"
        " difference of any gradient over the largest gradient. Medians of"
        f" {len(ratios([row[:4] for row in cells[0]['rows']])['ours'])} rounds with a 95 % bootstrap interval."
    )
    head = ["schedule", "torch's step", "ours / torch, throughput", "torch / torch (A/A)", "bubble, ours",
            "bubble, torch's", "formula", "gradients apart by"]  # fmt: skip
    far = max(c["apart"] for c in cells)
    verdict = "kept" if far <= CLOSE else "MISSED"
    said = f"Asked of gradients: within {CLOSE:g}. The furthest are {far:.1e} apart: {verdict}."
    left = (
        "Not compared: zero bubble. torch's (`ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble`) want at least"
        " two stages on each rank; ZB-H1 has one, and its own bubble, so neither would be a yardstick for the other."
    )
    return f"{about}\n\n{table(head, rows)}\n{said}\n\n{left}\n"
