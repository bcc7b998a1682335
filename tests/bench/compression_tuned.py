# ruff: noqa: E501
"""Compares compressors under three optimizers, each with its own learning rate, for docs/project/compression.md.

The loss of a compressor depends on the optimizer that gets the sum: Adam's first moment, no momentum, or SGD's. All
rows, Dense included, are tuned by the rule of `tuning`. The study looks at losses only, not at times.
"""

from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple

from tests.bench import tuning
from tests.bench.cells import SEEDS, Cell, Results, reached
from tests.bench.page import table
from tests.bench.tuning import Choice
from tests.bench.words import spread
from workbench.compressors import Compressor
from workbench.settings import find, to_plain

PART = "tuned"


class Setting(NamedTuple):
    """An optimizer as plain data, its label, the rates to try first, and the compressors."""

    name: str
    optimizer: Any
    rates: tuple[float, ...]  # learning rates
    rows: tuple[str, ...]


SETTINGS = (
    Setting("AdamW, the task's own", "TaskOwn", (0.003, 0.006, 0.012), ("Dense", "ALQ", "AMQ", "TopK", "PowerSGD")),
    Setting("AdamW(beta1=0)", {"AdamW": {"beta1": 0.0, "beta2": 0.95}}, (0.003, 0.006, 0.012), ("Dense", "TopK", "PowerSGD", "SIDCo", "GTopK")),
    Setting(
        "SGD(momentum=0.9)", {"SGD": {"momentum": 0.9}}, (0.05, 0.1, 0.2),
        ("Dense", "DGC(density=0.01)", "TopK", "PowerSGD", "ALQ", "EFSignSGD", "OneBit"),
    ),
)  # fmt: skip
CODECS: dict[str, Any] = {"DGC(density=0.01)": {"DGC": {"density": 0.01}}}  # if not the bare name's settings


def codec(row: str) -> Any:
    """Returns a row's compressor as plain data."""
    return CODECS.get(row) or to_plain(find(Compressor, row).usual())


def label(setting: Setting, row: str) -> str:
    return f"{row}, {setting.name}"


def grid(setting: Setting) -> tuple[float, ...]:
    """Returns the rates as multiples of the task's."""
    from tests.bench.compression import TASK

    return tuple(rate / TASK.lr for rate in setting.rates)


def cells(found: Results) -> list[Cell]:
    """Returns the cells of every row, as far as results determine its learning rate."""
    out = []
    for setting in SETTINGS:
        for row in setting.rows:
            out += tuning.cells(found, PART, label(setting, row), grid(setting), _maker(setting, row))
    return sorted(out, key=lambda cell: cell.seed)


def _maker(setting: Setting, row: str) -> Any:
    from tests.bench.compression import BUCKET, EVERY, STEPS, TASK

    def make(rate: float, seed: int) -> Cell:
        return Cell(part=PART, row=label(setting, row), where=tuning.where(rate), seed=seed, method="DDP", codec=codec(row),
                    task=TASK, steps=STEPS, every=EVERY, bucket_mb=BUCKET, rate=rate, optimizer=setting.optimizer)  # fmt: skip

    return make


# -- the page --


def ends(found: Results, setting: Setting, row: str) -> tuple[Choice, list[float]] | None:
    """Returns the chosen rate of a row and its final losses by seed; None until the whole grid was tried."""
    name = label(setting, row)
    chosen = tuning.choice(found, PART, name, grid(setting))
    if chosen is None or not set(grid(setting)) <= set(chosen.tried):
        return None
    return (chosen, [tuning.last(f) for f in found.seeds(PART, name, tuning.where(chosen.rate)).values()])


def sooner(found: Results, goal: float) -> str:
    """Returns a note: the tables' speeds are relative to an untuned Dense."""
    from tests.bench.compression import TASK

    if not (known := head_start(found, goal)):
        return ""
    rate, steps, base, seeds = known
    return (
        f" Dense has the task's rate in the tables, as every row has. At its own best rate, {rate * TASK.lr:g}, it reaches that loss in {steps:.0f} steps "
        f"instead of {base:.0f} ({seeds} of {len(SEEDS)} seeds). So a factor below {base / steps:.2f} against dense fp32 is no gain against a tuned dense."
    )


def head_start(found: Results, goal: float) -> tuple[float, float, float, int] | None:
    """Returns (Dense's best rate, its steps to `goal`, steps at the task's rate, seeds), or None if not known."""
    if not (one := ends(found, SETTINGS[0], "Dense")):
        return None
    seeds = found.seeds(PART, label(SETTINGS[0], "Dense"), tuning.where(one[0].rate)).values()
    at = [reached([(s, float(s), loss) for s, _, loss in f["curve"]], goal) for f in seeds]
    plain = [
        reached([(s, float(s), loss) for s, _, loss in f["curve"]], goal)
        for f in found.seeds("loss", "Dense", "any link").values()
    ]
    if not all(at) or not all(plain) or one[0].rate == 1.0:
        return None
    steps, base = (statistics.median(x or 0.0 for x in each) for each in (at, plain))
    return one[0].rate, steps, base, len(at)


def text(found: Results) -> str:
    """Returns a table for each optimizer, or one line without results."""
    from tests.bench.compression import STEPS

    about = (
        f"Each row, Dense included, trains as above for {STEPS} steps with its own learning rate. The rates named at each table run with the first seed. If the best is the smallest or the "
        f"largest, one more rate beyond it is tried. If that rate is not tried yet, the row says so. The best rate then runs with {len(SEEDS)} seeds. Adam divides by the usual size of an entry. "
        "So a large entry that comes alone moves its weight no further than a small entry. Through Adam's first moment, the entries that error feedback sends late do not count in full. "
        "EFSignSGD, OneBit and DGC are meant for SGD."
    )
    if not any(ends(found, setting, row) for setting in SETTINGS for row in setting.rows):
        return "Each compressor at its own best learning rate, under three optimizers: not measured yet.\n"
    return f"### Tuned learning rates under three optimizers\n\n{about}\n" + "".join(_table(found, s) for s in SETTINGS)


def _table(found: Results, setting: Setting) -> str:
    from tests.bench.compression import TASK

    base, lines, lacking = ends(found, setting, "Dense"), [], []
    for row in setting.rows:
        if (one := ends(found, setting, row)) is None:
            lacking.append(row)
            continue
        chosen, each = one
        rate = f"{chosen.rate * TASK.lr:g}{tuning.at_edge(chosen, grid(setting))}"
        pairs = list(zip(each, base[1], strict=False)) if base else []
        gap = (
            f"{sum(a for a, _ in pairs) / sum(b for _, b in pairs) - 1:+.1%}"
            if pairs and math.isfinite(sum(each))
            else ""
        )
        lines.append([row, rate, spread(each) if math.isfinite(sum(each)) else "not a number", gap])
    head = [f"under {setting.name}", "learning rate", "final held-out loss", "loss against dense"]
    rates = f"\nTried first: {', '.join(f'{r:g}' for r in setting.rates)}.\n"
    gaps = f"\nNot measured yet: {', '.join(lacking)}.\n" if lacking else ""
    return f"\n{table(head, lines)}{rates}{gaps}" if lines else f"\nUnder {setting.name}: not measured yet.\n"
