# ruff: noqa: E501
"""docs/strategies.md from the cells in docs/data/strategies/: every number in it is computed here from what was kept."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from tests.bench.cells import DATA, EVERY, FABRICS, RANKS, SEEDS, STEPS, TASK, Results
from tests.bench.claims import OUTER, PARTS, low_high, missing, rows, spread, target, times
from tests.bench.methods import FAST, LINK, SLOW, SLOW_RANK, STUMBLE, Method, methods
from tests.bench.page import table

HEAD = """# Strategies, measured

Written by `make bench-strategies` from the cells in `docs/data/strategies/`; `python -m tests.bench.strategies --page-only`
writes it again from them. `python -m tests.bench figures` draws the timelines. A shortfall is said where it stands.
"""
APART = 1.05  # the worst seed over the best: where it is more, each is named
SAID = {
    FAST: "Each rank's port carries 10 Gbit/s, a message takes 0.05 ms more.",
    LINK: "Each rank's port carries 100 Mbit/s, a message takes 5 ms more.",
    SLOW: f"As fast, but rank {SLOW_RANK} computes twice as long in every step.",
    STUMBLE: "As fast, but every rank computes five times as long in a random tenth of its steps, drawn for each on its own.",
}


def text(folder: Path = DATA) -> str:
    """The whole page."""
    found = Results.of(folder)
    about = json.loads((folder / "about.json").read_text()) if (folder / "about.json").exists() else {}
    parts = [HEAD, _setting(found, about)]
    parts += [f"## {where[0].upper()}{where[1:]}\n\n{SAID[where]}\n\n{_fabric(found, where)}" for where in FABRICS]
    parts += [f"## What the papers say, and what was seen\n\n{_papers(found)}"]
    parts += [f"## {part.title}\n\n{part.text(found)}" for part in PARTS]
    parts += [f"## On real ranks\n\n{_beside(found)}", _machine(found, about)]
    return "\n".join(parts)


def _setting(found: Results, about: dict[str, Any]) -> str:
    goal = target(found)
    costs = about.get("costs")
    took = ""
    if costs:
        ms = [statistics.fmean(d[0] for d in costs[k]) * 1e3 for k in ("forward", "backward", "update")]
        took = f" On {len(costs['forward'])} real ranks, a core each, a forward took {ms[0]:.1f} ms, a backward {ms[1]:.1f} ms, an update {ms[2]:.1f} ms; "
        took += "the simulator draws from what was measured of them."
    aim = (
        f"The loss that times are counted to is {goal:g}: DDP's at the first evaluation from step {STEPS // 2} on, mean of the seeds."
        if goal
        else ""
    )
    return (
        f"## How\n\nIn the simulator with real tensors: {RANKS} ranks, {STEPS} steps of "
        f"ByteGPT(layers={TASK.layers}, width={TASK.width}, context={TASK.context}), batch {TASK.batch} per rank, evaluated "
        f"every {EVERY} steps, {len(SEEDS)} seeds; all with the task's learning rate, {TASK.lr:g}, unless the row says another."
        f"{took} Numbers are over DDP's of the same fabric and seed: the median of the seeds, lowest to highest in brackets. "
        f"{aim}\n"
    )


def _fabric(found: Results, where: str) -> str:
    """One table; rows without a cell are named below it."""
    if not (base := found.seeds("table", "DDP", where)):
        return missing("DDP")
    lines, lacking = [], []
    for label, name, _ in rows():
        pairs = found.pairs("table", label, "DDP", where)
        if label in (refusals := {row for part, row in found.refused if part == "table"}):
            continue
        if not pairs:
            lacking.append(label)
            continue
        lines.append(_row(found, label, name, where, pairs))
    loss = spread([f["curve"][-1][2] for f in base.values()])
    first = (
        statistics.fmean(f["samples_per_s"] for f in base.values()),
        statistics.fmean(f["bytes"] for f in base.values()),
    )
    under = f"DDP itself: {first[0]:.0f} samples/s, {first[1] / 1e6:.2f} MB per rank and step, {loss} at the end.\n"
    head = [
        "strategy",
        "samples/s",
        "bytes per rank",
        "times as fast to the loss",
        "held-out loss at the end",
        "against DDP's",
    ]
    refused = "".join(f"\n{row}: {found.refused['table', row]}.\n" for row in sorted(refusals))
    return f"{table(head, lines)}\n{under}{refused}{_lacking(lacking)}"


def _lacking(labels: list[str]) -> str:
    return "\n" + missing(*labels) if labels else ""


def _row(
    found: Results, label: str, name: str, where: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]
) -> list[str]:
    pace = [mine["samples_per_s"] / base["samples_per_s"] for mine, base in pairs]
    sent = [mine["bytes"] / base["bytes"] for mine, base in pairs]
    busiest = statistics.median(mine["busiest"] / base["bytes"] for mine, base in pairs)
    ends = [mine["curve"][-1][2] for mine, _ in pairs]
    gap = statistics.fmean(ends) / statistics.fmean(base["curve"][-1][2] for _, base in pairs) - 1
    quick = times(found, label, where)
    never = sum(not t for t in quick)
    speed = f"not reached in {STEPS} steps" if never == len(quick) else _ratio([t for t in quick if t])
    speed += f"; not reached by {never} of {len(quick)} seeds" if 0 < never < len(quick) else ""
    most = f"; busiest {busiest:.2f}" if busiest > 1.5 * statistics.median(sent) else ""
    return [
        _linked(label, name),
        _ratio(pace),
        f"{statistics.median(sent):.3f}{most}",
        speed,
        spread(ends),
        f"{gap:+.1%}",
    ]


def _ratio(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({low_high(values)})"


def _linked(label: str, name: str) -> str:
    """A row's name, with its figure where there is one."""
    return f"[{label}](strategies/{name}.svg)" if (DATA.parents[1] / "strategies" / f"{name}.svg").exists() else label


