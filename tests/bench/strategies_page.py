# ruff: noqa: E501
"""Computes docs/project/strategies.md and all its numbers from the cells in docs/data/strategies/."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from tests.bench import home_page
from tests.bench.cells import DATA, EVERY, FABRICS, RANKS, SEEDS, STEPS, TASK, Cell, Results
from tests.bench.claims import CLEARLY, PARTS, comparable, rows, speed, target, times
from tests.bench.home_claims import CLAIMS
from tests.bench.methods import FAST, LINK, NOT_QUOTED, SLOW, SLOW_RANK, STUMBLE, Claim, Method, methods, tempo
from tests.bench.outer import OUTER, gained, twin
from tests.bench.page import table
from tests.bench.words import low_high, missing, spread
from workbench.settings import find
from workbench.strategies import Strategy

QUESTION = "Does each strategy keep its paper's claim? How fast is each against DDP on four networks?"
REPRODUCE = """## Reproduction

`make bench-strategies` measures the cells in `docs/data/strategies/` and writes this page. `make bench-home` measures the
first part. `python -m tests.bench.strategies --page-only` only writes the page from the cells. `python -m tests.bench
figures` draws the timelines. A section states a shortfall where its table shows it.
"""
UNTUNED = (
    "These rows have the settings of the four tables, which were not tuned. If a claim shows here, its price is the loss next to it. "
    "If it does not, it may still show [after tuning](#papers-claims-tuned), with method and baseline tuned alike."
)
APART = 1.05  # worst seed over the best; from here on each seed is named
HEADINGS = {FAST: "Fast network", LINK: LINK, SLOW: "One rank 2x slow", STUMBLE: "Random 5x slowdowns"}
ABOUT = {
    FAST: "Each rank's port carries 10 Gbit/s. Each message has a latency of 0.05 ms.",
    LINK: "Each rank's port carries 100 Mbit/s. Each message has a latency of 5 ms.",
    SLOW: f"The fast network, but rank {SLOW_RANK} computes twice as long in every step.",
    STUMBLE: "The fast network, but every rank computes five times as long in a random 10 % of its steps. Each rank draws its steps separately.",
}
WHERE = {FAST: "on the fast network", LINK: f"at {LINK}", SLOW: f"with {SLOW}", STUMBLE: f"with {STUMBLE}"}


def text(folder: Path = DATA) -> str:
    """Returns the whole page."""
    found = Results.of(folder)
    about = json.loads((folder / "about.json").read_text()) if (folder / "about.json").exists() else {}
    home = folder.parent / "home"
    cpu = about.get("machine", {}).get("cpu", "not recorded")
    machine = f"Machine: {cpu}. No GPU was used. Only the last table times real ranks; all other tables come from the simulator."
    parts = [
        "# Strategies, measured\n",
        "\n".join([QUESTION, home_page.summary(home), *_fastest(found), machine]) + "\n",
    ]
    parts += [home_page.text(home), _setting(found, about)]
    parts += [f"## {HEADINGS[where]}\n\n{ABOUT[where]}\n\n{_fabric(found, where)}" for where in FABRICS]
    parts += [f"## Papers' claims, untuned\n\n{UNTUNED}\n\n{_papers(found)}"]
    parts += [f"## {part.title}\n\n{part.text(found)}" for part in PARTS]
    parts += [f"## Real ranks against the simulator\n\n{_beside(found)}", REPRODUCE, _machine(found, about)]
    return "\n".join(parts)


def _fastest(found: Results) -> list[str]:
    """Returns one line with the strategy that reaches the target loss first on each network; [] without cells."""
    said = []
    for where in FABRICS:
        each = [
            (statistics.median(pace), label)
            for label, name, _ in rows()
            if label != "DDP" and comparable(name, where) and (pace := times(found, label, where))
        ]
        if each:
            pace, label = max(each)
            first = WHERE[where][0].upper() + WHERE[where][1:]
            said.append(
                f"{first}, {label} is the fastest: {pace:.2f} times DDP's speed to the target loss."
                if pace > CLEARLY
                else f"{first}, no strategy is clearly faster than DDP to the target loss."
            )
    return [f"Settings on the four networks are untuned. {' '.join(said)}"] if said else []


def _setting(found: Results, about: dict[str, Any]) -> str:
    goal = target(found)
    costs = about.get("costs")
    took = ""
    if costs:
        ms = [statistics.fmean(d[0] for d in costs[k]) * 1e3 for k in ("forward", "backward", "update")]
        took = f" On {len(costs['forward'])} real ranks with one core each, a forward took {ms[0]:.1f} ms, a backward {ms[1]:.1f} ms, and an update {ms[2]:.1f} ms. "
        took += "The simulator draws compute times from these measurements."
    aim = (
        f" The target loss is {goal:g}: DDP's loss at the first evaluation from step {STEPS // 2} on, mean of the seeds."
        if goal
        else ""
    )
    return (
        f"## Setting of the four networks\n\nThe four tables below come from the simulator with real tensors: {RANKS} ranks, {STEPS} steps of "
        f"ByteGPT(layers={TASK.layers}, width={TASK.width}, context={TASK.context}). The batch is {TASK.batch} per rank, buckets have {Cell.bucket_mb:g} MB, and evaluations come "
        f"every {EVERY} steps. Each row has {len(SEEDS)} seeds, and the task's learning rate, {TASK.lr:g}, unless the row names another."
        f"{took} Numbers are relative to DDP's on the same network with the same seed. Each is the median of the seeds, with lowest and highest in brackets. After ±: half the range of the seeds. "
        f"A seed that never reaches the target loss counts as slower than every other seed. Learning rates were not tuned row by row, except AdaAlter's with one seed. "
        f"A strategy with outer momentum has two settings if few ranks need less of it.{aim}\n"
    )


def _fabric(found: Results, where: str) -> str:
    """Returns one table, with rows without a cell named below it."""
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
    under = f"DDP itself: {first[0]:.0f} samples/s, {first[1] / 1e6:.2f} MB per rank and step, final held-out loss {loss}.\n"
    head = [
        "strategy",
        "times DDP's samples/s",
        "times DDP's bytes per rank",
        "times DDP's speed to the target loss",
        "final held-out loss",
        "loss against DDP's",
    ]
    refused = "".join(f"\n{row}: {found.refused['table', row]}.\n" for row in sorted(refusals))
    return f"{table(head, lines)}\n{under}{refused}{_lacking(lacking)}"


def _lacking(labels: list[str]) -> str:
    """Returns the rows that are not in a table; exact strategies are listed as having DDP's losses."""
    exact = [label for label, name, _ in rows() if label in labels and find(Strategy, name).exact]
    others = [label for label in labels if label not in exact]
    same = (
        f"\nNot in this table, because each step equals DDP's: {', '.join(exact)}. For their memory and speed, see [benchmarks](benchmarks.md).\n"
        if exact
        else ""
    )
    return same + ("\n" + missing(*others) if others else "")


