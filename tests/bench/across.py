"""Compares predicted with measured steps, bubbles and memory of models across ranks, one run per setting.

    python -m tests.bench.across --out docs/data/across.json

A run under DDP on a Link that no setting has calibrates the simulator: the delay of collectives, and a step's time
beyond compute and waiting. One more run for each codec and for K-FAC measures their arithmetic. Compute is paced, so
ranks on few cores behave like devices. The file keeps all measurements: an interrupted campaign resumes, and new
settings are measured alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.cells import costs_as_plain, costs_from_plain
from tests.bench.words import Goal, listed
from workbench import Experiment, Lab, analysis, simulate
from workbench.compressors import Cast, TopK
from workbench.fabric import Fabric, Link
from workbench.optimizers import AdamW
from workbench.partitions import Pipeline, Tensor
from workbench.partitions.schedules import GPipe, Interleaved, OneFOneB, PipeDream, PipeDream2BW, ZeroBubble
from workbench.run import Run
from workbench.sim import Costs
from workbench.strategies import (
    HSDP,
    KFAC,
    HierarchicalLocalSGD,
    HpZ,
    LocalSGD,
    ZeRO1,
    ZeRO2,
    ZeRO3,
    ZeROInfinity,
    ZeROOffload,
)
from workbench.tasks import ByteGPT

RANKS, SETTLE, STEPS = 4, 4, 12  # steps before counting; whole rounds of every strategy after it
WHOLE, CUT = 400.0, 1600.0  # ms of a step's compute on a whole model; four ranks on two cores can keep both
ASKED = 0.05  # median error of a step
KNOWN = Experiment(
    task=ByteGPT(layers=6), ranks=RANKS, steps=SETTLE + STEPS, pace=WHOLE, eval_every=0, batch=8, bucket_mb=1.0,
    optimizer=AdamW(), fabric=Fabric(link=Link(bandwidth=500, latency=0.5), host=0.4),
)  # fmt: skip
LINKS = (Link(bandwidth=150, latency=0.2), Link(bandwidth=1000, latency=2))
SHARDED = {
    "ZeRO1": ZeRO1(), "ZeRO2": ZeRO2(), "ZeRO3": ZeRO3(), "HSDP": HSDP(), "ZeROOffload": ZeROOffload(),
    "ZeROInfinity, host": ZeROInfinity(on="host"),
}  # fmt: skip
CUTS = {
    "naive, 4 stages": Pipeline(stages=4, micros=1),
    "GPipe, 4 stages, m = 8": Pipeline(stages=4, micros=8, schedule=GPipe()),
    "1F1B, 4 stages, m = 8": Pipeline(stages=4, micros=8, schedule=OneFOneB()),
    "1F1B, 2 stages, m = 4": Pipeline(stages=2, micros=4, schedule=OneFOneB()),
    "interleaved, 2 stages, m = 4": Pipeline(stages=2, micros=4, schedule=Interleaved()),
    "ZB-H1, 4 stages, m = 8": Pipeline(stages=4, micros=8, schedule=ZeroBubble()),
    "PipeDream, 4 stages": Pipeline(stages=4, micros=1, schedule=PipeDream()),
    "2BW, 4 stages, m = 4": Pipeline(stages=4, micros=4, schedule=PipeDream2BW()),
    "slices, 2 ways": Tensor(ways=2),
    "slices, 2 ways, sequence": Tensor(ways=2, sequence=True),
    "slices, 4 ways": Tensor(ways=4),
    "1F1B of slices, 2 stages, m = 4": Pipeline(stages=2, micros=4, of=Tensor(ways=2)),
}
SITES = Fabric(link=Link(bandwidth=1000, latency=0.2), site=2, between_bandwidth=120, between_latency=4, host=0.4)
ON_SITES: dict[str, Any] = {
    "ZeRO1": ZeRO1(), "ZeRO3": ZeRO3(), "HSDP, shards in a site": HSDP(group=2), "hpZ, second shards in a site": HpZ(),
    "HierarchicalLocalSGD": HierarchicalLocalSGD(group=2, group_every=2, every=4),
    "1F1B, 4 stages, m = 8": CUTS["1F1B, 4 stages, m = 8"], "1F1B, 2 stages, m = 4": CUTS["1F1B, 2 stages, m = 4"],
    "interleaved, 2 stages, m = 4": CUTS["interleaved, 2 stages, m = 4"], "slices, 2 ways": Tensor(ways=2),
    "slices, 4 ways": Tensor(ways=4),
    "1F1B of slices, 2 stages, m = 4": CUTS["1F1B of slices, 2 stages, m = 4"],
}  # fmt: skip
BF16 = Cast(to="bf16")
CODED = {
    "1F1B, 4 stages, m = 8, bf16 between": Pipeline(stages=4, micros=8, activations=BF16, gradients=BF16),
    "1F1B, 2 stages, m = 4, top-k 10 % between": Pipeline(stages=2, micros=4, activations=TopK(density=0.1)),
    "slices, 2 ways, bf16 inside": Tensor(ways=2, activations=BF16, gradients=BF16),
}


def calibrations() -> dict[str, Experiment]:
    """Returns the runs that measure costs, by name: each adds the costs of one setting."""
    coded = {name: replace(KNOWN, compressor=codec) for name, codec in (("bf16", BF16), ("top-k", TopK.usual()))}
    return {"DDP": KNOWN, **coded, "KFAC": replace(KNOWN, strategy=KFAC())}


def settings() -> Iterator[tuple[str, Experiment]]:
    """Yields the experiments to predict, by name; none is a calibration run."""
    for link in LINKS:
        e = replace(KNOWN, fabric=replace(KNOWN.fabric, link=link))
        wire = f"{link.bandwidth:g} Mbit/s, {link.latency:g} ms"
        for name, strategy in SHARDED.items():
            yield f"{name}, {wire}", replace(e, strategy=strategy)
        for name, partition in CUTS.items():
            yield f"{name}, {wire}", replace(e, partition=partition, pace=CUT)
        between = replace(e, strategy=LocalSGD(every=4), partition=Pipeline(stages=2, micros=4), pace=CUT)
        yield f"LocalSGD between 2 pipelines, {wire}", between
        yield f"KFAC, {wire}", replace(e, strategy=KFAC())
    for name, partition in CODED.items():  # on the slower link, where they pay off
        slow = replace(KNOWN.fabric, link=LINKS[0])
        yield f"{name}, {LINKS[0].bandwidth:g} Mbit/s", replace(KNOWN, fabric=slow, partition=partition, pace=CUT)
    there = replace(KNOWN, fabric=SITES)
    for name, way in ON_SITES.items():
        cut = isinstance(way, Pipeline | Tensor)
        yield f"{name}, two sites", replace(there, partition=way, pace=CUT) if cut else replace(there, strategy=way)
    between = replace(there, strategy=LocalSGD(every=4), partition=Pipeline(stages=2, micros=4), pace=CUT)
    yield "LocalSGD between 2 pipelines, one on each of two sites", between


def seen(run: Run) -> dict[str, Any]:
    """Returns the mean step in seconds, the bubble (if any) and each rank's peak in bytes."""
    tl, stop = run.timeline, SETTLE + STEPS
    bubble = analysis.measure_bubble(tl, STEPS)
    return {
        "step": float(np.mean(analysis.break_down(tl, SETTLE, stop).seconds)),
        "bubble": bubble.share if bubble else None,
        "peaks": [m.peak for m in analysis.measure_memory(tl, SETTLE, stop)],
    }