def _papers(found: Results) -> str:
    lines = []
    for m in methods():
        mine = [label for label, name, _ in rows() if name == m.name]
        lines.append([m.name, m.paper, " ".join(_seen(found, m, label) for label in mine) or "the yardstick"])
    return table(["strategy", "the paper's headline", "seen here"], lines)


def _seen(found: Results, m: Method, label: str) -> str:
    """What the tables say of a row in a sentence, and whether the claim shows."""
    if label == "DDP":
        return ""
    pairs = {where: found.pairs("table", label, "DDP", where) for where in FABRICS}
    if not any(pairs.values()):
        return f"{label}: {found.refused.get(('table', label), 'not measured yet')}."
    best = max((statistics.median(times(found, label, w) or [0.0]), w) for w in FABRICS if pairs[w])
    said = (
        f"{label}: at best {best[0]:.2f} times as fast to the loss ({best[1]})"
        if best[0]
        else f"{label}: never at the loss{_elsewhere(m.name)}"
    )
    ends = [mine["curve"][-1][2] for mine, _ in pairs[FABRICS[0]]]
    if ends and max(ends) / min(ends) > APART:
        said += f"; its seeds end far apart, at {', '.join(f'{end:.2f}' for end in ends)}"
    if m.claim and pairs[m.claim.where]:
        value = measure(found, m.claim.measure, label, m.claim.where)
        name = {"pace": "samples/s", "time": "times as fast to the loss", "bytes": "times fewer bytes"}[m.claim.measure]
        shows = value > m.claim.least
        verdict = "it shows" if shows else f"it does NOT show. {m.claim.why}"
        said += f"; {name} on {m.claim.where}: {f'{value:.2f}' if value else 'not reached'}, {verdict}"
    return said.rstrip(".") + "."


def _elsewhere(name: str) -> str:
    """Those that begin slowly are measured from a common state, too."""
    return " from a cold start (from a common state, see below)" if name in {n for n, _ in OUTER} else ""


def measure(found: Results, what: str, label: str, where: str) -> float:
    """A row's number over DDP's, median of the seeds: more is better."""
    pairs = found.pairs("table", label, "DDP", where)
    each = {
        "pace": lambda: [a["samples_per_s"] / b["samples_per_s"] for a, b in pairs],
        "time": lambda: times(found, label, where),
        "bytes": lambda: [b["bytes"] / a["bytes"] if a["bytes"] else float("inf") for a, b in pairs],
    }[what]()
    return statistics.median(each) if each else 0.0


def _beside(found: Results) -> str:
    """Each strategy once on real ranks, paced, against its simulation and against torch's DDP."""
    cells = {f["row"]: f["found"] for f in found.files if f["part"] == "real" and "step_s" in f["found"]}
    if not cells:
        return missing("any strategy on real ranks")
    torchs = cells.get("TorchDDP", {}).get("step_s")
    order = ["TorchDDP", *(label for label, _, _ in rows())]
    cells = dict(sorted(cells.items(), key=lambda kv: order.index(kv[0]) if kv[0] in order else len(order)))
    lines, off = [], []
    for row, f in cells.items():
        ratio = f["step_s"] / f["simulated_s"]
        off += [f"{row} ({ratio:.2f})"] if abs(ratio - 1) > 0.1 else []
        beside = f"{torchs / f['step_s']:.2f}" if torchs else ""
        lines.append([row, f"{f['step_s'] * 1e3:.0f} ms", f"{f['simulated_s'] * 1e3:.0f} ms", f"{ratio:.3f}", beside])
    one = next(iter(cells.values()))
    about = (
        f"Each once on {RANKS} real ranks, {one['pace']:g} ms of paced compute per step, {one['link']}, the mean of {one['steps']} "
        "steps; simulated with the costs of DDP's run among them. TorchDDP is simulated as DDP, which sends the same bytes; but the pace "
        "cannot reach into torch's backward: its buckets are on the Link as soon as the real backward has filled them, and hide behind all of "
        "the paced one, so it is quicker here than a backward of that length would let it be."
    )
    head = ["strategy", "measured step", "simulated step", "measured / simulated", "pace over torch DDP's"]
    return f"{about}\n\n{table(head, lines)}\nFurther off than 10 %: {', '.join(off) or 'none'}.\n"


def _machine(found: Results, about: dict[str, Any]) -> str:
    m = about.get("machine", {})
    commits = ", ".join(sorted({f.get("commit") or "?" for f in found.files})) or "none"
    dates = sorted({f["date"] for f in found.files if f.get("date")}) or ["?"]
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return (
        f"*{when}; {m.get('cpu')}; {m.get('system')}; Python {m.get('python')}, torch {m.get('torch')}; commit {commits}; "
        f"`python -m tests.bench.strategies`; {len(found.files)} cells.*\n"
    )
