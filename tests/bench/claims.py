"""Claims about strategies, each with its cells and the page's text about whether it holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.bench.cells import FABRICS, RANKS, SEEDS, STEPS, Cell, Results, fabric, reached
from tests.bench.methods import LINK, SLOW, STUMBLE, method, methods, tempo
from tests.bench.outer import method_label, outer_cells, outer_text
from tests.bench.page import table
from tests.bench.words import missing
from workbench.fabric import Fabric, Link
from workbench.settings import find
from workbench.strategies import Strategy
from workbench.tasks import Digits

SELECTIVE: tuple[dict[str, Any], ...] = (
    {"delta": 0.1},
    {"delta": 0.3},
    {"delta": 1.0},
    {"delta": 0.02, "norm_window": 25},
    {"delta": 0.05, "norm_window": 25},
)
SMALL = Digits(width=8, hidden=64)
SHORT, LONG = 160, 800  # steps of SelSync's runs: while accuracy still rises steeply, and later
WIRES = tuple((mbit, ms) for mbit in (10.0, 100.0, 1000.0) for ms in (0.0, 5.0, 20.0))
RING, EXPONENTIAL = "Gossip(graph=ring)", "Gossip(graph=exponential)"
CLEARLY = 1.05  # times as fast: a smaller ratio is no difference


class Part(NamedTuple):
    """One claim with its heading, its cells and the page's text about the results."""

    title: str
    cells: Callable[[], list[Cell]]
    text: Callable[[Results], str]


def rows() -> list[tuple[str, str, dict[str, Any]]]:
    """Returns (label, strategy, knobs) of every row of the tables, DDP first."""
    found = [("DDP", "DDP", {})]
    for m in methods():
        found += [(m.label(k), m.name, dict(k)) for k in m.knobs if (m.name, dict(k)) != ("DDP", {})]
    return found


def tables() -> list[Cell]:
    """Returns the cells of the four tables, seed by seed."""
    return [
        Cell(part="table", row=label, where=where, seed=seed, method=name, knobs=knobs, fabric=fabric(where, seed),
             rate=method(name).rate)
        for seed in SEEDS for where in FABRICS for label, name, knobs in rows()
    ]  # fmt: skip


def target(found: Results) -> float | None:
    """Returns the tables' target loss: DDP's at the first evaluation in the second half, mean over seeds."""
    for where in FABRICS:
        curves = [f["curve"] for f in found.seeds("table", "DDP", where).values()]
        halves = [next(loss for s, _, loss in curve if s >= STEPS // 2) for curve in curves]
        if halves:
            return round(statistics.fmean(halves), 3)
    return None


def times(found: Results, row: str, where: str) -> list[float]:
    """Returns by seed how many times as fast as DDP a row reached the target; 0 if it never did."""
    goal, out = target(found), []
    for mine, base in found.pairs("table", row, "DDP", where):
        first, mine_at = reached(base["curve"], goal or 0.0), reached(mine["curve"], goal or 0.0)
        if first:
            out.append(first / mine_at if mine_at else 0.0)
    return out


def speed(quick: list[float]) -> str:
    """Formats the speed relative to DDP; a seed that never reached the target counts as slowest."""
    never = sum(not t for t in quick)
    if 2 * never >= len(quick):
        return f"not reached in {STEPS} steps{f' by {never} of {len(quick)} seeds' if never < len(quick) else ''}"
    low = "never" if never else f"{min(quick):.2f}"
    return f"{statistics.median(quick):.2f} ({low} to {max(quick):.2f})"


def comparable(name: str, where: str) -> bool:
    """Whether a strategy can be compared with DDP on a fabric. Shared memory has no port that a slow network limits."""
    return where != LINK or not find(Strategy, name).shared


# -- stragglers --


def slow_text(found: Results) -> str:
    asked = [  # strategy, where, whether it must beat DDP, why
        ("BackupWorkers", SLOW, True, "It does not wait for the slowest rank."),
        ("AsyncServer", SLOW, True, "Only the slow rank itself is slow."),
        ("BoundedStaleness", STUMBLE, True, "After a random slowdown a rank catches up before the bound "
         "is reached, so no rank waits."),
        ("BoundedStaleness", SLOW, False, "A rank that is always slow never catches up. Once the other ranks "
         "reach the bound, all ranks run at its speed, as in DDP."),
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
                f"{label}{tempo(name)}",
                where,
                speed(pace),
                f"{'faster' if beats else 'no faster'}{'' if good else ': NOT kept'}",
                why,
            ]
        )
    head = ["strategy", "network", "times DDP's speed to the target loss", "goal", "reason"]
    about = f"Median of the seeds (lowest to highest). Faster means more than {CLEARLY} times as fast.\n\n"
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
            "Early in training, accuracy still rises steeply. Then averaging parameters, even in every step, gives "
            f"less accuracy than averaging gradients:\n\n{_selsync(found, 'Digits, short', SHORT)}"
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
    verdict = "Goal: at most half of DDP's synchronisations, at most one point of accuracy lost. "
    verdict += f"Kept by: {', '.join(good) or 'NONE'}."
    head = [f"{steps} steps", "steps that synchronise", "accuracy, mean of the seeds", "points more than DDP"]
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
    """Returns the cost model's wire seconds of one step: messages in turn, and the bytes of one port.

    >>> wire("DDP", 8.0, 10.0, 1e6, 4), wire("Gossip(graph=ring)", 8.0, 10.0, 1e6, 4)
    (1.56, 2.02)
    """
    messages, share = {"DDP": (2 * (ranks - 1), 2 * (ranks - 1) / ranks), RING: (2, 2.0)}.get(row, (1, 1.0))
    return messages * ms * 1e-3 + share * nbytes * 8e-6 / mbit


def modelled(row: str, mbit: float, ms: float, f: dict[str, Any]) -> float:
    """Returns the modelled seconds of a step: an all-reduce follows backward, messages to neighbours overlap with
    it.
    """
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
    head = ["port", *(f"{graph}, {by}" for graph in ("ring", "exponential") for by in ("cost model", "simulated"))]
    about = (
        "Each number is a multiple of DDP's steps per second, with sizes only. In the cost model, DDP communicates "
        "after its backward: 2 (p-1) latencies, and 2 (p-1)/p of the model's bytes. A ring sends two messages of the "
        "whole model during forward and backward. The one-peer exponential graph sends one such message. Ranks on a "
        "ring do not wait for every other rank, so they drift out of step. Then a neighbour's message waits at the "
        "port for the other neighbour's message. A round then takes the time of up to three; the model counts two."
    )
    verdict = f"The model names the wrong winner in these of {seen} comparisons: {', '.join(wrong) or 'none'}."
    return f"{about}\n\n{table(head, lines)}\n{verdict}\n"


PARTS = (
    Part("Outer momentum from a common state", outer_cells, outer_text),
    Part("Stragglers", list, slow_text),
    Part("SelSync on Digits", selsync_cells, selsync_text),
    Part("Gossip: latency or bandwidth", gossip_cells, gossip_text),
)
