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
from tests.bench.ddp import BLOCK, ratios
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
        "Ours is the engine's DDP with recording on. Torch's is"
        " `DistributedDataParallel(gradient_as_bucket_view=True, static_graph=True)` in a plain loop."
    )
    before = json.loads(BEFORE.read_text())
    was, low, high = _mean_ratio(before)
    now = f"{_mean_ratio(cells)[1]:.3f} to {_mean_ratio(cells)[2]:.3f}"
    said = (
        f"The 95 % interval of the geometric mean is {now}. In an older version the buckets had no memory of their own:"
        f" its geometric mean was {was:.3f} ({low:.3f} to {high:.3f}). It was measured on 2026-11-22 in the same cells on"
        " the same kind of machine (commit 4568013; `docs/data/ddp_before.json`).\n"
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
        "Ours is the engine's `ZeRO3` with recording on. Torch's is FSDP2 in a plain loop over gloo: `fully_shard` on the"
        " transformer's blocks, or on modules of a bucket's size, and on the whole model. With buckets of 1 MB both sides"
        " gather ByteGPT in three pieces. With 5 MB ours gathers it in one piece, torch in three. Both gather the MLP layer"
        " by layer."
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
    said = f"Geometric mean: {mean:.3f} (goal: at least {asked:.2f}): {kept(mean >= asked)}. "
    said += (
        f"The whole interval is below {floor:g} in: {'; '.join(under)}."
        if under
        else f"No cell's whole interval is below {floor:g}."
    )
    how = (
        f"Both sides train in alternating blocks of {BLOCK} steps of one run. A ratio is the median over rounds, with its 95 %"
        " bootstrap interval. The A/A control compares torch's first block of a round with its second. Peak memory comes from"
        " runs of one side alone, with the largest bucket."
    )
    head = [
        "cell",
        "torch's step",
        "throughput, ours / torch",
        "A/A control, torch / torch",
        "rounds",
        "peak memory, ours / torch",
    ]
    return f"{about} {how}\n\n{table(head, rows)}\n{said}\n"


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


def kept(is_so: bool) -> str:
    """Returns the word for a goal that was or was not reached."""
    return "kept" if is_so else "NOT kept"


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
    head = ["schedule", "micro-batches", "bubble by formula", "measured bubble", "delay of a pass, ms"]
    interleaved = "An interleaved stage has v = 2 pieces. " if any(c.get("pieces", 1) > 1 for c in cells) else ""
    about = (
        "Four ranks are four stages of equal layers. A micro-batch's forward through a piece of the model is paced to"
        " 100 ms, its backward to 200 ms. ZB-H1 splits a backward into halves of 100 ms each."
        f" {interleaved}The bubble is the share of time in which a stage is idle, from the first pass to the last one."
        f" Values are medians of {len(cells[0]['blocks'])} alternating blocks of one run, with a 95 % bootstrap interval."
        ' Rows with "again" are the A/A control. A pass lasts longer than its pace, because sleeping ends late: the last'
        " column is the median of this delay over passes."
    )
    formulas = f"(p-1) / ({'vm' if interleaved else 'm'}+p-1), and (p-1) / (3m+p-1) for ZB-H1"
    worst = f"Formula: {formulas}. Largest difference: {max(off):.3f} (goal: within 0.05): {kept(max(off) <= 0.05)}."
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
    head = ["strategy", "least `memory_mb`", "on the device, MB", "on the host, MB", "on disk, MB", "moved per step, MB",
            "step / DDP's step"]  # fmt: skip
    about = (
        "ByteGPT with six layers and AdamW trains on two ranks, in one run that switches strategies live. Compute is paced"
        " to 240 ms a step. Transfers run at 0.2 GB/s between device and host, and at 0.1 GB/s to disk.\n\n"
        "* `memory_mb`: the least value at which the lab accepts the strategy.\n"
        "* Device, host and disk: the largest number of bytes in a step on rank 0.\n"
        "* Moved: bytes to or from host and disk on rank 0.\n"
        "* Step: the median of a block, divided by DDP's step of the same round."
        f" Values are medians of {len(base)} alternating rounds, with a 95 % bootstrap interval.\n"
        "* The last row is the A/A control: it repeats the first row."
    )
    return f"{about}\n\n{table(head, rows)}"


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
    sizes = ", ".join(f"{size:g}" for size in sorted({r["bucket_mb"] for r in rows}))
    about = (
        "A step takes at least forward + max(backward, f + s) + update. Here f is the time until the first bucket is full, "
        "and s is the time to send all buckets. Compute is paced, and the Link is emulated. Each row shows the bucket size "
        f"with the shortest step, among {sizes} MB."
    )
    head = ["ranks", "time to send / backward", "bucket", "step", "lower bound", "step / bound"]
    return (
        f"{about}\n\n{table(head, out)}\nWorst ratio: {worst:.3f} (goal: at most 1.10): {kept(worst <= 1.10)}. "
        f"The recorded payload bytes {'equal' if exact else 'DIFFER FROM'} the formula's: "
        "2 (p-1)/p of each bucket, in whole bytes.\n"
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
                str(len(late) - len(free)),
                f"{free[int(0.99 * (len(free) - 1))] * 1e3:.0f} ms",
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
        "changes during an evaluation",
        "p99 of all other changes",
        "allowed p99",
        "kept",
    ]
    cost_head = [
        "strategy",
        "recorder and spool",
        "appending rows",
        "relay in the kernel",
        "ranks, in total",
        "recording's share (goal: 1 %)",
        "share with the relay",
    ]
    first = ", ".join(f"{s:.1f} s" for s in d["first_loss"])
    return (
        "Times run from the call of `lab.set` to its effect, with 4 ranks that train ByteGPT without a pace. The allowed "
        f"p99 is 100 ms plus the p99 of a step. Under LocalSGD it is 100 ms plus that of {d['LocalSGD']['every']} steps, a round.\n\n"
        f"{table(head, rows)}\n"
        "The next table has CPU seconds of all ranks together. Appending rows is the cost of one row, measured alone, "
        f"times the number of rows.\n\n{table(cost_head, costs)}\n"
        f"From `Lab(ranks=4)` to the first loss: {first} (goal: at most 6 s): {kept(max(d['first_loss']) <= 6)}.\n"
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
                f"{hit[1]:.0f} s, step {hit[0]}" if hit else f"not reached in {last[1]:.0f} s",
                f"{seconds / hit[1]:.2f}" if hit else "",
                f"{pace:.2f}",
                f"{last[2]:.3f} after {last[0]} steps (torch {half[2]:.3f} after {half[0]})",
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
        "live setting",
        f"time to torch's {target:.3f}",
        "times as fast",
        "samples/s / torch's",
        "held-out loss at the end (torch's at the nearest step)",
    ]
    return (
        f"{d['ranks']} ranks train with {d['pace_ms']:g} ms of paced compute per step on a Link of {d['mbit']:.1f} Mbit/s. "
        f"Torch's DDP sends its buckets over the same Link. It needed {seconds:.0f} s for {steps} steps, to a held-out loss "
        f"of {target:.3f}. Each other run starts as our DDP and changes live at its second step. It ends at this loss or "
        f"after 60 % of torch's time. Times are the sum of rank 0's steps, without evaluations.\n\n{table(head, rows)}\n"
        f"Best: {best:.2f} times as fast (goal: at least 3): {kept(best >= 3)}.\n"
    )


def netns(found: list[dict[str, Any]]) -> str:
    """Section: the emulated Link against a real network."""
    rows, late, fat = [], [], []
    for f in found:
        cell, over, off = f["cell"], excess(f), abs(ratio(f) - 1)
        name = f"{f['ranks']} ranks, {cell['mbit']:g} Mbit/s, {cell['bucket_mb']:g} MB, frames of {f['frame']}"
        late += [f"* {name}: {ratio(f):.2f}, cores {f['real'][0]['busy']:.0%} busy"] if off > 0.1 else []
        fat += [f"* {name}: {max(over):.1%}"] if min(over) < 0 or max(over) > 0.05 else []
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
        "DDP runs with 100 ms of paced compute per step on two networks:\n\n"
        "* Real: each rank is a process in a network namespace, with a cable to one bridge. `tc tbf` limits the rate at both ends. "
        "Its burst is 1 ms of the rate, or one frame if a frame is larger.\n"
        "* Modelled: the same processes use the loopback, with a Link of the same bandwidth and no latency.\n\n"
        "A step is the lower quartile over steps, because other load only makes steps longer. The bytes that each "
        "rank's port sent are compared with the bytes in its record. A run without payload is subtracted from both. At 1000 "
        "Mbit/s the burst is over 64 kB, and the kernel counts one header for up to 64 kB. At lower rates it counts one header per frame. In frames "
        "of 1500 this is 66 bytes for 1448 of payload (4.6 %), and there are acknowledgements. So the most work for the "
        "cores is 200 Mbit/s with frames of 1500, not 1000 Mbit/s."
    )
    head = [
        "cell",
        "real step",
        "modelled step",
        "modelled / real",
        "modelled / real, by medians",
        "port's bytes above the record's",
        "cores busy, by all processes",
    ]
    parts = [
        "Steps further off than 10 %, modelled / real:",
        *(late or ["* none"]),
        "Bytes outside 0 to 5 %:",
        *(fat or ["* none"]),
    ]
    said = "\n".join(f"\n{part}\n" if part.endswith(":") else part for part in parts)
    return f"{about}\n\n{table(head, rows)}{said}\n"


