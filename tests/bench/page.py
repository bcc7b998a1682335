# ruff: noqa: E501
"""Writes the sections of the benchmark pages from the raw samples, without any number typed by hand."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench import activations, activations_tuned, beyond, named_page, planning, scale, tuned
from tests.bench.ddp import ratios
from tests.bench.netns import excess, ratio, step

BEFORE = Path(__file__).parents[2] / "docs" / "data" / "ddp_before.json"  # cells of `ddp` under the old layout


def interval(values: list[float]) -> tuple[float, float, float]:
    """Returns (median, low, high) with the bootstrap's 95 % interval of the median."""
    x, rng = np.array(values), np.random.default_rng(0)
    medians = np.median(rng.choice(x, (2000, len(x))), axis=1)
    return float(np.median(x)), *map(float, np.quantile(medians, [0.025, 0.975]))


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(r) + " |" for r in [head, ["---"] * len(head), *rows]) + "\n"


def ddp(cells: list[dict[str, Any]]) -> str:
    """Section: engine DDP against torch's own."""
    about = (
        "Our engine with recording on against `DistributedDataParallel(gradient_as_bucket_view=True, static_graph=True)`"
        " in a plain loop, in alternating blocks of one run; median of rounds with its 95 % bootstrap interval."
    )
    before = json.loads(BEFORE.read_text())
    was, low, high = _mean_ratio(before)
    now = f"{_mean_ratio(cells)[1]:.3f} to {_mean_ratio(cells)[2]:.3f}"
    said = (
        f"Before each bucket had memory of its own (commit 4568013, 2026-11-22, the same cells on the same kind of machine;"
        f" `docs/data/ddp_before.json`) the geometric mean was {was:.3f} ({low:.3f} to {high:.3f}); since then {now}.\n"
    )
    return _against(about, cells, asked=1.0, floor=0.97) + said


