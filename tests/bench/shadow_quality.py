"""Tests ShadowSync's other claim: a loss no worse than foreground synchronisation's at the same gap.

The simulator runs with real tensors, on clicks with a known best loss. Each shadow and its foreground form get twelve
trials of three seeds (six learning rates, two settings of one knob). A grid is widened once if its best rate is at the
edge. The best of each runs with five other seeds. Runs are kept in `.runs.jsonl` next to the result, so it resumes.

    python -m tests.bench.shadow_quality --out docs/data/shadow_quality.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tests.bench.rivals import BUDGET, Kept, cell, compared
from tests.bench.shadow import BATCH, PACE, RANKS, TASK, bandwidth
from workbench import Experiment, simulate
from workbench.fabric import Fabric, Link
from workbench.strategies import BMUF, DDP, EASGD, LocalSGD, ShadowBMUF, ShadowEASGD, ShadowMA, Strategy

GAP, STEPS = 10, 400  # steps between two synchronisations; of a run
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
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
    """Returns the normalised entropy after STEPS steps of each rank, and the mean gap."""
    nbytes = 4 * sum(parameter.numel() for parameter in TASK.build().model().parameters())
    port = 1.3 if isinstance(strategy, ShadowEASGD) else 0.99  # a server's port carries more, so the gap is about equal
    link = Link(bandwidth=port * bandwidth(GAP, nbytes))
    e = Experiment(task=TASK, ranks=RANKS, steps=STEPS, strategy=strategy, lr=lr, batch=BATCH, pace=PACE, seed=seed,
                   eval_every=STEPS, fabric=Fabric(link=link))  # fmt: skip
    samples = simulate(e.checked(), real=True).samples
    loss = samples[samples["name"] == "held_out:normalised entropy"]["value"].iloc[-1]
    gaps = samples[samples["name"] == "sync gap"]["value"]
    return float(loss), float(gaps[gaps > 0].mean()) if len(gaps) else float(GAP)


def section(d: dict[str, Any]) -> str:
    """Returns the page's section, from the raw numbers."""
    about = (
        f"{RANKS} simulated ranks with real tensors train ClickThrough with Adam, {STEPS} steps of {BATCH} examples "
        f"each. The foreground forms synchronise every {GAP} steps. The link lets a shadow synchronise about as often. "
        f"{BUDGET} DDP has one setting, so it has {len(d['ways']['DDP']['trials'])} trials."
    )
    rows = compared(d["ways"], PAIRS, every_step="DDP")
    return f"{about}\n\n{rows}"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=Path("docs/data/shadow_quality.json"))
    a = ask.parse_args()
    kept = Kept(a.out.with_suffix(".runs.jsonl"), run)
    ways = {way: cell(kept.run, pair, RATES) for way, pair in WAYS.items()}
    a.out.write_text(json.dumps({"ways": ways}))


if __name__ == "__main__":
    main()
