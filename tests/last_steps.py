"""Resumes the checkpoint of a run's last step, under every pair of strategy and partition.

    python -m tests.last_steps --out docs/data/last_steps.json

The ranks are threads, with real tensors and real connections. A campaign goes on where its file ends.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.kept import lived
from tests.piped import piped
from tests.ranks import make_fitting, shipped
from workbench.experiment import Experiment
from workbench.partitions import Partition, Pipeline, Tensor, Whole
from workbench.record.checkpoints import FOLDER, list_checkpoints, step_of
from workbench.settings import KnobError
from workbench.strategies import Strategy

OUT = Path(__file__).parents[1] / "docs" / "data" / "last_steps.json"
RANKS, LAST, MORE = 4, 4, 3  # ranks; steps of the first run; and of the one that resumes it
STRATEGIES = shipped(Strategy)
PARTITIONS: dict[str, Partition] = {"Whole": Whole(), "Pipeline": Pipeline(micros=2), "Tensor": Tensor(),
                                    "Pipeline of Tensor": Pipeline(micros=2, of=Tensor())}  # fmt: skip
PAIRS = [(strategy, partition) for strategy in STRATEGIES for partition in PARTITIONS]


def resume_last_step(strategy: str, partition: str, folder: Path) -> tuple[str, str]:
    """Returns an outcome and why: resumed; refused (the pair cannot train, or makes no checkpoint at its last step)."""
    try:
        e = experiment_of(strategy, PARTITIONS[partition])
    except KnobError as error:
        return "refused", str(error)
    sessions = lived(e, folder / "first")
    there = [path for path in list_checkpoints(folder / "first" / FOLDER) if step_of(path) >= LAST]
    if not there:
        said = [json.loads(row[3])["text"] for s in sessions for row in s.record.noted("not saved")]
        return "refused", said[0] if said else "ranks end apart, so none of their steps is the last of all"
    at = step_of(there[-1])
    rest = lived(replace(e, steps=at + MORE, save_every=0), folder / "rest", there[-1])
    every = [v for s in rest for step, name, _, v in s.record.samples if name == "loss" and step >= at]
    if not every or not all(map(math.isfinite, every)):
        return "wrong", f"losses {every}"
    return "resumed", ""


def experiment_of(strategy: str, partition: Partition) -> Experiment:
    """Raises KnobError for a pair that cannot train."""
    of = make_fitting(STRATEGIES[strategy], RANKS // partition.size)
    return piped(RANKS, LAST, strategy=of, partition=partition, save_every=LAST, saves=1)


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=OUT)
    args = ask.parse_args()
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for strategy, partition in PAIRS:
        name = f"{strategy}, {partition}"
        if name in found:
            continue
        folder = Path(tempfile.mkdtemp(prefix="last-step-"))
        try:
            outcome, why = resume_last_step(strategy, partition, folder)
        except BaseException as error:
            outcome, why = "wrong", "".join(traceback.format_exception(error))[-4000:]
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            shutil.rmtree(folder)
        found[name] = {"outcome": outcome, "why": why}
        print(f"{name}: {outcome} {why[-200:]}", flush=True)
        args.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return int(any(one["outcome"] == "wrong" for one in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
