"""ShadowSync's loss beside its foreground forms', at the same gap, with the same tables on a server, tuned alike.

In the simulator with real tensors, on clicks whose best loss is known. Each form gets twelve trials of three seeds (six
learning rates, two settings of one knob); a grid whose best rate lies at its edge is widened once. The best of each is
run with five other seeds. Each shadow has a Link on which it synchronises every ten steps or so. What was run is kept
beside the result, in `.runs.jsonl`: begun again, it goes on.

    python -m tests.bench.shadow_tables_quality --out docs/data/shadow_tables_quality.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.bench.foreground import ForegroundBMUF, ForegroundEASGD, ForegroundMA
from tests.bench.page import interval, table
from tests.bench.shadow_tables import replicated
from workbench import Experiment, simulate
from workbench.fabric import Fabric, Link
from workbench.strategies import ShadowSync, ShadowSyncBMUF, ShadowSyncMA, Strategy
from workbench.tasks import ClickThrough

RANKS, PACE, BATCH, GAP, STEPS = 5, 60.0, 16, 10, 200  # the last rank serves
TASK = ClickThrough(fields=4, ids=500, width=8, hidden=128)
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
SEEDS, OTHERS = (0, 1, 2), (10, 11, 12, 13, 14)
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
    """Mbit/s on which shadows of this kind synchronise every GAP steps: found with sizes only, by halving."""
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
    """Normalised entropy after STEPS steps of each trainer, and the mean gap."""
    samples = simulate(experiment(strategy, bandwidth(type(strategy)), lr, seed), real=True).samples
    loss = samples[samples["name"] == "held_out:normalised entropy"]["value"].iloc[-1]
    gaps = samples[(samples["name"] == "sync gap") & (samples["value"] > 0)]["value"]
    return float(loss), float(gaps.mean())


class Kept:
    """What was run before, and what is run now, a line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._found = {tuple(key): tuple(value) for key, value in map(json.loads, lines)}

    def run(self, strategy: Strategy, lr: float, seed: int) -> tuple[float, float]:
        key = str(strategy), lr, seed
        if key not in self._found:
            self._found[key] = run(strategy, lr, seed)
            with self.path.open("a") as file:
                file.write(json.dumps([key, self._found[key]]) + "\n")
            print(*key, *self._found[key], flush=True)
        return self._found[key]  # type: ignore[return-value]


def tuned(kept: Kept, pair: tuple[Strategy, Strategy]) -> list[dict[str, Any]]:
    """The trials: those of the grid, and of one rate more where the best lies at its edge."""
    seen: list[dict[str, Any]] = []

    def tried(lr: float) -> None:
        for number, strategy in enumerate(pair):
            losses = [kept.run(strategy, lr, seed)[0] for seed in SEEDS]
            seen.append({"lr": lr, "setting": number, "losses": losses})

    for lr in RATES:
        tried(lr)
    best = min(seen, key=lambda t: statistics.mean(t["losses"]))["lr"]
    if wider := {RATES[0]: RATES[0] / 2, RATES[-1]: RATES[-1] * 2}.get(best):
        tried(wider)
    return seen


def section(d: dict[str, Any]) -> str:
    """The page's section, from the raw numbers."""
    rows = []
    for way, cell in d["ways"].items():
        losses, beside = [loss for loss, _ in cell["others"]], ""
        if way in PAIRS:
            its = [loss for loss, _ in d["ways"][PAIRS[way]]["others"]]
            beside = "{:+.4f} ({:+.4f} to {:+.4f})".format(*interval([a - b for a, b in zip(losses, its, strict=True)]))
        gap = statistics.mean(g for _, g in cell["others"])
        rows.append([way, f"{cell['best']['lr']:g}", cell["best"]["strategy"],
                     "{:.4f} ({:.4f} to {:.4f})".format(*interval(losses)), f"{gap:.1f}", beside])  # fmt: skip
    about = (
        f"{RANKS - 1} simulated trainers and a server that has the tables, with real tensors; ClickThrough with "
        f"{replicated(TASK) / 1e3:.0f} kB beside the tables, {STEPS} steps of {BATCH} examples each, Adam. Each shadow "
        f"has a Link on which it synchronises every {GAP} steps or so, the foreground forms do so every {GAP}. Twelve "
        f"trials of three seeds each (six rates, two settings), the best with five other seeds: median with a 95 % "
        f"bootstrap interval. The normalised entropy of whoever knows the rate of clicks alone is 1; lower is better."
    )
    head = ["", "best rate", "best setting", "normalised entropy", "gap", "beside its foreground form"]
    return f"## ShadowSync's loss beside its foreground forms'\n\n{about}\n\n{table(head, rows)}"


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
        kept = Kept(a.out.with_suffix(f".{way.replace(' ', '_')}.runs.jsonl"))
        trials = tuned(kept, pair)
        best = min(trials, key=lambda t: statistics.mean(t["losses"]))
        strategy = pair[best["setting"]]
        others = [kept.run(strategy, best["lr"], seed) for seed in OTHERS]
        ways[way] = {"trials": trials, "best": {**best, "strategy": str(strategy)}, "others": others}
    if not a.only:
        a.out.write_text(json.dumps({"ways": ways}))


if __name__ == "__main__":
    main()
