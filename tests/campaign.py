"""Changes and harms labs at random while they train, and checks invariants.

    python -m tests.campaign --minutes 10 [--seed 7] [--busy] [--out docs/data/campaigns/7.json]

A round is one lab of 5 engines and a run that begins with 4. Live changes come in waves (`torture`), and a fault
follows some waves (`harm`). Faults kill and stop engines, add and remove ranks, cut connections, kill the controller
and interrupt the kernel. Every eighth round kills kernels instead, with their lab detached or not. The seed of the
round and the number of ranks decide the actions, but not their moments. After each fault all ranks left make steps
again within a bound. At the end they agree, the record has no row twice and lacks none, and no resource is left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests import kernels
from tests.harm import LIMIT, Harm, Patient, Stuck, left, planned, possible
from tests.spinning import spinning
from tests.torture import ANSWER, SPARE, one, parameters, pause, start
from tests.waiting import until
from workbench.cluster.processes.lab_place import ClusterError
from workbench.lab import Lab
from workbench.run import Run
from workbench.settings import KnobError, members
from workbench.strategies import Strategy

ENGINES, RANKS = 5, 4
FAULTS = 20  # of one round
WAVES = 2  # of changes before each fault
CHANGES = 48  # of one wave at most
KERNELS = 8  # every so many rounds kernels are killed
PLAIN = {"faults": (), "link.bandwidth": 0.0, "compressor": "Dense", "strategy": "DDP", "pace": 0.0}

# texts in notes; the second one is about a loss of nan
WHY = ("cannot go on without it", "nobody watches, so the run ends")
NONE = ("none", "refused")  # beginnings of a fault's text if it harmed nothing

Say = Callable[[str], None]


def round_of(seed: int, say: Say) -> dict[str, Any]:
    """Plays one round. "wrong": a sentence, or "" if all checks passed; "at": the last fault before the run ended."""
    rng, done, begun, patient = random.Random(seed), Counter[str](), time.monotonic(), None
    out: dict[str, Any] = {"seed": seed, "wrong": "", "at": "", "noticed": {}, "recovered": {}}
    try:
        if seed % KERNELS == KERNELS - 1:
            out["recovered"] = kernels.round_of(rng, done, say)
        else:
            with Lab(ranks=ENGINES, name=f"campaign-{os.getpid()}-{seed}") as lab:
                patient = Patient(lab.wait(120), rng)
                out |= {"recovered": patient.recovered, "noticed": patient.noticed}
                try:
                    harmed(patient, done, say)
                except Exception:
                    say(lab.stacks())
                    raise
                out["at"] = patient.last if done["ended in words"] else ""
    except Exception as error:
        out["wrong"], out["at"] = f"{type(error).__name__}: {error}", patient.last if patient else "kernel"
        say(f"WRONG {traceback.format_exc()}")
    rounded = {what: {kind: [round(t, 2) for t in times] for kind, times in out[what].items()}
               for what in ("noticed", "recovered")}  # fmt: skip
    return {**out, **rounded, "done": dict(done), "seconds": round(time.monotonic() - begun)}


def harmed(p: Patient, done: Counter[str], say: Say) -> None:
    """Takes a run through all of its faults to its end. It may end earlier if it states why it cannot go on."""
    run = p.lab.run(replace(start(RANKS), on_death="go on"))
    p.goes_on("start")
    for number, (fault, seed) in enumerate([(fault, p.rng.random()) for fault in planned(p.rng, FAULTS)]):
        p.rng = random.Random(seed)  # independent of earlier draws
        try:
            for wave in range(WAVES):
                done.update(changed(p, say, pauses=int(wave == 0)))
            p.goes_on("changes")
            injected(p, possible(p, fault), done, lambda text, number=number: say(f"{number}: {text}"))
        except (Stuck, ClusterError):  # ClusterError: the run is over
            if not until(lambda: not p.lab.live, 5) or not any(why in note for note in p.lab.notes for why in WHY):
                raise
            done["ended in words"] += 1
            say(f"{number}: {p.lab.notes[-2:]}")
            return
    for path, value in PLAIN.items():
        p.lab.set(path, value).wait(LIMIT)
    p.goes_on("the last changes")
    if p.controller:
        agree(p)
    p.lab.stop()
    run.wait(LIMIT)
    if run.state != "stopped":
        raise Stuck(f"stopped, and is {run.state}")
    wrong = [*doubled(run), *(["rows are missing: " + str(run.missing)] if run.missing else ())]
    again = Run.open(run.path)
    wrong += [f"opened: {text}" for text in doubled(again)]
    if wrong:
        raise AssertionError("; ".join(wrong[:4]))


def injected(p: Patient, fault: Harm, done: Counter[str], say: Say) -> None:
    """Injects a fault, and waits until all ranks go on."""
    said, before, p.last = "", p.last, fault.__name__
    try:
        said = fault(p)
        say(f"{said}; {len(p.members)} ranks")
        p.goes_on("nothing" if said.startswith(NONE) else fault.__name__)
    finally:
        done["nothing to harm" if said.startswith(NONE) else fault.__name__] += 1
        p.last = before if said.startswith(NONE) else p.last


def changed(p: Patient, say: Say, pauses: int) -> dict[str, int]:
    """Makes a wave of live changes, with at most `pauses` pauses, each as long as 10 changes.

    Returns how many changes were applied, and how many were refused.
    """
    count = {"applied": 0, "refused": 0, "paused": 0}
    asked: list[tuple[str, Any, Any]] = []
    for _ in range(p.rng.randint(4, CHANGES)):
        what, value = one(p.rng, max(2, len(p.members)))
        if what == "partition" or (what in ("pause", "step") and count["paused"] >= pauses):
            continue
        if what in ("pause", "step"):
            pause(p.lab, what, value)
            count["paused"] += 1
            continue
        try:
            asked.append((what, value, p.lab.set(what, value)))
        except KnobError:
            count["refused"] += 1
        if p.rng.random() < 0.3:
            time.sleep(p.rng.uniform(0, 0.2))
    for what, value, change in asked:
        try:
            change.wait(ANSWER)
            count["applied"] += 1
        except KnobError as refusal:
            if "the run ended" in str(refusal):
                raise Stuck(f"{what}={value}: {refusal}; {p.lab.notes[-3:]}") from None
            count["refused"] += 1
    say(f"   {count} of {[(w, str(v)) for w, v, _ in asked]}")
    return count


def agree(p: Patient) -> None:
    """Raises AssertionError if the members' parameters are not bit-identical."""
    p.lab.pause()
    until(lambda: p.lab.state == "paused", LIMIT)
    engines = {e.rank: e.id for e in p.lab.cluster.engines}
    held = {rank: p.lab.cluster.call(engines[rank], parameters, timeout=LIMIT) for rank in p.members}
    p.lab.resume()
    if len(set(held.values())) != 1:
        raise AssertionError(f"ranks hold different parameters: {held}")


