"""Plays a seeded random sequence of live changes on a real lab, and checks invariants.

    python -m tests.torture --turns 1000 [--seed 7] [--ranks 4]
    python -m tests.torture --minutes 30 --seed 7 --out docs/data/torture.json

The sequence depends on the seed alone, never on timing, so a seed replays a failure. Nothing may hang, and no step may
mix settings. Ranks must agree after each change of strategy: they check that themselves and fail otherwise. A second
run must leave no more threads and descriptors behind than the first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from workbench.analysis import spread_at
from workbench.compressors import Compressor, Dense
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Freeze, Link, Noisy, Slow
from workbench.lab import Lab
from workbench.optimizers import Optimizer
from workbench.partitions import Pipeline, Tensor, Whole
from workbench.partitions.schedules import PipeDream, PipeDream2BW
from workbench.run import Run
from workbench.settings import KnobError, knobs, members
from workbench.strategies import Strategy
from workbench.tasks import Digits

ANSWER = 90.0  # seconds within which a turn is answered; a hang takes longer, a slow machine does not
SPARE = 3  # threads or descriptors that a process may open by itself

KINDS = ("strategy", "strategy", "partition", "compressor", "knob", "bucket", "link", "lr", "batch", "pause", "fault",
         "optimizer", "large")  # fmt: skip

Turn = tuple[str, Any]  # (what, value): a knob's path, or "pause", "step", "rest"


def sequence(seed: int, turns: int, ranks: int) -> list[list[Turn]]:
    """Returns bursts of turns to request at once."""
    rng, left, out = random.Random(seed), turns, []
    while left:
        burst = min(left, rng.choice((1, 1, 2, 4, 8)))
        out.append([one(rng, ranks) for _ in range(burst)])
        left -= burst
    return out


def one(rng: random.Random, ranks: int) -> Turn:
    match rng.choice(KINDS):
        case "strategy":
            return "strategy", settings(rng, shipped(Strategy))
        case "compressor":
            return "compressor", settings(rng, shipped(Compressor))
        case "knob":
            return rng.choice(
                (("density", rng.uniform(0.01, 1.0)), ("every", rng.randint(1, 12)), ("accumulate", rng.randint(1, 3)))
            )
        case "bucket":
            return "bucket_mb", 10 ** rng.uniform(-2, 0.5)
        case "link":
            return rng.choice(
                (
                    ("link.bandwidth", rng.choice((0.0, rng.uniform(100, 2000)))),
                    ("link.latency", rng.choice((0.0, rng.uniform(0.0, 1.0)))),
                    ("pace", rng.choice((0.0, rng.uniform(1, 20)))),
                )
            )
        case "partition":
            ways = [
                Pipeline(micros=1),
                Pipeline(micros=2),
                Pipeline(stages=ranks),
                Tensor(),
                Tensor(ways=ranks),
                Pipeline(micros=1, schedule=PipeDream()),
                Pipeline(micros=2, schedule=PipeDream2BW()),
            ]
            return "partition", rng.choice((Whole(), *ways, Pipeline(micros=2, of=Tensor())))
        case "lr":
            return "lr", 10 ** rng.uniform(-4, -2.5)
        case "batch":
            return "batch", rng.randint(1, 32)
        case "optimizer":
            return "optimizer", rng.choice(shipped(Optimizer)).usual()  # other settings might diverge
        case "large":
            return rng.choice(
                (
                    ("clip", rng.choice((0.0, 10 ** rng.uniform(-1, 1)))),
                    ("lr_scaled", rng.random() < 0.5),
                    ("lr_warmup", rng.randint(0, 30)),
                )
            )
        case "pause":
            return rng.choice((("pause", rng.uniform(0, 0.3)), ("step", rng.randint(1, 3))))
    rank = rng.randrange(ranks)
    return "faults", rng.choice(
        ((), (Slow(rank=rank, factor=rng.uniform(1, 3)),), (Noisy(spread=0.5),), (Freeze(rank=rank, seconds=0.2),))
    )


def shipped(family: Any) -> list[type]:
    return [m for m in members(family).values() if m.__module__.startswith("workbench.")]


def settings(rng: random.Random, family: list[type]) -> Any:
    """Draws a member with one of its knobs changed, in the form that a person types."""
    member = rng.choice(family)
    usual = member.usual()
    own = [k for k in knobs(member) if k.kind in (int, float) and k.live]
    if type(usual) is not member or not own:
        return usual
    k = rng.choice(own)
    if k.choices:
        return member(**{k.name: rng.choice(k.choices)})
    low, high = k.low or 0, min(k.high if k.high is not None else 16, (k.low or 0) + 16)
    return member(**{k.name: rng.randint(int(low), int(high)) if k.kind is int else rng.uniform(low, high)})


def play(lab: Lab, run: Run, bursts: list[list[Turn]], rng: random.Random, say: Any) -> dict[str, int]:
    """Requests all turns. Returns how many were applied and how many refused."""
    count = {"applied": 0, "refused": 0, "others": 0}
    for number, burst in enumerate(bursts):
        say(f"{number}: {burst}")
        asked = []
        for what, value in burst:
            if what in ("pause", "step"):
                pause(lab, what, value)
                count["others"] += 1
                continue
            try:
                asked.append(lab.set(what, value))
            except KnobError:
                count["refused"] += 1
        for turn in asked:
            try:
                turn.wait(ANSWER)
                count["applied"] += 1
            except KnobError as refusal:
                if "the run ended" in str(refusal):
                    run.wait(5)
                    raise
                count["refused"] += 1
        time.sleep(rng.uniform(0, 0.15))
    return count


def pause(lab: Lab, what: str, value: Any) -> None:
    lab.pause() if what == "pause" else lab.step(value)
    until(lambda: lab.state == "paused" or not lab.live, "the run to pause")
    time.sleep(value if what == "pause" else 0.05)
    lab.resume()
    until(lambda: lab.state == "running" or not lab.live, "the run to go on")


def until(true: Any, what: str) -> None:
    end = time.monotonic() + ANSWER
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {ANSWER:g} s for {what}")
        time.sleep(0.02)


def mixed(run: Run, spans: pd.DataFrame | None = None) -> Iterator[str]:
    """Yields a sentence for each step in which ranks in lockstep did not communicate alike."""
    spans = run.spans if spans is None else spans
    kinds = members(Strategy)
    steps = spans[spans.lane == "step"].groupby("step").name.agg(["nunique", "first", "count"])
    lock = [s for s, row in steps.iterrows() if row["nunique"] == 1 and kinds[row["first"]].lockstep]
    yield from (f"step {s}: ranks under different strategies" for s in steps.index[steps["nunique"] > 1])
    comm = spans[spans.lane == "comm"].sort_values(["rank", "t0"])
    comm = comm[~before_a_common_step(spans, comm, steps, kinds)]
    comm = comm.assign(name=comm["name"].astype(str).str.replace(r" to \d+$", "", regex=True))
    within = comm["name"].str.match(r"broadcast .* in [\w+]+ \[")  # of layers; each group has its own
    turn = comm.groupby(["step", "rank", "name"], observed=True).cumcount()
    uneven = comm[within].groupby(["step", "name", turn[within]]).nbytes.nunique()
    yield from (f"step {s}: unlike bytes of {name}" for s, name, _ in uneven.index[uneven > 1] if s in lock)
    comm.loc[within, "nbytes"] = 0
    comm = comm.assign(name=comm["name"].str.replace(r" in ([\w+]+) \[.*\]", r" in \1", regex=True))
    comm.loc[comm["name"].str.startswith("all_to_allv"), "nbytes"] = 0  # values decide each rank's number
    by_rank = comm.groupby(["step", "rank"], observed=True)[["name", "nbytes"]]
    said = by_rank.apply(lambda g: tuple(map(tuple, g.values)))
    moved = {int(step) for step, _, _ in run.details("partition")}
    for step in lock:
        if step in said.index and step not in moved:  # ranks change their stages in this step
            here, (stages, slices) = said.loc[step], spread_at(run.timeline, int(step))
            if stages > 1:  # messages and collectives are in flight at the same time
                here = here.map(lambda each: tuple(sorted(each)))
            places = stages * slices
            alike = [here[here.index % places == place].nunique() <= 1 for place in range(places)]
            if not all(alike) or (places == 1 and len(here) != steps.loc[step, "count"]):
                yield f"step {step}: {dict(here)}"


def before_a_common_step(spans: Any, comm: Any, steps: Any, kinds: dict[str, Any]) -> Any:
    """Returns a mask of `comm`: exchanges before a switch, in its step, by a strategy without a common step.

    Ranks name different steps then: one settles at a change in step 217, another in step 213.
    """
    apart = {s for last, s in pairwise(sorted(steps.index)) if not kinds[steps.loc[last, "first"]].lockstep}
    switches = spans[(spans.lane == "switch") & spans.step.isin(apart)]
    first = switches.groupby(["step", "rank"], observed=True).t0.min()
    begins = first.reindex(list(zip(comm.step, comm["rank"], strict=True))).to_numpy()
    return comm.t0.to_numpy() < begins  # without a switch: NaN, which never compares as later


def left_behind(lab: Lab) -> list[tuple[int, int]]:
    """Returns (threads, descriptors) of each engine, once the last run has ended."""
    until(lambda: not lab.live, "the run to end")
    time.sleep(0.5)
    found = [psutil.Process(e.pid) for e in lab.cluster.engines]
    return [(p.num_threads(), p.num_fds()) for p in found]


def torture(lab: Lab, seed: int, turns: int, say: Any = print) -> dict[str, Any]:
    """Plays two runs of half the turns each. Raises AssertionError, TimeoutError or RankError after an error."""
    say(f"seed {seed}, {turns} turns, {lab.ranks} ranks")
    began, behind, total = time.monotonic(), [], {"applied": 0, "refused": 0, "others": 0}
    for half in range(2):
        run = lab.run(start(lab.ranks))
        until(lambda: lab.state == "running", "the first step")
        bursts = sequence(seed * 2 + half, turns // 2, lab.ranks)
        for k, n in play(lab, run, bursts, random.Random(seed + half), say).items():
            total[k] += n
        plain = {"partition": "Whole", "compressor": Dense(), "strategy": "DDP", "fabric": Fabric(), "pace": 0.0}
        for path, value in plain.items():
            lab.set(path, value).wait(ANSWER)
        agree(lab)
        lab.stop()
        run.wait(ANSWER)
        assert run.state == "stopped", run.state
        wrong = list(mixed(run))
        assert not wrong, wrong[:3]
        assert run.missing == 0
        behind.append(left_behind(lab))
    more = [(b - a, d - c) for (a, c), (b, d) in zip(*behind, strict=True)]
    assert all(t <= SPARE and f <= SPARE for t, f in more), f"threads and descriptors left behind: {behind}"
    return {**total, "seed": seed, "left behind": behind, "seconds": round(time.monotonic() - began)}


def start(ranks: int) -> Experiment:
    fabric = Fabric(link=Link(bandwidth=1000))
    return Experiment(task=Digits(), ranks=ranks, eval_every=10, pace=5, fabric=fabric, diverged=0)


def agree(lab: Lab) -> None:
    """Checks that all ranks' parameters are bit-identical."""
    lab.pause()
    until(lambda: lab.state == "paused", "the run to pause")
    hashes = lab.cluster.view.apply_sync(parameters)
    lab.resume()
    assert len(set(hashes)) == 1 and len(hashes) == lab.ranks, hashes