def _mean_ratio(cells: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Returns (geometric mean over cells of ours / torch, low, high), a 95 % interval by resampling each cell's
    rounds.
    """
    rng, found = np.random.default_rng(0), [np.log(ratios(c["rows"])["ours"]) for c in cells]
    drawn = np.mean([np.median(rng.choice(x, (2000, len(x))), axis=1) for x in found], axis=0)
    mid = float(np.mean([np.median(x) for x in found]))
    return math.exp(mid), *np.exp(np.quantile(drawn, [0.025, 0.975])).tolist()


def fsdp(cells: list[dict[str, Any]]) -> str:
    """Section: engine ZeRO3 against torch's own."""
    about = (
        "Our `ZeRO3` with recording on against FSDP2 (`fully_shard` on the transformer's blocks, or on modules of a bucket's"
        " size, and on the whole model) in a plain loop over gloo, in alternating blocks of one run; median of rounds with"
        " its 95 % bootstrap interval. With 1 MB both gather ByteGPT in three pieces, with 5 MB we in one and torch in three;"
        " the MLP is gathered layer by layer by both."
    )
    return _against(about, cells, asked=1.5, floor=1.5)


def _against(about: str, cells: list[dict[str, Any]], asked: float, floor: float) -> str:
    rows, middles, under = [], [], []
    for c in cells:
        r = ratios(c["rows"])
        mid, low, high = interval(r["ours"])
        control = interval(r["control"])
        middles.append(mid)
        name = f"{c['task']}, {c['ranks']} ranks, {c['bucket_mb']:g} MB"
        if high < floor:
            under.append(name)
        ms = statistics.median(x[3] for x in c["rows"] if x[1] == "torch") * 1e3
        peak = f"{c['peak_ours_kb'] / c['peak_torch_kb']:.3f}" if "peak_ours_kb" in c else ""
        rows.append(
            [
                name,
                f"{ms:.0f} ms",
                f"{mid:.3f} [{low:.3f}, {high:.3f}]",
                f"{control[0]:.3f} [{control[1]:.3f}, {control[2]:.3f}]",
                str(len(r["ours"])),
                peak,
            ]
        )
    mean = math.exp(sum(map(math.log, middles)) / len(middles))
    said = f"Geometric mean {mean:.3f} (asked: at least {asked:.2f}). "
    said += (
        f"Wholly under {floor:g}: {', '.join(under)}." if under else f"No cell's interval lies wholly under {floor:g}."
    )
    head = [
        "cell",
        "torch's step",
        "ours / torch, throughput",
        "torch / torch (A/A)",
        "rounds",
        "peak memory, ours / torch",
    ]
    return f"{about}\n\n{table(head, rows)}\n{said}\n"


def load(machine: dict[str, Any]) -> str:
    """Returns the machine's load, if it was recorded."""
    return f"15-minute load {machine['load']:.1f}" if "load" in machine else "load not noted"


def predict_bubble(cell: dict[str, Any]) -> float:
    """Returns the share of idle time by the schedule's formula."""
    slots = cell["micros"] * (3 if cell["name"] == "ZB-H1" else cell.get("pieces", 1))
    return float((cell["stages"] - 1) / (slots + cell["stages"] - 1))


def measure_bubble(cell: dict[str, Any]) -> float:
    """Returns the measured share of idle time, the median of blocks."""
    return statistics.median(b["bubble"] for b in cell["blocks"])


def keeps(value: float, sign: str, limit: float) -> bool:
    """Returns whether a value keeps its budget."""
    return value <= limit if sign == "<=" else value >= limit


def pipeline(cells: list[dict[str, Any]]) -> str:
    """Section: the bubble of real stages."""
    rows, off = [], []
    for c in cells:
        formula = predict_bubble(c)
        mid, low, high = interval([b["bubble"] for b in c["blocks"]])
        late = statistics.median(b["late"] for b in c["blocks"]) * 1e3
        off.append(abs(mid - formula))
        rows.append(
            [c["name"], str(c["micros"]), f"{formula:.3f}", f"{mid:.3f} ({low:.3f} to {high:.3f})", f"{late:.1f}"]
        )
    head = ["schedule", "micro-batches", "formula", "measured", "a pass ends late by, ms"]
    interleaved = " interleaved, a stage is v = 2 pieces;" if any(c.get("pieces", 1) > 1 for c in cells) else ""
    about = (
        "Four ranks as four stages of equal layers, forwards of a micro-batch through a piece of the model paced to 100 ms"
        f" and backwards to 200, or each of their halves to 100;{interleaved}"
        f" the share of the time from the first pass to the last that a stage stands still. Median of"
        f' {len(cells[0]["blocks"])} alternating blocks of one run with its 95 % bootstrap interval; rows "again"'
        " are the A/A control. A pass is its paced time and what sleeping takes longer, the median over passes."
    )
    formulas = f"(p-1) / ({'vm' if interleaved else 'm'}+p-1), of ZB-H1 (p-1) / (3m+p-1)"
    worst = f"Asked: within 0.05 of {formulas}. The furthest is {max(off):.3f} away."
    return f"{about}\n\n{table(head, rows)}\n{worst}\n"


def offload(cells: list[dict[str, Any]]) -> str:
    """Section: the cost of a model that does not fit."""
    base = [b["step"] for b in cells[0]["blocks"]]
    rows = []
    for c in cells:
        last = c["blocks"][-1]
        mid, low, high = interval([b["step"] / one for b, one in zip(c["blocks"], base, strict=True)])
        places = [f"{last[where] / 1e6:.1f}" for where in ("peak", "host", "disk", "moved")]
        rows.append([c["name"], f"{c['needs']:.1f}", *places, f"{mid:.3f} ({low:.3f} to {high:.3f})"])
    head = ["strategy", "admitted at, MB", "device, MB", "host, MB", "disk, MB", "moved a step, MB", "step / DDP's"]
    about = (
        "ByteGPT of six layers with AdamW on two ranks, compute paced to 240 ms a step, 0.2 GB/s between device and host"
        " and 0.1 GB/s to disk; one run, switched live. Admitted at: the least `memory_mb` at which a lab does not refuse"
        " it. What lies where is the most in a step on rank 0, what is moved goes to or from host and disk on rank 0."
        f" Steps are medians of blocks, each over that of the same round under DDP; {len(base)} alternating rounds with"
        " a 95 % bootstrap interval; the last row is the first again."
    )
    return f"{about}\n\n{table(head, rows)}\n"


def bound(rows: list[dict[str, Any]]) -> str:
    """Section: paced steps over their bound, and bytes against the formula."""
    best: dict[tuple[int, float], dict[str, Any]] = {}
    for r in rows:
        key = r["ranks"], r["wire"]
        if key not in best or statistics.median(r["steps"]) < statistics.median(best[key]["steps"]):
            best[key] = r
    out = [
        [
            f"{k[0]}",
            f"{k[1]:g}",
            f"{b['bucket_mb']:g} MB",
            f"{statistics.median(b['steps']) * 1e3:.0f} ms",
            f"{b['bound'] * 1e3:.0f} ms",
            f"{statistics.median(b['steps']) / b['bound']:.3f}",
        ]
        for k, b in best.items()
    ]
    worst = max(statistics.median(b["steps"]) / b["bound"] for b in best.values())
    exact = all(r["bytes"] == r["formula"] for r in rows)
    about = (
        "A step takes at least forward + max(backward, time until the first bucket is full + wire time of all "
        "buckets) + update. Paced, on an emulated Link, the best of the bucket sizes tried."
    )
    head = ["ranks", "wire / backward", "bucket", "step", "bound", "step / bound"]
    return (
        f"{about}\n\n{table(head, out)}\nWorst {worst:.3f} (asked: at most 1.10). "
        f"Payload bytes on the record {'equal' if exact else 'DIFFER FROM'} the formula's "
        "(2 (p-1)/p of each bucket, in whole bytes).\n"
    )


def live(d: dict[str, Any]) -> str:
    """Section: change latency, cost of recording, start-up."""
    rows = []
    for name in ("DDP", "LocalSGD"):
        late, steps = sorted(d[name]["late"]), d[name]["steps"]
        p99 = late[int(0.99 * (len(late) - 1))]
        free = sorted(t for t, held_up in zip(d[name]["late"], d[name]["held_up"], strict=True) if not held_up)
        length = float(np.quantile(steps, 0.99)) * d[name]["every"]
        rows.append(
            [
                name,
                str(len(late)),
                f"{statistics.median(late) * 1e3:.0f} ms",
                f"{p99 * 1e3:.0f} ms",
                f"{len(late) - len(free)}; {free[int(0.99 * (len(free) - 1))] * 1e3:.0f} ms",
                f"{length * 1e3 + 100:.0f} ms",
                "yes" if p99 <= length + 0.1 else "NO",
            ]
        )
    costs = []
    for name in ("DDP", "LocalSGD"):
        c = d[name]["recording"]
        own = (c["cpu_recording"] + c["cpu_appending"]) / c["cpu_process"]
        share = own + c["cpu_relaying"] / c["cpu_process"]
        costs.append(
            [
                name,
                f"{c['cpu_recording']:.2f} s",
                f"{c['cpu_appending']:.3f} s",
                f"{c['cpu_relaying']:.2f} s",
                f"{c['cpu_process']:.1f} s",
                f"{own:.2%}",
                f"{share:.2%}",
            ]
        )
    head = [
        "strategy",
        "changes",
        "median",
        "p99",
        "met an evaluation; p99 of the others",
        "allowed (p99 of a step, or of a round, + 100 ms)",
        "kept",
    ]
    cost_head = [
        "strategy",
        "recording and spooling",
        "writing rows down",
        "relaying, in the kernel",
        "the ranks' CPU time",
        "what they record of it (asked: 1 %)",
        "with relaying",
    ]
    first = ", ".join(f"{s:.1f} s" for s in d["first_loss"])
    return (
        f"From the call of `lab.set` to its effect, 4 ranks, ByteGPT, "
        f"unpaced:\n\n{table(head, rows)}\nCPU seconds of all ranks together:\n\n{table(cost_head, costs)}\n"
        f"`Lab(ranks=4)` to the first loss: {first} (asked: at most 6 s).\n"
    )


def slow_link(d: dict[str, Any]) -> str:
    """Section: live controls on a link eight times slower than compute."""
    base = d["curves"]["TorchDDP"]
    steps, seconds, target = base[-1]
    rows = []
    for name, curve in d["curves"].items():
        hit = next((p for p in curve if p[2] <= target), None)
        last = curve[-1]
        pace = (last[0] / last[1]) / (steps / seconds)
        half = min(base, key=lambda p: abs(p[0] - last[0]))
        rows.append(
            [
                name,
                f"{hit[1]:.0f} s, step {hit[0]}" if hit else "not reached",
                f"{seconds / hit[1]:.2f}" if hit else "",
                f"{pace:.2f}",
                f"{last[2]:.3f} after {last[0]} steps (torch {half[2]:.3f})",
            ]
        )
    best = max(
        (
            seconds / next((p[1] for p in c if p[2] <= target), math.inf)
            for n, c in d["curves"].items()
            if n != "TorchDDP"
        ),
        default=0.0,
    )
    head = [
        "setting, turned live",
        f"reached torch's {target:.3f} after",
        "times as fast",
        "samples/s ratio",
        "held-out at equal samples",
    ]
    return (
        f"{d['ranks']} ranks, {d['pace_ms']:g} ms of paced compute, "
        f"{d['mbit']:.1f} Mbit/s; torch's DDP puts its buckets on the same Link. It needed {seconds:.0f} s for {steps} "
        f"steps.\n\n{table(head, rows)}\nBest: {best:.2f} times as fast (asked: at least 3).\n"
    )


def netns(found: list[dict[str, Any]]) -> str:
    """Section: the emulated Link against a real network."""
    rows, late, fat = [], [], []
    for f in found:
        cell, over, off = f["cell"], excess(f), abs(ratio(f) - 1)
        name = f"{f['ranks']} ranks, {cell['mbit']:g} Mbit/s, {cell['bucket_mb']:g} MB, frames of {f['frame']}"
        late += [f"{name} ({ratio(f):.2f}, cores {f['real'][0]['busy']:.0%} busy)"] if off > 0.1 else []
        fat += [f"{name} ({max(over):.1%})"] if min(over) < 0 or max(over) > 0.05 else []
        rows.append(
            [
                name,
                f"{step(f['real']) * 1e3:.0f} ms",
                f"{step(f['modelled']) * 1e3:.0f} ms",
                f"{ratio(f):.3f}",
                f"{ratio(f, 2):.3f}",
                f"{min(over):.1%} to {max(over):.1%}",
                f"{f['real'][0]['busy']:.0%}",
            ]
        )
    about = (
        "DDP, 100 ms of paced compute per step. Real: each rank a process in a network namespace, a cable to one "
        "bridge, `tc tbf` on both ends with a burst of 1 ms of the rate (one frame, where that is more). Modelled: the "
        "same processes on the loopback with a Link of the same bandwidth and no latency. Steps are lower quartiles, so "
        "that what else the machine does stays out. Bytes: what each rank's port sent over what its record says, "
        "a run without payload taken off both; where the burst is over 64 kB (1000 Mbit/s) the kernel counts one "
        "header for up to 64 kB, elsewhere one per frame: 66 bytes to 1448 of payload (4.6 %) in frames of 1500, "
        "and acknowledgements. So 200 Mbit/s with frames of 1500 is the most work for the cores, not 1000."
    )
    head = [
        "cell",
        "real step",
        "modelled step",
        "modelled / real",
        "by medians",
        "port over record",
        "cores busy, with all else",
    ]
    said = f"Further off than 10 %: {', '.join(late) or 'none'}. "
    said += f"Bytes outside 0 to 5 %: {', '.join(fat) or 'none'}."
    return f"{about}\n\n{table(head, rows)}\n{said}\n"


def record(d: dict[str, Any]) -> str:
    """Section: the record on disk."""
    return (
        f"{d['spans']:,} spans: {d['bytes_per_span']:.1f} bytes each on disk (asked: under 40); loading "
        f"them took {', '.join(f'{s:.2f} s' for s in d['load_s'])} (asked: under 2 s).\n"
    )


def checksums(d: dict[str, Any]) -> str:
    """Section: the cost of a batch's checksum for the writing rank."""
    return (
        f"A rank writes a batch of {d['rows']} spans in {d['with_us']:.0f} us of CPU time "
        f"with its checksum, and in {d['without_us']:.0f} us without: {d['ratio']:.2f} times as much, {d['cost_us']:.0f} "
        f"us a batch. A recorder writes up to three batches a second of each kind of row. {d['rounds']} batches of each kind took turns in one "
        f"process, at a load of {d['load']:.0f} on two cores.\n"
    )


def record_hour(d: dict[str, Any]) -> str:
    """Section: the time to open a long record."""
    return (
        f"Eight ranks, ten steps a second of twenty spans each: {d['spans']:,} spans are "
        f"open after {', '.join(f'{s:.2f} s' for s in d['load_s'])} (asked: 3 s).\n"
    )


def memory(samples: list[dict[str, float]]) -> str:
    """Section: notebook 00 as Binder would run it."""
    parts = [{k: v for k, v in s.items() if k != "t"} for s in samples]
    peak = max(parts, key=lambda s: sum(s.values()))
    said = ", ".join(f"{k} {v:.0f}" for k, v in sorted(peak.items(), key=lambda kv: -kv[1]))
    return (
        f"Notebook 00 with 2 ranks, the sum of the proportional set sizes of all its "
        f"processes at its peak: {sum(peak.values()):.0f} MB (asked: under 1500): {said}.\n"
    )


def second_order(d: dict[str, Any]) -> str:
    """Section: KFAC and Newton against SGD."""
    from tests.bench.second_order_page import section  # its table uses this module

    return section(d)


def schedules(cells: list[dict[str, Any]]) -> str:
    """Section: pipelines against torch's."""
    from tests.bench.schedules_page import section

    return section(cells)


def published_wire(d: dict[str, Any]) -> str:
    """Section: published bandwidths and overlap, next to the simulator's predictions."""
    from tests.bench.published_wire_page import section

    return section(d)


def published(d: dict[str, Any]) -> str:
    """Section: published results of large clusters, next to the simulator's predictions."""
    from tests.bench.published_page import section

    return section(d)


def algorithms(d: list[dict[str, Any]]) -> str:
    """Section: the fastest all-reduce."""
    from tests.bench.algorithms import section

    return section(d)


def between(d: list[dict[str, Any]]) -> str:
    """Section: sums of two sites, whole and compressed."""
    from tests.bench.between import section

    return section(d)


def priorities(d: dict[str, Any]) -> str:
    """Section: ByteScheduler next to DDP's order."""
    from tests.bench.priorities import section

    return section(d)


def shadow(d: dict[str, Any]) -> str:
    """Section: shadows next to foreground synchronisation."""
    from tests.bench.shadow import section

    return section(d)


def shadow_tables_quality(d: dict[str, Any]) -> str:
    """Section: ShadowSync's loss next to its foreground forms', with the tables on a server."""
    from tests.bench.shadow_tables_quality import section

    return section(d)


def shadow_quality(d: dict[str, Any]) -> str:
    """Section: shadows' loss next to foreground synchronisation's."""
    from tests.bench.shadow_quality import section

    return section(d)


def dashboard(d: dict[str, Any]) -> str:
    """Section: the budgets of the dashboard."""
    rows = []
    for name, value in d["results"].items():
        sign, limit = d["budgets"][name]
        rows.append([name, f"{value:.3g}", f"{sign} {limit:g}", "yes" if keeps(value, sign, limit) else "NO"])
    return f"{table(['', 'measured', 'budget', 'kept'], rows)}\n"


SECTIONS: dict[str, Callable[[Any], str]] = {
    "ddp": ddp, "fsdp": fsdp, "beyond": beyond.section, "pipeline": pipeline, "schedules": schedules, "offload": offload,
    "activations": activations.text, "activations_tuned": activations_tuned.text, "bound": bound, "live": live,
    "slow_link": slow_link, "netns": netns, "algorithms": algorithms, "between": between, "record": record,
    "record_hour": record_hour, "checksums": checksums, "published": published, "published_wire": published_wire,
    "priorities": priorities, "shadow": shadow, "shadow_quality": shadow_quality,
    "shadow_tables_quality": shadow_tables_quality, "memory": memory, "second_order": second_order,
    "scale": scale.text, "planning": planning.section, "named": named_page.section, "tuned": tuned.section,
    "dashboard": dashboard, "dashboard_64": dashboard, "dashboard_real": dashboard,
}  # fmt: skip
