"""Makes many short runs on one lab: each must end, and in the right state.

    python -m tests.runs_end --runs 500 [--seed 7] [--ranks 4] [--spinning 2]

Most runs go to their end. Some are stopped at a random moment, also at once. In some a rank's loss is not a number
while no person watches. In some a rank's loss raises. Processes that spin keep the machine busy. The seed decides the
runs, but not the moments of the stops.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from tests.ranks import mse, toy
from tests.spinning import spinning
from workbench.experiment import Experiment
from workbench.lab import Lab, RankError

STEPS = 3
SLOW = 8.0  # seconds after which a run gets a line
LIMIT = 90.0  # seconds within which a run ends; a hang takes longer, a busy machine does not


class Kind(NamedTuple):
    """The disturbance of one run."""

    what: str  # done, stop, nan, raise
    rank: int = 0  # the misbehaving rank
    step: int = 0
    after: float = 0.0  # seconds until the stop
    steps: int = STEPS  # 0: without end, so that it must be stopped


def kinds(seed: int, runs: int, ranks: int) -> list[Kind]:
    """Draws the kind of each run: 60 % undisturbed, 20 % stopped, 10 % each with a NaN or an error."""
    rng, out = random.Random(seed), []
    for _ in range(runs):
        what = rng.choices(("done", "stop", "nan", "raise"), (6, 2, 1, 1))[0]
        after = rng.choice((0.0, rng.uniform(0.0, 0.1), rng.uniform(0.0, 1.5)))
        endless = what == "stop" and rng.random() < 0.5
        out.append(Kind(what, rng.randrange(ranks), rng.randrange(STEPS), after, 0 if endless else STEPS))
    return out


def _loss(what: str, rank: int, step: int, net: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Returns the mean squared error. On one rank, at one step, raises or returns NaN."""
    import threading

    me = threading.current_thread().name == f"rank {rank} training"
    net.at = getattr(net, "at", -1) + net.training  # type: ignore[assignment, operator]
    if not me or net.at != step or not net.training:
        return mse(net, batch)
    if what == "raise":
        raise ZeroDivisionError(f"rank {rank} was to fail at step {step}")
    return mse(net, batch) * float("nan")


def experiment(kind: Kind, ranks: int) -> Experiment:
    loss: Callable[..., Any] = partial(_loss, kind.what, kind.rank, kind.step) if kind.what in ("nan", "raise") else mse
    return Experiment(task=toy(loss=loss), ranks=ranks, steps=kind.steps, eval_every=0, bucket_mb=0.01)


def one(lab: Lab, kind: Kind) -> str:
    """Makes one run, and returns what is wrong with its end, or ""."""
    run, error, early = lab.run(experiment(kind, lab.ranks)), None, True
    if kind.what == "stop":
        time.sleep(kind.after)
        early = lab.live
        lab.stop()
    try:
        run.wait(LIMIT)
    except RankError as found:
        error = found
    except TimeoutError as found:
        where = lab._live.describe_ranks() if lab._live else ""
        lab.abort()
        return f"did not end: {found}; {where}"
    said = f"{run.state}, {error}" if error else run.state
    recorded = type(run).open(run.path).state
    if recorded != run.state:
        return f"is {run.state}, and its record says {recorded}"
    return "" if fits(kind, run.state, error, early) else f"is {said}"


def fits(kind: Kind, state: str, error: RankError | None, early: bool) -> bool:
    """Returns whether a run of this kind may end in this state. early: it was live before its stop."""
    match kind.what:
        case "done":
            return state == "done" and error is None
        case "stop":
            may = {"stopped"} if not kind.steps else {"stopped", "done"} if early else {"done"}
            return state in may and error is None
        case "nan":
            there = error is not None and error.type == "FloatingPointError"
            return state == "failed" and there and (error.rank, error.step) == (kind.rank, kind.step)
    there = error is not None and error.type == "ZeroDivisionError"
    return state == "failed" and there and (error.rank, error.step) == (kind.rank, kind.step)


def play(lab: Lab, seed: int, runs: int, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Plays all runs. Returns {"ended": by kind, "wrong": sentences, "seconds": the longest run}."""
    ended, wrong, longest, began = Counter[str](), [], 0.0, time.monotonic()
    for number, kind in enumerate(kinds(seed, runs, lab.ranks)):
        at = time.monotonic()
        trouble = one(lab, kind)
        longest = max(longest, took := time.monotonic() - at)
        if took > SLOW:
            say(f"run {number}, {kind}: took {took:.1f} s")
        ended[kind.what] += 1
        if trouble:
            wrong.append(f"run {number}, {kind}: {trouble}")
            say(wrong[-1])
        if not lab.cluster.is_healthy:
            wrong.append(f"run {number}, {kind}: an engine was lost; {lab.notes}")
            say(wrong[-1])
        if number % 50 == 49:
            say(f"{number + 1} runs in {time.monotonic() - began:.0f} s, {len(wrong)} wrong")
    took = round(time.monotonic() - began)
    return {"seed": seed, "ended": dict(ended), "wrong": wrong, "longest": round(longest, 1), "seconds": took}


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--runs", type=int, default=500)
    ask.add_argument("--seed", type=int, default=None, help="default: another each time; printed")
    ask.add_argument("--ranks", type=int, default=4)
    ask.add_argument("--spinning", type=int, default=2, help="processes that keep the machine busy")
    a = ask.parse_args()
    seed = a.seed if a.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}, {a.runs} runs of {STEPS} steps on {a.ranks} ranks, {a.spinning} processes spin", flush=True)
    with spinning(a.spinning), Lab(ranks=a.ranks, name="runs-end") as lab:
        found = play(lab.wait(), seed, a.runs, lambda line: print(line, flush=True))
    print(found)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