def record(d: dict[str, Any]) -> str:
    """Section: the record on disk."""
    return (
        f"{d['spans']:,} spans take {d['bytes_per_span']:.1f} bytes each on disk (goal: under 40): "
        f"{kept(d['bytes_per_span'] < 40)}. Loading them took {', '.join(f'{s:.2f} s' for s in d['load_s'])} "
        f"(goal: under 2 s): {kept(max(d['load_s']) < 2)}.\n"
    )


def checksums(d: dict[str, Any]) -> str:
    """Section: the cost of a batch's checksum for the writing rank."""
    return (
        f"To write a batch of {d['rows']} spans, a rank needs {d['with_us']:.0f} us of CPU time with a checksum and "
        f"{d['without_us']:.0f} us without one. So a checksum costs {d['cost_us']:.0f} us a batch, and writing takes {d['ratio']:.2f} "
        "times as long. A recorder writes at most three batches a second of each kind of row. In one process "
        f"{d['rounds']} batches with a checksum took turns with {d['rounds']} without, at a load of {d['load']:.0f} on two cores.\n"
    )


def record_hour(d: dict[str, Any]) -> str:
    """Section: the time to open a long record."""
    return (
        f"In an hour, eight ranks with ten steps a second and twenty spans a step record {d['spans']:,} spans. Opening "
        f"them took {', '.join(f'{s:.2f} s' for s in d['load_s'])} (goal: at most 3 s): {kept(max(d['load_s']) <= 3)}.\n"
    )


def memory(samples: list[dict[str, float]]) -> str:
    """Section: notebook 00 as Binder would run it."""
    parts = [{k: v for k, v in s.items() if k != "t"} for s in samples]
    peak = max(parts, key=lambda s: sum(s.values()))
    total = sum(peak.values())
    names = {"others": "all other processes"}
    rows = [[names.get(name, name), f"{size:.0f}"] for name, size in sorted(peak.items(), key=lambda kv: -kv[1])]
    return (
        f"At its peak, notebook 00 with 2 ranks uses {total:.0f} MB (goal: under 1500): {kept(total < 1500)}. "
        "This is the sum of the proportional set sizes of all its processes.\n\n"
        f"{table(['processes', 'MB'], rows)}"
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
    plain = {"JS heap at the end over halfway": "JS heap, at the end / halfway"}
    rows = []
    for name, value in d["results"].items():
        sign, limit = d["budgets"][name]
        rows.append(
            [plain.get(name, name), f"{value:.3g}", f"{sign} {limit:g}", "yes" if keeps(value, sign, limit) else "NO"]
        )
    return table(["quantity", "measured", "budget", "kept"], rows)


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