def _row(
    found: Results, label: str, name: str, where: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]
) -> list[str]:
    pace = [mine["samples_per_s"] / base["samples_per_s"] for mine, base in pairs]
    sent = [mine["bytes"] / base["bytes"] for mine, base in pairs]
    busiest = statistics.median(mine["busiest"] / base["bytes"] for mine, base in pairs)
    ends = [mine["curve"][-1][2] for mine, _ in pairs]
    gap = statistics.fmean(ends) / statistics.fmean(base["curve"][-1][2] for _, base in pairs) - 1
    if not comparable(name, where):
        return [f"{_linked(label, name)}{tempo(name)}", *[NOT_COMPARABLE] * 3, spread(ends), f"{gap:+.1%}"]
    most = f" (busiest rank: {busiest:.2f})" if busiest > 1.5 * statistics.median(sent) else ""
    return [
        f"{_linked(label, name)}{tempo(name)}",
        _ratio(pace),
        f"{statistics.median(sent):.3f}{most}",
        speed(times(found, label, where)),
        spread(ends),
        f"{gap:+.1%}",
    ]


NOT_COMPARABLE = "no network: one host's memory"


def _ratio(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({low_high(values)})"


def _linked(label: str, name: str) -> str:
    """Returns a row's name, linked to its reference and its figure."""
    return f"[{label}](../reference/strategies.md#{name.lower()})"


def _papers(found: Results) -> str:
    lines = []
    for m in methods():
        mine = [label for label, name, _ in rows() if name == m.name]
        lines.append([m.name, _headline(m), " ".join(_seen(found, m, label) for label in mine) or "the baseline"])
    return table(["strategy", "paper's claim", "measured here"], lines)


def _headline(m: Method) -> str:
    """Returns the paper's claim; if the tables quote none, the claim of its home regime."""
    at_home = next((c for c in CLAIMS if c.method.split(",")[0] == m.name), None)
    return m.paper if m.paper != NOT_QUOTED or at_home is None else f"{at_home.paper} ({at_home.source})"


def _unmeasured(m: Method) -> str:
    """Returns the note of a row without cells; tables are complete or absent for one price of compute."""
    at_home = any(c.method.split(",")[0] == m.name for c in CLAIMS)
    return "not in these tables; tuned, above" if at_home else "not measured yet"


def _seen(found: Results, m: Method, label: str) -> str:
    """Returns a sentence with a row's results in the tables, and whether the claim shows."""
    if label == "DDP":
        return ""
    pairs = {where: found.pairs("table", label, "DDP", where) for where in FABRICS}
    if not any(pairs.values()):
        same = "no row, because each step equals DDP's" if find(Strategy, m.name).exact else _unmeasured(m)
        return f"{label}: {found.refused.get(('table', label), same)}."
    best = max(
        (statistics.median(times(found, label, w) or [0.0]), w) for w in FABRICS if pairs[w] and comparable(m.name, w)
    )
    said = (
        f"{label}{tempo(m.name)}: at best {best[0]:.2f} times DDP's speed to the target loss ({best[1]})"
        if best[0]
        else f"{label}{tempo(m.name)}: most seeds miss the target loss on every network{_elsewhere(m.name)}"
    )
    ends = [mine["curve"][-1][2] for mine, _ in pairs[FABRICS[0]]]
    if ends and max(ends) / min(ends) > APART:
        said += f"; its seeds end far apart, at losses {', '.join(f'{end:.2f}' for end in ends)}"
    if m.claim and pairs[m.claim.where]:
        said += f". {_claimed(found, m, label)}"
    return said.rstrip(".") + "."


def _claimed(found: Results, m: Method, label: str) -> str:
    """Returns the measured number with its cost in loss, and whether it shows the paper's claim."""
    assert m.claim is not None
    where, value = m.claim.where, measure(found, m.claim.measure, label, m.claim.where)
    if m.claim.measure == "control" and not value:
        return f"{_twin(label)} was not measured from a common state"
    what = {
        "pace": f"Times DDP's samples/s, {WHERE[where]}", "time": f"Times DDP's speed to the target loss, {WHERE[where]}",
        "bytes": f"Times fewer bytes than DDP, {WHERE[where]}", "control": f"LocalSGD's loss / loss of {_twin(label)}, from a common state",
    }[m.claim.measure]  # fmt: skip
    pairs = found.pairs("table", label, "DDP", where)
    gap = (
        statistics.fmean(a["curve"][-1][2] for a, _ in pairs) / statistics.fmean(b["curve"][-1][2] for _, b in pairs)
        - 1
    )
    said = f"{what}: {f'{value:.2f}' if value else 'not reached'}"
    said += f" with {gap:+.1%} loss" if m.claim.measure != "control" else ""
    said += _next_to(found, label, m.claim)
    if m.paper == NOT_QUOTED:
        return said
    return f"{said}. {m.claim.why}" if not m.claim.headline else f"{said}. {_shows(found, m.claim, label, value)}"


def _shows(found: Results, claim: Claim, label: str, value: float) -> str:
    """Returns whether the paper's headline shows; a claim about time is judged separately."""
    good = value > claim.least
    if not claim.time:
        return "The claim shows" if good else f"The claim does NOT show. {claim.why}"
    quick = measure(found, "time", label, claim.where)
    words = "does" if quick > claim.time else "does NOT"
    said = f"The claim about {claim.measure} {'shows' if good else 'does NOT show'}; that about time, {f'{quick:.2f}' if quick else 'not reached'}, {words}"
    return said if good and quick > claim.time else f"{said}. {claim.why}"


def _twin(label: str) -> str:
    """Returns the row from a common state that judges a row of the tables: same knobs, another period."""
    return next(twin(name, knobs) for row, name, knobs in rows() if row == label)


def _next_to(found: Results, label: str, claim: Claim) -> str:
    """Returns loss and bytes of a row and of its comparison row."""
    each = [(row, list(found.seeds("table", row, claim.where).values())) for row in (label, claim.beside)]
    if not claim.beside or not all(seeds for _, seeds in each):
        return ""
    base = statistics.fmean(f["bytes"] for f in found.seeds("table", "DDP", claim.where).values())
    ends = [
        (row, statistics.fmean(f["curve"][-1][2] for f in s), statistics.fmean(f["bytes"] for f in s))
        for row, s in each
    ]
    return "; " + "; ".join(
        f"{row} ends at loss {loss:.3f} with {sent / base:.0%} of the bytes" for row, loss, sent in ends
    )


def _elsewhere(name: str) -> str:
    """Returns a note for strategies with a slow start, which are also measured from a common state."""
    return " from a cold start (see below for runs from a common state)" if name in {n for n, _ in OUTER} else ""


def measure(found: Results, what: str, label: str, where: str) -> float:
    """Returns a row's number over DDP's as median of the seeds; more is better."""
    pairs = found.pairs("table", label, "DDP", where)
    each = {
        "pace": lambda: [a["samples_per_s"] / b["samples_per_s"] for a, b in pairs],
        "time": lambda: times(found, label, where),
        "bytes": lambda: [b["bytes"] / a["bytes"] if a["bytes"] else float("inf") for a, b in pairs],
        "control": lambda: [gain] if (gain := gained(found, _twin(label))) else [],
    }[what]()
    return statistics.median(each) if each else 0.0


def _beside(found: Results) -> str:
    """Compares each strategy in one paced run on real ranks with its simulation and with torch's DDP."""
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
        f"Each strategy ran once on {RANKS} real ranks with {one['pace']:g} ms of paced compute per step, at {one['link']}. Times are the mean of {one['steps']} "
        "steps. The simulations use the costs of DDP's run in this series. TorchDDP is simulated as DDP, which sends the same bytes. But the pace "
        "cannot reach into torch's backward. Torch sends a bucket as soon as the real backward has filled it, and the whole paced backward hides the transfer. "
        "So TorchDDP is faster here than a backward of that length would allow."
    )
    head = ["strategy", "measured step", "simulated step", "measured / simulated", "times torch DDP's speed"]
    return f"{about}\n\n{table(head, lines)}\nMore than 10 % from the simulated step: {', '.join(off) or 'none'}.\n"


def _machine(found: Results, about: dict[str, Any]) -> str:
    m = about.get("machine", {})
    commits = ", ".join(sorted({f.get("commit") or "?" for f in found.files})) or "none"
    dates = sorted({f["date"] for f in found.files if f.get("date")}) or ["?"]
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return (
        f"*{when}; {m.get('cpu')}; {m.get('system')}; Python {m.get('python')}, torch {m.get('torch')}; commit {commits}; "
        f"`python -m tests.bench.strategies`; {len(found.files)} cells.*\n"
    )