def doubled(run: Run) -> Iterator[str]:
    """Yields a sentence for each step that a rank has twice or not at all in one generation.

    A rank that went back to a boundary makes a step in both generations. Strategies without a common step may skip
    steps.
    """
    kinds, tl = members(Strategy), run.timeline
    begins = np.array(sorted(t for _, t, said in run.details("members") if "members" in said))
    for lane, rows in (("step", tl.spans.rows()), ("loss", tl.samples.rows())):
        here = rows[rows.equal("lane" if lane == "step" else "name", lane)]
        times = here.t1 if lane == "step" else here.t
        names = here.name if lane == "step" else ["DDP"] * len(times)
        for rank in sorted({int(r) for r in here.rank}):
            mine = [(int(np.searchsorted(begins, t)), int(s), str(n))
                    for r, t, s, n in zip(here.rank, times, here.step, names, strict=True) if r == rank]  # fmt: skip
            for (part, before, was), (now, step, name) in pairwise(mine):
                lockstep = lane == "step" and kinds[was].lockstep and kinds[name].lockstep
                if part == now and (step <= before or (lockstep and step != before + 1)):
                    yield f"rank {rank} has {lane} {step} after {before}"


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the counts of actions, and seconds from each kind of fault until all ranks made steps again."""
    done, seconds = Counter[str](), dict[str, list[float]]()
    for each in rounds:
        done.update(each["done"])
        for kind, times in each["recovered"].items():
            seconds.setdefault(kind, []).extend(times)
    times = {kind: {"times": len(t), "median": round(statistics.median(t), 2), "worst": round(max(t), 2)}
             for kind, t in sorted(seconds.items())}  # fmt: skip
    wrong = [f"seed {each['seed']}: {each['wrong']}" for each in rounds if each["wrong"]]
    return {"rounds": len(rounds), "wrong": wrong, "done": dict(sorted(done.items())), "seconds": times}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--minutes", type=float, default=10.0)
    ask.add_argument("--rounds", type=int, default=10**6)
    ask.add_argument("--seed", type=int, default=None, help="of the first round; default: another each time, printed")
    ask.add_argument("--busy", action="store_true", help="next to two busy processes")
    ask.add_argument("--out", type=Path, help="a file of all rounds; goes on there, and adds to it")
    a = ask.parse_args()
    kept = json.loads(a.out.read_text())["each"] if a.out and a.out.exists() else []
    first = a.seed if a.seed is not None else random.SystemRandom().randrange(10**6)
    first = max([first, *(each["seed"] + 1 for each in kept if a.seed is not None)])
    say: Say = lambda line: print(line, flush=True)  # noqa: E731
    until_then, rounds, before = time.monotonic() + 60 * a.minutes, list(kept), None
    with spinning(2) if a.busy else nullcontext():
        while time.monotonic() < until_then and len(rounds) - len(kept) < a.rounds:
            say(f"seed {first + len(rounds) - len(kept)}")
            rounds.append({**round_of(first + len(rounds) - len(kept), say), "busy": a.busy})
            now = left(os.getpid())
            before = before or now
            grown = {what: n - before[what] for what, n in now.items() if n > before[what] + SPARE * len(rounds) ** 0.5}
            if grown:
                rounds[-1]["wrong"] = rounds[-1]["wrong"] or f"left behind: {grown}"
            if a.out:
                a.out.write_text(json.dumps({**summary(rounds), "each": rounds}, indent=1) + "\n")
    found = summary(rounds)
    say(json.dumps(found, indent=1))
    sys.exit(bool(found["wrong"]))


if __name__ == "__main__":
    main()
