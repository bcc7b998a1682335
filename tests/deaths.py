"""Kills engines while they train, and measures how fast that is noticed and training goes on.

    python -m tests.deaths --kills 100 [--busy] [--partitions] [--seed 1] --out docs/data/deaths/quiet.json
    python -m tests.deaths --replace 5 --out docs/data/replaced.json

Each lab of 4 loses its ranks one after the other, until one is left. Strategy, victim and moment are random. With
`--busy` two processes spin at the same time. With `--partitions` ranks hold parts of the model (stages, slices, shards)
and make checkpoints. A kill counts as survived if all ranks that should go on make steps again. With `--replace` one of
2 ranks is killed. The script then measures the time until its replacement has made a step. It tries a cold engine and a
spare one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import workbench
from tests.spinning import spinning
from workbench import ByteGPT, Digits, Experiment, Lab
from workbench.partitions import Pipeline, Tensor, Whole
from workbench.partitions.schedules import PipeDream2BW

STRATEGIES = ("DDP", "LocalSGD", "DiLoCo", "SlowMo", "Gossip", "EASGD", "ByteScheduler", "AsyncServer", "ShadowEASGD",
              "OneBitAdam")  # fmt: skip
PARTS: tuple[tuple[str, Any], ...] = (
    ("DDP", Pipeline()), ("LocalSGD", Pipeline()), ("DDP", Tensor()), ("LocalSGD", Tensor()),
    ("DDP", Pipeline(of=Tensor())), ("LocalSGD", Pipeline(stages=4)), ("DDP", Pipeline(schedule=PipeDream2BW())),
    ("HSDP", Whole()), ("ZeRO1", Whole()), ("ZeRO2", Whole()), ("ZeRO3", Whole()), ("HpZ", Whole()),
    ("ZeROOffload", Whole()), ("ZeROInfinity", Whole()), ("TorchFSDP", Whole()),
)  # fmt: skip
LIMIT = 40.0  # seconds after which a kill counts as not survived


class Kill(NamedTuple):
    """One kill. seen: seconds until the notes report it; on: until the ranks left have ended a step; None: never."""

    strategy: str
    victim: int
    step: int
    seen: float | None
    on: float | None
    said: str
    partition: str = "Whole"
    left: int = 0


def kill(lab: Lab, victim: int) -> Kill:
    """Kills the engine of rank `victim` while `lab` trains, and waits until the other ranks go on."""
    live, known = lab._live, set(lab.notes)
    assert live is not None
    strategy, step = type(lab.experiment.strategy).__name__, live.step
    way = type(lab.experiment.partition).__name__
    os.kill(lab.status[victim]["pid"], signal.SIGKILL)
    began, seen, mark = time.monotonic(), None, 0.0
    while (now := time.monotonic() - began) < LIMIT and lab.live:
        new = [note for note in lab.notes if note not in known]
        if seen is None and new:
            seen = now
        told = [(t, said) for _, t, said in live.run.details("members") if victim in said.get("gone", ())]
        if told:
            mark, rest = told[-1][0], told[-1][1]["members"]
            spans = live.run.timeline.spans.rows()
            made = spans[spans.equal("lane", "step") & (spans.t0 > mark)]
            if set(rest) <= {int(r) for r in made.rank}:
                return Kill(strategy, victim, step, seen, now, told[-1][1]["text"], way, len(rest))
        time.sleep(0.01)
    return Kill(strategy, victim, step, seen, None, "; ".join(lab.notes[-3:]), way)


def setting(rng: random.Random, number: int, ranks: int, parts: bool) -> Experiment:
    """Returns the experiment of trial `number`."""
    pace = rng.choice([0.0, 10.0, 40.0])
    if not parts:
        strategy = getattr(workbench, STRATEGIES[number % len(STRATEGIES)])()
        return Experiment(task=Digits(), strategy=strategy, ranks=ranks, steps=0, on_death="go on", eval_every=25,
                          pace=pace).checked()  # fmt: skip
    name, way = PARTS[number % len(PARTS)]
    task = ByteGPT() if way.size > 1 else Digits()
    return Experiment(task=task, strategy=getattr(workbench, name)(), partition=way, ranks=ranks, steps=0,
                      on_death="go on", eval_every=25, save_every=rng.choice([3, 10]), pace=pace).checked()  # fmt: skip


def trial(rng: random.Random, number: int, ranks: int = 4, parts: bool = False) -> list[Kill]:
    """Runs a lab that loses all of its ranks but one."""
    e = setting(rng, number, ranks, parts)
    found, left = list[Kill](), list(range(ranks))
    with Lab(ranks=ranks, name=f"deaths-{os.getpid()}-{number}") as lab:
        lab.wait(120)
        lab.run(e)
        while lab._live is None or lab._live.step < 3 or (parts and not lab._live.run.details("saved")):
            time.sleep(0.01)
        while len(left) > getattr(e.strategy, "group", 1):  # fewer than a group cannot train
            time.sleep(rng.uniform(0.3, 1.5))
            victim = left.pop(rng.randrange(len(left)))
            found.append(kill(lab, victim))
            print(found[-1], flush=True)
            if found[-1].on is None:
                break
            left = list(lab._live.members)  # the run may not need some ranks any more
        lab.abort()
    return found


def replaced(number: int, spare: int) -> dict[str, Any]:
    """Measures seconds from a kill until training goes on, a replacement joins, and it has made a step."""
    e = Experiment(task=Digits(), ranks=2, steps=0, on_death="replace", eval_every=0, pace=20.0).checked()
    with Lab(ranks=2, name=f"replaced-{os.getpid()}-{number}-{spare}", spare=spare) as lab:
        lab.wait(120)
        lab.run(e)
        while lab._live is None or lab._live.step < 20 or len(lab.cluster.spares.warm_ranks) < spare:
            time.sleep(0.01)
        run, found = lab._live.run, dict[str, Any](spare=spare)
        os.kill(lab.status[1]["pid"], signal.SIGKILL)
        began = time.monotonic()
        while "stepped" not in found and time.monotonic() - began < 3 * LIMIT:
            now, spans = time.monotonic() - began, run.timeline.spans.rows()
            told = len(run.details("members"))
            if told:
                found.setdefault("went on", now)
            if told > 1:
                found.setdefault("came", now)
            if any(spans[spans.equal("lane", "step")].rank > 1):
                found["stepped"] = now
            time.sleep(0.01)
        lab.abort()
    print(found, flush=True)
    return found


def replacements(count: int) -> dict[str, Any]:
    """Makes `count` replacements of each kind, in turn. Returns them and the medians in seconds."""
    each = [replaced(number, spare) for number in range(count) for spare in (0, 1)]
    out: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    for spare, name in enumerate(("cold", "spare")):
        times = sorted(one["stepped"] for one in each if one["spare"] == spare and "stepped" in one)
        out[name] = {"median": statistics.median(times), "worst": times[-1]} if times else {}
    return {**out, "each": each}


def summary(kills: list[Kill]) -> dict[str, Any]:
    """Returns how many kills were survived, and median, 95th percentile and worst of both times in seconds."""
    out: dict[str, Any] = {"kills": len(kills), "survived": sum(k.on is not None for k in kills)}
    for name in ("seen", "on"):
        times = sorted(t for k in kills if (t := getattr(k, name)) is not None)
        if len(times) > 1:
            out[name] = {"median": statistics.median(times), "p95": statistics.quantiles(times, n=20)[-1],
                         "worst": times[-1]}  # fmt: skip
    return out


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--kills", type=int, default=100)
    ask.add_argument("--busy", action="store_true")
    ask.add_argument("--partitions", action="store_true")
    ask.add_argument("--replace", type=int, default=0)
    ask.add_argument("--seed", type=int, default=1)
    ask.add_argument("--out", type=Path)
    args = ask.parse_args()
    if args.replace:
        found = replacements(args.replace)
        print(json.dumps(found, indent=1))
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n")
        return
    rng, kills, number = random.Random(args.seed), [], 0
    with spinning(2) if args.busy else nullcontext():
        while len(kills) < args.kills:
            kills += trial(rng, number, parts=args.partitions)
            number += 1
    found = {"seed": args.seed, "busy": args.busy, "partitions": args.partitions, "ranks": 4, "cores": os.cpu_count(),
             "load": os.getloadavg()[1], **summary(kills)}  # fmt: skip
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps({**found, "each": [k._asdict() for k in kills]}, indent=1) + "\n")
    sys.exit(found["survived"] < found["kills"])


if __name__ == "__main__":
    main()