def errors(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Returns the prediction errors by quantity and setting: a difference for bubbles, else relative.

    A peak is that of the rank with the worst prediction.
    """
    pairs = [(r["measured"], r["predicted"]) for r in rows]
    return {
        "step": [there["step"] / seen["step"] - 1 for seen, there in pairs],
        "bubble": [there["bubble"] - seen["bubble"] for seen, there in pairs if seen["bubble"] is not None],
        "peak": [max((b / a - 1 for a, b in zip(seen["peaks"], there["peaks"], strict=True)), key=abs)
                 for seen, there in pairs],
    }  # fmt: skip


def step_errors(found: dict[str, Any]) -> list[float]:
    """Returns the size of each relative error of a step."""
    return [abs(off) for off in errors(found["rows"])["step"]]


def goals(found: dict[str, Any]) -> list[Goal]:
    return [Goal("median error", statistics.median(step_errors(found)), ASKED)]


def section(found: dict[str, Any]) -> str:
    """Returns the section of docs/project/prediction.md about models across ranks, from the raw numbers."""
    rows, off = found["rows"], errors(found["rows"])
    lines = [
        "| setting | step, measured (ms) | step, predicted (ms) | step, error | bubble, measured | bubble, predicted "
        "| peak memory, error |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r, step, peak in zip(rows, off["step"], off["peak"], strict=True):
        a, b = r["measured"], r["predicted"]
        bubble = "| |" if a["bubble"] is None else f"| {a['bubble']:.3f} | {b['bubble']:.3f}"
        times = f"{a['step'] * 1e3:.0f} | {b['step'] * 1e3:.0f} | {step:+.1%}"
        lines.append(f"| {r['setting']} | {times} {bubble} | {peak:+.1%} |")
    table = "\n".join(lines)
    return (
        f"{found['ranks']} real ranks train ByteGPT of six layers, with one run for each setting. A step has {WHOLE:g} "
        f"ms of paced compute if a replica is one rank, and {CUT:g} ms if it is several ranks. Other runs calibrate "
        f"the simulator: DDP on 500 Mbit/s{_also(found)}. The measured step is the mean of {found['steps']} steps. The "
        "simulation has no tensor values.\n\n"
        "- Slices are tensor parallelism. The number of micro-batches is m.\n"
        "- A bubble is the share of the passes' time in which stages stand still.\n"
        "- A peak is the largest memory of a rank. The table shows the rank with the worst prediction.\n"
        f"{_sites(rows)}\n"
        f"{_overview(rows)}\n"
        f"Steps: {goals(found)[0]}. The raw numbers are in `docs/data/across.json`.\n\n"
        f"{table}\n"
    )


def _also(found: dict[str, Any]) -> str:
    also = [name for name in found.get("costs", ()) if name != "DDP"]
    return f", and {listed(also)} on the same link" if also else ""


def _on_sites(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "two sites" in row["setting"]]


def _sites(rows: list[dict[str, Any]]) -> str:
    """Returns the links of the two sites, if a setting has them."""
    if not _on_sites(rows):
        return ""
    fabric, link = SITES, SITES.link
    return (
        f"- Each of two sites has {fabric.site} ranks. A link in a site has {link.bandwidth:g} Mbit/s and "
        f"{link.latency:g} ms. A link between the sites has {fabric.between_bandwidth:g} Mbit/s and "
        f"{fabric.between_latency:g} ms.\n"
    )


def _overview(rows: list[dict[str, Any]]) -> str:
    """Returns the table of the errors by quantity: a difference for bubbles, else relative."""
    off = errors(rows)
    there = errors(_on_sites(rows))["step"]
    kinds = [("step", off["step"], ".1%"), ("step on two sites", there, ".1%"), ("peak memory", off["peak"], ".1%"),
             ("bubble (difference)", off["bubble"], ".3f")]  # fmt: skip
    lines = ["| quantity | settings | median error | worst error |", "| --- | --- | --- | --- |"]
    for name, each, shown in kinds:
        if sizes := [abs(x) for x in each]:
            lines.append(f"| {name} | {len(sizes)} | {statistics.median(sizes):{shown}} | {max(sizes):{shown}} |")
    return "\n".join(lines) + "\n"


class Campaign:
    """The measurements so far, and the functions that make the remaining ones."""

    def __init__(self, out: Path | None, ran: Callable[[Experiment], Run]) -> None:
        self._out, self._ran = out, ran
        self.found: dict[str, Any] = {"ranks": RANKS, "steps": STEPS, "costs": {}, "rows": []}
        if out and out.exists():
            self.found |= json.loads(out.read_text())

    def costs(self) -> Costs:
        """Returns the costs of all calibrations together; runs each of them once."""
        known = self.found["costs"]
        for name, e in calibrations().items():
            if name not in known:
                known[name] = costs_as_plain(Costs.measured(self._ran(e)))
                self._keep()
                print(f"calibrated: {name}", flush=True)
        first, *others = (costs_from_plain(known[name]) for name in calibrations())
        for other in others:
            first = first | other
        return first

    def measure(self, every: Iterable[tuple[str, Experiment]]) -> None:
        """Measures the settings that are not yet in the file."""
        there = {row["setting"] for row in self.found["rows"]}
        if not (left := [(name, e) for name, e in every if name not in there]):
            return
        costs = self.costs()
        for name, e in left:
            expected, found = seen(simulate(e, costs=costs)), seen(self._ran(e))
            self.found["rows"].append({"setting": name, "measured": found, "predicted": expected})
            self._keep()
            print(f"{name}: {found['step'] * 1e3:.0f} ms, predicted {expected['step'] * 1e3:.0f}", flush=True)

    def _keep(self) -> None:
        if self._out:
            self._out.write_text(json.dumps(self.found, indent=1))


def minutes(every: Iterable[Experiment]) -> float:
    """Estimates the minutes of these runs: paced steps, 20 % for links and five seconds per start."""
    return sum(1.2 * e.pace * 1e-3 * e.steps + 5.0 for e in every) / 60


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=None)
    ask.add_argument("--runs", type=Path, default=Path("runs"))
    ask.add_argument("--only", nargs="*", default=[], metavar="WORD", help="settings whose names hold one of these")
    ask.add_argument("--list", action="store_true", help="say what would be measured")
    a = ask.parse_args()
    wanted = [(n, e) for n, e in settings() if not a.only or any(word in n for word in a.only)]
    if a.list:
        took = minutes([*calibrations().values(), *(e for _, e in wanted)])
        return print("\n".join(n for n, _ in wanted), f"\n{len(wanted)} settings, about {took:.0f} minutes")
    with Lab(ranks=RANKS, name="across") as lab:
        campaign = Campaign(a.out, lambda e: lab.run(e, out=a.runs / f"across-{time.time():.0f}").wait(600))
        campaign.measure(wanted)
    for kind, off in errors(campaign.found["rows"]).items():
        if off:
            middle, worst = statistics.median(map(abs, off)), max(map(abs, off))
            print(f"{kind}: off by {middle:.3f} in the median, {worst:.3f} at worst")


if __name__ == "__main__":
    main()
