"""Compares outer momentum and the loss of Local SGD from a common state, each at its best learning rate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from tests.bench import tuning
from tests.bench.cells import SEEDS, TASK, Cell, Results
from tests.bench.methods import method
from tests.bench.page import table
from tests.bench.words import kept, missing, spread

COMMON, PERIOD, ROUNDS = 200, 25, 16  # steps before, of a round, rounds after
GRID = (0.5, 1.0, 2.0, 4.0)  # learning rates, as multiples of the task's
OUTER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SlowMo", {"every": PERIOD}),
    ("DiLoCo", {"every": PERIOD}),
    ("StreamingDiLoCo", {"every": PERIOD, "fragments": 4, "bits": 32}),
    ("StreamingDiLoCo", {"every": PERIOD, "fragments": 4}),
)
CONTROL: tuple[str, dict[str, Any]] = ("LocalSGD", {"every": PERIOD})  # the same rounds without an outer momentum
DRIFTING = (4, 8, 16, 32)


def _outer() -> list[tuple[str, str, dict[str, Any]]]:
    local = [("LocalSGD", {"every": every}) for every in DRIFTING]
    return [("DDP", "DDP", {}), *((method_label(n, k), n, k) for n, k in (*OUTER, CONTROL, *local))]


def method_label(name: str, knobs: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{k}={v}' for k, v in knobs.items())})" if knobs else name


def outer_cells() -> list[Cell]:
    """Returns the cells of every row, as far as its learning rate is known."""
    found = Results.of()

    def row(label: str, name: str, knobs: dict[str, Any]) -> list[Cell]:
        def make(rate: float, seed: int) -> Cell:
            end = COMMON + PERIOD * ROUNDS
            return Cell(part="outer", row=label, where=tuning.where(rate), seed=seed, method=name, knobs=knobs,
                        rate=rate, after=COMMON, steps=end, every=end)  # fmt: skip

        return tuning.cells(found, "outer", label, GRID, make)

    return [cell for label, name, knobs in _outer() for cell in row(label, name, knobs)]


def best(found: Results, row: str) -> tuple[tuning.Choice, dict[int, dict[str, Any]]] | None:
    """Returns (learning rate, results at it by seed)."""
    chosen = tuning.choice(found, "outer", row, GRID)
    return chosen and (chosen, found.seeds("outer", row, tuning.where(chosen.rate)))


def over(
    mine: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]], of: Callable[[dict[str, Any]], float]
) -> float:
    """Returns the ratio of two rows' means over common seeds; NaN without any. Seeds vary as much as rows."""
    both = [seed for seed in mine if seed in base]
    if not both:
        return math.nan
    return statistics.fmean(of(mine[s]) for s in both) / statistics.fmean(of(base[s]) for s in both)


def twin(name: str, knobs: Mapping[str, Any]) -> str:
    """Returns the row from the common state of a strategy with these knobs, with any period."""
    usual = method(name).strategy({})
    own = {k: v for k, v in knobs.items() if k != "every" and v != getattr(usual, k)}
    return method_label(name, {"every": PERIOD, **own})


def gained(found: Results, row: str) -> float:
    """Returns the control's loss over that of `row` from the common state; 0 if either is missing."""
    mine, control = best(found, row), best(found, method_label(*CONTROL))
    ratio = over(control[1], mine[1], tuning.last) if mine and control else math.nan
    return 0.0 if math.isnan(ratio) else ratio


def outer_text(found: Results) -> str:
    if (base := best(found, "DDP")) is None:
        return missing("DDP from the common state")
    each = {label: (name, knobs, best(found, label)) for label, name, knobs in _outer()}
    there = {label: one for label, (_, _, one) in each.items() if one}
    lines = [_line(label, *one, base[1]) for label, one in there.items()]
    said = [_asked(label, there[label][1], base[1]) for label, (n, k, one) in each.items() if one and (n, k) in OUTER]
    said += _bursts({label: max(f["largest"] for f in seeds.values()) for label, (_, seeds) in there.items()})
    head = ["learning rate", "held-out loss", "loss against DDP's", "bytes, % of DDP's", "most bytes in one step"]
    lacking = [label for label in each if label not in there]
    gaps = missing(*lacking) if lacking else ""
    found_so = "Goals: few bytes, the same loss.\n\n" + "\n".join(f"- {one}." for one in said) + "\n" if said else ""
    open_ended = [label for label, (c, _) in there.items() if c.edge and not tuning.widened(c, GRID)]
    return f"{_about(open_ended)}\n\n{table([f'from step {COMMON} on', *head], lines)}\n{found_so}\n{gaps}"


def _line(
    label: str, chosen: tuning.Choice, mine: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]
) -> list[str]:
    rate = f"{chosen.rate * TASK.lr:g}{tuning.at_edge(chosen, GRID)}"
    gap, share = over(mine, base, tuning.last) - 1, over(mine, base, itemgetter("bytes"))
    most = max(f["largest"] for f in mine.values())
    return [
        label,
        rate,
        spread([tuning.last(f) for f in mine.values()]),
        f"{gap:+.1%}",
        f"{share:.1%}",
        f"{most / 1e6:.3f} MB",
    ]


def _asked(label: str, mine: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> str:
    """Returns the requirement for an outer momentum and its result."""
    gap, share = over(mine, base, tuning.last) - 1, over(mine, base, itemgetter("bytes"))
    return (
        f"{label}: {gap:+.1%} loss {kept(gap <= 0.02, 'at most +2 %')} with {share:.1%} of the bytes "
        f"{kept(share < 0.05, 'under 5 %')}"
    )


def _bursts(largest: dict[str, int]) -> list[str]:
    """Returns a streaming row's largest bytes in one step over those of DiLoCo."""
    whole = largest.get(f"DiLoCo(every={PERIOD})")
    return [
        f"{label}: the most bytes of one rank in one step are {most / whole:.2f} of DiLoCo's "
        f"{kept(most / whole < 1 / 3, 'under a third')}"
        for label, most in largest.items()
        if label.startswith("Streaming") and whole
    ]


def _about(open_ended: list[str]) -> str:
    """open_ended: rows whose best rate is at an edge without a value beyond it yet."""
    rates = ", ".join(f"{r * TASK.lr:g}" for r in GRID)
    still = f" This rate is not tried yet for {', '.join(open_ended)}." if open_ended else ""
    return (
        f"Each row continues from one state, after {COMMON} steps of DDP, for {PERIOD * ROUNDS} more steps. Its "
        f"learning rate is the best of {rates} on the first seed. If the best is the smallest or the largest, one more "
        f"rate beyond it is tried.{still} The best rate then runs with {len(SEEDS)} seeds. {method_label(*CONTROL)} is "
        "the control: the same rounds without outer momentum. Ratios use the seeds that both sides have."
    )