def parameters() -> int:
    """Runs on an engine, next to its training thread."""
    from workbench.cluster.engines import engine_server
    from workbench.host.placement.canonical_state import hash_model_state

    return hash_model_state(engine_server._server.session.layout)  # type: ignore[union-attr]


def more(out: Path, first: int, turns: int, ranks: int, minutes: float, say: Any) -> bool:
    """Plays seeds from `first` on, each on its own lab, and notes them in a file. Returns whether all passed."""
    each = json.loads(out.read_text())["each"] if out.exists() else []
    before, end = len(each), time.monotonic() + 60 * minutes
    seed = max([first, *(one["seed"] + 1 for one in each)])
    while time.monotonic() < end:
        began, found = time.monotonic(), {"seed": seed, "turns": turns, "wrong": ""}
        try:
            with Lab(ranks=ranks, name=f"torture-{os.getpid()}-{seed}") as lab:
                found |= torture(lab, seed, turns, say)
        except Exception as error:
            say(traceback.format_exc())
            found |= {"wrong": f"{type(error).__name__}: {error}", "seconds": round(time.monotonic() - began)}
        each.append(found)
        out.write_text(json.dumps({"each": each}, indent=1) + "\n")
        seed += 1
    return not any(one["wrong"] for one in each[before:])


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--turns", type=int, default=1000)
    ask.add_argument("--seed", type=int, default=None, help="default: another each time; printed")
    ask.add_argument("--ranks", type=int, default=4)
    ask.add_argument("--minutes", type=float, default=0.0, help="one seed after the other, into --out")
    ask.add_argument("--out", type=Path, help="a file of all seeds; goes on there, and adds to it")
    a = ask.parse_args()
    seed = a.seed if a.seed is not None else random.SystemRandom().randrange(10**6)
    say: Any = lambda line: print(line, flush=True)  # noqa: E731
    if a.out:
        sys.exit(not more(a.out, seed, a.turns, a.ranks, a.minutes, say))
    with Lab(ranks=a.ranks, name="torture") as lab:
        say(torture(lab, seed, a.turns, say))


if __name__ == "__main__":
    main()
