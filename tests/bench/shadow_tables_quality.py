"""Compares ShadowSync's loss with its foreground forms' at the same gap, with tables on a server.

The simulator runs with real tensors, on clicks with a known best loss. Each form gets twelve trials of three seeds (six
learning rates, two settings of one knob). A grid is widened once if its best rate is at the edge. The best of each runs
with five other seeds. Each shadow has a Link on which it synchronises about every ten steps. Runs are kept in
`.runs.jsonl` next to the result, so it resumes.

    python -m tests.bench.shadow_tables_quality --out docs/data/shadow_tables_quality.json
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.bench.foreground import ForegroundBMUF, ForegroundEASGD, ForegroundMA
from tests.bench.rivals import BUDGET, Kept, cell, compared
from tests.bench.shadow_tables import replicated
from workbench import Experiment, simulate
from workbench.fabric import Fabric, Link
from workbench.strategies import ShadowSync, ShadowSyncBMUF, ShadowSyncMA, Strategy
from workbench.tasks import ClickThrough

RANKS, PACE, BATCH, GAP, STEPS = 5, 60.0, 16, 10, 200  # the last rank serves
TASK = ClickThrough(fields=4, ids=500, width=8, hidden=128)
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
WAYS: dict[str, tuple[Strategy, Strategy]] = {
    "averaging, all wait": (ForegroundMA(every=GAP), ForegroundMA(every=GAP, alpha=0.5)),
    "ShadowSyncMA": (ShadowSyncMA(piece_kb=1.0), ShadowSyncMA(piece_kb=1.0, alpha=0.5)),
    "BMUF, all wait": (ForegroundBMUF(every=GAP, eta=0.5), ForegroundBMUF(every=GAP, eta=0.25)),
    "ShadowSyncBMUF": (ShadowSyncBMUF(piece_kb=1.0, eta=0.5), ShadowSyncBMUF(piece_kb=1.0, eta=0.25)),
    "elastic, all wait": (ForegroundEASGD(every=GAP, alpha=0.5), ForegroundEASGD(every=GAP, alpha=0.25)),
    "ShadowSync": (ShadowSync(piece_kb=1.0, alpha=0.5), ShadowSync(piece_kb=1.0, alpha=0.25)),
}
PAIRS = {"ShadowSyncMA": "averaging, all wait", "ShadowSyncBMUF": "BMUF, all wait", "ShadowSync": "elastic, all wait"}


def experiment(strategy: Strategy, mbit: float, lr: float = 1e-3, seed: int = 0) -> Experiment:
    return Experiment(task=TASK, ranks=RANKS, steps=STEPS, strategy=strategy, lr=lr, batch=BATCH, pace=PACE, seed=seed,
                      eval_every=STEPS, fabric=Fabric(link=Link(bandwidth=mbit))).checked()  # fmt: skip


@cache
def bandwidth(kind: type[Strategy]) -> float:
    """Returns the Mbit/s at which shadows of this kind synchronise every GAP steps, by bisection with sizes only."""
    if kind.__name__.startswith("Foreground"):
        return 1000.0
    least, most = 0.02, 200.0
    for _ in range(10):
        middle = (least * most) ** 0.5
        e = experiment(kind(piece_kb=1.0), middle).set("steps", 80).set("eval_every", 0)  # type: ignore[call-arg]
        gaps = simulate(e).samples.query("name == 'sync gap' and value > 0")["value"]
        least, most = (middle, most) if not len(gaps) or gaps.mean() > GAP else (least, middle)
    return (least * most) ** 0.5


def run(strategy: Strategy, lr: float, seed: int) -> tuple[float, float]:
    """Returns the normalised entropy after STEPS steps of each trainer, and the mean gap."""
    samples = simulate(experiment(strategy, bandwidth(type(strategy)), lr, seed), real=True).samples
    loss = samples[samples["name"] == "held_out:normalised entropy"]["value"].iloc[-1]
    gaps = samples[(samples["name"] == "sync gap") & (samples["value"] > 0)]["value"]
    return float(loss), float(gaps.mean())


def section(d: dict[str, Any]) -> str:
    """Returns the page's section, from the raw numbers."""
    about = (
        f"{RANKS - 1} simulated trainers with real tensors train ClickThrough with Adam, {STEPS} steps of {BATCH} "
        f"examples each. A server has the embedding tables. The other parameters have {replicated(TASK) / 1e3:.0f} kB. "
        f"The foreground forms synchronise every {GAP} steps. Each shadow has a link that lets it synchronise about as "
        f"often. {BUDGET}"
    )
    return f"{about}\n\n{compared(d['ways'], PAIRS)}"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=Path("docs/data/shadow_tables_quality.json"))
    ask.add_argument("--only", default="", help="tune this way alone, and write no result: for two at a time")
    a = ask.parse_args()
    torch.set_num_threads(1)
    ways: dict[str, Any] = {}
    for way, pair in WAYS.items():
        if a.only not in ("", way):
            continue
        kept = Kept(a.out.with_suffix(f".{way.replace(' ', '_')}.runs.jsonl"), run)
        ways[way] = cell(kept.run, pair, RATES)
    if not a.only:
        a.out.write_text(json.dumps({"ways": ways}))


if __name__ == "__main__":
    main()
