"""ShadowSync's other claim: a loss no worse than foreground synchronisation's at the same gap, both tuned alike.

In the simulator with real tensors, on clicks whose best loss is known. Each shadow and its foreground form get twelve
trials of three seeds (six learning rates, two settings of one knob); a grid whose best rate lies at its edge is widened
once. The best of each is run with five other seeds.

    python -m tests.bench.shadow_quality --out docs/data/shadow_quality.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.page import interval, table
from tests.bench.shadow import BATCH, PACE, RANKS, TASK, bandwidth
from workbench import Experiment, simulate
from workbench.fabric import Fabric, Link
from workbench.strategies import BMUF, DDP, EASGD, LocalSGD, ShadowBMUF, ShadowEASGD, ShadowMA, Strategy

GAP, STEPS = 10, 400  # steps between two synchronisations; of a run
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
SEEDS, OTHERS = (0, 1, 2), (10, 11, 12, 13, 14)
WAYS: dict[str, tuple[Strategy, Strategy]] = {
    "DDP": (DDP(), DDP()),
    "averaging (LocalSGD)": (LocalSGD(every=GAP), LocalSGD(every=GAP, momentum="average")),
    "ShadowMA": (ShadowMA(), ShadowMA(alpha=0.5)),
    "BMUF": (BMUF(every=GAP, eta=0.5), BMUF(every=GAP, eta=0.25)),
    "ShadowBMUF": (ShadowBMUF(eta=0.5), ShadowBMUF(eta=0.25)),
    "EASGD": (EASGD(every=GAP, beta=0.8), EASGD(every=GAP, beta=0.4)),
    "ShadowEASGD": (ShadowEASGD(alpha=0.5), ShadowEASGD(alpha=0.25)),
}
PAIRS = {"ShadowMA": "averaging (LocalSGD)", "ShadowBMUF": "BMUF", "ShadowEASGD": "EASGD"}


def run(strategy: Strategy, lr: float, seed: int) -> tuple[float, float]:
    """Normalised entropy after STEPS steps of each rank, and the mean gap."""
    nbytes = 4 * sum(parameter.numel() for parameter in TASK.build().model().parameters())
    port = 1.3 if isinstance(strategy, ShadowEASGD) else 0.99  # a server's carries more: so the gap is about the same
    link = Link(bandwidth=port * bandwidth(GAP, nbytes))
    e = Experiment(task=TASK, ranks=RANKS, steps=STEPS, strategy=strategy, lr=lr, batch=BATCH, pace=PACE, seed=seed,
                   eval_every=STEPS, fabric=Fabric(link=link))  # fmt: skip
    samples = simulate(e.checked(), real=True).samples
    loss = samples[samples["name"] == "held_out:normalised entropy"]["value"].iloc[-1]
    gaps = samples[samples["name"] == "sync gap"]["value"]
    return float(loss), float(gaps[gaps > 0].mean()) if len(gaps) else float(GAP)


def tuned(pair: tuple[Strategy, Strategy]) -> Iterator[dict[str, Any]]:
    """The trials: those of the grid, and of one rate more where the best lies at its edge."""
    rates, seen = list(RATES), []
    while rates:
        for lr in rates:
            for number, strategy in enumerate(pair[: 1 if pair[0] == pair[1] else 2]):
                losses = [run(strategy, lr, seed)[0] for seed in SEEDS]
                trial = {"lr": lr, "setting": number, "losses": losses}
                seen.append(trial)
                yield trial
        best = min(seen, key=lambda t: statistics.mean(t["losses"]))["lr"]
        wider = {RATES[0]: RATES[0] / 2, RATES[-1]: RATES[-1] * 2}.get(best)
        rates = [wider] if wider and len(rates) > 1 else []


def section(d: dict[str, Any]) -> str:
    """The page's section, from the raw numbers."""
    rows = []
    for way, cell in d["ways"].items():
        losses = [loss for loss, _ in cell["others"]]
        beside = ""
        if way in PAIRS:
            its = [loss for loss, _ in d["ways"][PAIRS[way]]["others"]]
            beside = "{:+.4f} ({:+.4f} to {:+.4f})".format(*interval([a - b for a, b in zip(losses, its, strict=True)]))
        gap = statistics.mean(g for _, g in cell["others"]) if way != "DDP" else 1.0
        rows.append([way, f"{cell['best']['lr']:g}", cell["best"]["strategy"],
                     "{:.4f} ({:.4f} to {:.4f})".format(*interval(losses)), f"{gap:.1f}", beside])  # fmt: skip
    about = (
        f"{RANKS} simulated ranks with real tensors, ClickThrough, {STEPS} steps of {BATCH} examples each, Adam; a "
        f"Link on which a shadow synchronises every {GAP} steps or so, as the foreground forms do. Twelve trials of "
        f"three seeds each (six rates, two settings), the best with five other seeds: median with a 95 % bootstrap "
        f"interval. The normalised entropy of whoever knows the rate of clicks alone is 1; lower is better."
    )
    head = ["", "best rate", "best setting", "normalised entropy", "gap", "beside its foreground form"]
    return f"## Shadows' loss beside foreground synchronisation's\n\n{about}\n\n{table(head, rows)}"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=Path("docs/data/shadow_quality.json"))
    a = ask.parse_args()
    ways: dict[str, Any] = {}
    for way, pair in WAYS.items():
        trials = list(tuned(pair))
        best = min(trials, key=lambda t: statistics.mean(t["losses"]))
        strategy = pair[best["setting"]]
        others = [run(strategy, best["lr"], seed) for seed in OTHERS]
        ways[way] = {"trials": trials, "best": {**best, "strategy": str(strategy)}, "others": others}
        print(way, best["lr"], strategy, [round(loss, 4) for loss, _ in others], flush=True)
    a.out.write_text(json.dumps({"ways": ways}))


if __name__ == "__main__":
    main()
