"""What has to hold, each with the cells it needs and the words in which the page says whether it does."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.bench.cells import FABRICS, RANKS, SEEDS, STEPS, TASK, Cell, Results, fabric, reached
from tests.bench.methods import SLOW, STUMBLE, method, methods
from tests.bench.page import table
from workbench.fabric import Fabric, Link
from workbench.tasks import Digits

COMMON, PERIOD, ROUNDS = 200, 25, 16  # steps before, of a round, rounds after
GRID = (0.5, 1.0, 2.0)  # learning rates, as multiples of the task's
OUTER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SlowMo", {"every": PERIOD}),
    ("DiLoCo", {"every": PERIOD}),
    ("StreamingDiLoCo", {"every": PERIOD, "fragments": 4, "bits": 32}),
    ("StreamingDiLoCo", {"every": PERIOD, "fragments": 4}),
)
DRIFTING = (4, 8, 16, 32)
SELECTIVE: tuple[dict[str, Any], ...] = (
    {"delta": 0.1}, {"delta": 0.3}, {"delta": 1.0},
    {"delta": 0.02, "norm_window": 25}, {"delta": 0.05, "norm_window": 25},
)
SMALL = Digits(width=8, hidden=64)
SHORT, LONG = 160, 800  # steps of SelSync's runs: while accuracy still rises steeply, and later
WIRES = tuple((mbit, ms) for mbit in (10.0, 100.0, 1000.0) for ms in (0.0, 5.0, 20.0))
RING, EXPONENTIAL = "Gossip(graph=ring)", "Gossip(graph=exponential)"
CLEARLY = 1.05  # times as fast: less is no difference


class Part(NamedTuple):
    """One claim: its heading, its cells, and what the page says of what was found."""

    title: str
    cells: Callable[[], list[Cell]]
    text: Callable[[Results], str]


def rows() -> list[tuple[str, str, dict[str, Any]]]:
    """(label, strategy, knobs) of every row of the tables, DDP first."""
    found = [("DDP", "DDP", {})]
    for m in methods():
        found += [(m.label(k), m.name, dict(k)) for k in m.knobs if (m.name, dict(k)) != ("DDP", {})]
    return found


def tables() -> list[Cell]:
    """The cells of the four tables, a seed after the other."""
    return [
        Cell(part="table", row=label, where=where, seed=seed, method=name, knobs=knobs, fabric=fabric(where, seed),
             rate=method(name).rate)
        for seed in SEEDS for where in FABRICS for label, name, knobs in rows()
    ]  # fmt: skip


def target(found: Results) -> float | None:
    """The loss that tables count the time to: DDP's at the first evaluation in the second half, mean over seeds."""
    for where in FABRICS:
        curves = [f["curve"] for f in found.seeds("table", "DDP", where).values()]
        halves = [next(loss for s, _, loss in curve if s >= STEPS // 2) for curve in curves]
        if halves:
            return round(statistics.fmean(halves), 3)
    return None


def times(found: Results, row: str, where: str) -> list[float]:
    """How many times as fast as DDP a row reached the target, by seed; 0 where it never did."""
    goal, out = target(found), []
    for mine, base in found.pairs("table", row, "DDP", where):
        first, mine_at = reached(base["curve"], goal or 0.0), reached(mine["curve"], goal or 0.0)
        if first:
            out.append(first / mine_at if mine_at else 0.0)
    return out


def missing(*what: str) -> str:
    return f"Not measured yet: {', '.join(what)}.\n"


# -- from a common state: SlowMo, DiLoCo, Streaming DiLoCo; Local SGD's gap --


def _outer() -> list[tuple[str, str, dict[str, Any]]]:
    local = [("LocalSGD", {"every": every}) for every in DRIFTING]
    return [("DDP", "DDP", {}), *((method_label(n, k), n, k) for n, k in (*OUTER, *local))]


def method_label(name: str, knobs: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{k}={v}' for k, v in knobs.items())})" if knobs else name


def outer_cells() -> list[Cell]:
    """Every row with every learning rate."""
    return [
        Cell(part="outer", row=label, where=f"rate {rate:g}", seed=seed, method=name, knobs=knobs, rate=rate,
             after=COMMON, steps=COMMON + PERIOD * ROUNDS, every=COMMON + PERIOD * ROUNDS)
        for seed in SEEDS for label, name, knobs in _outer() for rate in GRID
    ]  # fmt: skip


def best(found: Results, row: str) -> tuple[float, list[dict[str, Any]]] | None:
    """(learning rate, what was found) at the rate of the grid whose last held-out loss is lowest, mean over seeds."""
    tried = [(rate, list(found.seeds("outer", row, f"rate {rate:g}").values())) for rate in GRID]
    tried = [(rate, each) for rate, each in tried if each]
    return min(tried, key=lambda t: statistics.fmean(last(f) for f in t[1])) if tried else None


def last(f: dict[str, Any]) -> float:
    return float(f["curve"][-1][2])


def outer_text(found: Results) -> str:
    if (base := best(found, "DDP")) is None:
        return missing("DDP from the common state")
    loss, dense = statistics.fmean(map(last, base[1])), statistics.fmean(f["bytes"] for f in base[1])
    lines, said, lacking, largest = [], [], [], {}
    for label, name, knobs in _outer():
        if (one := best(found, label)) is None:
            lacking.append(label)
            continue
        rate, each = one
        ends = [last(f) for f in each]
        gap, share = statistics.fmean(ends) / loss - 1, statistics.fmean(f["bytes"] for f in each) / dense
        most = largest[label] = max(f["largest"] for f in each)
        lines.append(
            [label, f"{rate * TASK.lr:g}", spread(ends), f"{gap:+.1%}", f"{share:.1%}", f"{most / 1e6:.3f} MB"]
        )
        if (name, knobs) in OUTER:
            said.append(
                f"{label}: {gap:+.1%} {kept(gap <= 0.02, 'at most +2 %')} with {share:.1%} of the bytes "
                f"{kept(share < 0.05, 'under 5 %')}"
            )
    for label in largest:
        if label.startswith("Streaming") and (whole := largest.get(f"DiLoCo(every={PERIOD})")):
            part = largest[label] / whole
            said.append(
                f"the largest bytes of one rank in one step of {label} are {part:.2f} of DiLoCo's "
                f"{kept(part < 1 / 3, 'under a third')}"
            )
    head = [
        f"from step {COMMON} on",
        "learning rate",
        "held-out loss",
        "against DDP's",
        "bytes over DDP's",
        "most in one step",
    ]
    rates = ", ".join(f"{r * TASK.lr:g}" for r in GRID)
    about = (
        f"All go on from one state, after {COMMON} steps of DDP, for {PERIOD * ROUNDS} more; each with the best of "
        f"{rates} as its learning rate."
    )
    gaps = missing(*lacking) if lacking else ""
    found_so = "; ".join(said) + "." if said else ""
    return f"{about}\n\n{table(head, lines)}\n{found_so}\n{gaps}"


# -- who is slow, and how --


def slow_text(found: Results) -> str:
    asked = [  # strategy, where, must it beat DDP?, why
        ("BackupWorkers", SLOW, True, "it does not wait for the last"),
        ("AsyncServer", SLOW, True, "only the slow rank itself is slow"),
        ("BoundedStaleness", STUMBLE, True, "a rank that has stumbled catches up before the bound is "
         "reached, and nobody waits"),
        ("BoundedStaleness", SLOW, False, "a rank that is always slow never catches up: once the others are the "
         "bound ahead, all go at its pace, as in DDP"),
    ]  # fmt: skip
    lines, lacking = [], []
    for name, where, beats, why in asked:
        label = next((label for label, n, _ in rows() if n == name), name)
        pace = times(found, label, where)
        if not pace:
            lacking.append(f"{name} ({where})")
            continue
        middle = statistics.median(pace)
        good = (middle > CLEARLY) == beats
        lines.append(
            [
                label,
                where,
                f"{middle:.2f} ({low_high(pace)})",
                f"{'faster' if beats else 'no faster'}{'' if good else ': NOT so'}",
                why,
            ]
        )
    head = ["strategy", "fabric", "times as fast as DDP to the loss", "asked", "why"]
    about = f"Median of the seeds (lowest to highest); faster means more than {CLEARLY} times as fast, 0 never.\n\n"
    return about + (table(head, lines) if lines else "") + (f"\n{missing(*lacking)}" if lacking else "")


# -- SelSync on Digits --


def selsync_cells() -> list[Cell]:
    every = [("DDP", "DDP", {}), *((method_label("SelSync", k), "SelSync", k) for k in SELECTIVE)]
    return [
        Cell(part="selsync", row=label, where=where, seed=seed, method=name, knobs=knobs, task=SMALL, steps=n, every=n)
        for where, n in (("Digits", LONG), ("Digits, short", SHORT)) for seed in SEEDS for label, name, knobs in every
    ]  # fmt: skip


def selsync_text(found: Results) -> str:
    parts = [f"{_selsync(found, 'Digits', LONG)}"]
    if found.seeds("selsync", "DDP", "Digits, short"):
        parts.append(
            "Early in training, where accuracy still rises steeply, even averaging parameters in every step is behind "
            f"averaging gradients:\n\n{_selsync(found, 'Digits, short', SHORT)}"
        )
    return "\n".join(parts)


def _selsync(found: Results, where: str, steps: int) -> str:
    base = found.seeds("selsync", "DDP", where)
    if not base:
        return missing("DDP on Digits")
    right = statistics.fmean(f["accuracy"] for f in base.values())
    lines, good = [["DDP", "100%", f"{right:.1%}", ""]], []
    for knobs in SELECTIVE:
        label = method_label("SelSync", knobs)
        if not (each := found.seeds("selsync", label, where)):
            continue
        synced = statistics.fmean(f["synced"] for f in each.values())
        accuracy = statistics.fmean(f["accuracy"] for f in each.values())
        lines.append([label, f"{synced:.0%}", f"{accuracy:.1%}", f"{(accuracy - right) * 100:+.1f}"])
        good += [label] if synced <= 0.5 and right - accuracy <= 0.01 else []
    if len(lines) == 1:
        return missing("SelSync")
    verdict = f"At most half of the synchronisations for at most one point: {', '.join(good) or 'NONE of them'}."
    head = [f"{steps} steps", "steps that synchronise", "accuracy, mean of the seeds", "points against DDP's"]
    return f"{table(head, lines)}\n{verdict}\n"


# -- gossip: latency or bandwidth --


def gossip_cells() -> list[Cell]:
    graphs = [("DDP", "DDP", {}), *((f"Gossip(graph={g})", "Gossip", {"graph": g}) for g in ("ring", "exponential"))]
    return [
        Cell(part="gossip", row=label, where=f"{mbit:g} Mbit/s, {ms:g} ms", seed=0, method=name, knobs=knobs,
             real=False, fabric=Fabric(link=Link(bandwidth=mbit, latency=ms)), steps=60, every=0)
        for mbit, ms in WIRES for label, name, knobs in graphs
    ]  # fmt: skip


def wire(row: str, mbit: float, ms: float, nbytes: float, ranks: int) -> float:
    """Seconds of wire in one step, by the cost model: messages one after the other, and bytes of one port.

    >>> wire("DDP", 8.0, 10.0, 1e6, 4), wire("Gossip(graph=ring)", 8.0, 10.0, 1e6, 4)
    (1.56, 2.02)
    """
    messages, share = {"DDP": (2 * (ranks - 1), 2 * (ranks - 1) / ranks), RING: (2, 2.0)}.get(row, (1, 1.0))
    return messages * ms * 1e-3 + share * nbytes * 8e-6 / mbit


def modelled(row: str, mbit: float, ms: float, f: dict[str, Any]) -> float:
    """Seconds of a step: an all-reduce in one bucket follows the backward, messages to neighbours run beside it."""
    forward, backward, update = f["compute"]
    seconds = wire(row, mbit, ms, f["model"], RANKS)
    return forward + backward + seconds + update if row == "DDP" else max(forward + backward, seconds) + update


def gossip_text(found: Results) -> str:
    lines, wrong, seen = [], [], 0
    for mbit, ms in WIRES:
        where = f"{mbit:g} Mbit/s, {ms:g} ms"
        line = [where]
        for row in (RING, EXPONENTIAL):
            for mine, base in found.pairs("gossip", row, "DDP", where):
                ratio = mine["samples_per_s"] / base["samples_per_s"]
                model = modelled("DDP", mbit, ms, base) / modelled(row, mbit, ms, mine)
                line += [f"{model:.2f}", f"{ratio:.2f}"]
                seen += 1
                clear = max(abs(ratio - 1), abs(model - 1)) > CLEARLY - 1
                wrong += [f"{row} at {where}"] if clear and (ratio > 1) != (model > 1) else []
        lines += [line] if len(line) == 5 else []
    if not lines:
        return missing("gossip's grid")
    head = ["port", "ring over DDP, by the model", "simulated", "exponential over DDP, by the model", "simulated"]
    about = (
        "Pace over DDP's. By the cost model a step of DDP has 2 (p-1) latencies and 2 (p-1)/p of the model's bytes "
        "on the wire after its backward; a ring has two messages of the whole model beside it, the one-peer "
        "exponential graph one. Sizes only. Ranks on a ring do not wait for all, so they drift out of step; then one "
        "neighbour's message waits at the port for the other's, and a round takes up to three messages' time where the "
        "model counts two."
    )
    verdict = f"Winner other than the model says: {', '.join(wrong) or 'nowhere'} ({seen} comparisons)."
    return f"{about}\n\n{table(head, lines)}\n{verdict}\n"


PARTS = (
    Part("From a common state: few bytes, the same loss", outer_cells, outer_text),
    Part("Who is slow, and how", list, slow_text),
    Part("SelSync on Digits", selsync_cells, selsync_text),
    Part("Gossip: latency or bandwidth", gossip_cells, gossip_text),
)


# -- words --


def spread(values: list[float]) -> str:
    """Mean and half the distance between the lowest and the highest."""
    return f"{statistics.fmean(values):.3f} ± {(max(values) - min(values)) / 2:.3f}"


def low_high(values: list[float], digits: int = 2) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def kept(good: bool, asked: str) -> str:
    return f"(asked: {asked}{'' if good else ': NOT kept'})"
