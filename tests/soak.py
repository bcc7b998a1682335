"""Trains 8 ranks for an hour, changes and kills them, and measures what grows.

    python -m tests.soak --minutes 60 [--seed 7] [--census] [--out docs/data/soak.json]

One lab runs one experiment, and a page reads its dashboard as a browser does. Steps are paced, so that two cores
suffice. A live change comes every few seconds and a kill every few minutes. The seed decides which knobs change and
which ranks die, but not when. Every strategy, compressor and partition comes once before the script draws members at
random. So modules that load at first use are loaded before the comparison begins.

Every 10 s the script reads the memory, descriptors and threads of the kernel, the controller and all engines. It also
reads the size of the record in memory and on disk. Growth is the median of the last 10 minutes against the median of
minutes 10 to 20. Only ranks from `SPARED` on and their replacements are killed, so the engines below `SPARED` last for
the whole run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harm import LIMIT, Patient, Stuck
from tests.looking import WARM, Look, Looking, Page, Say, grown
from tests.torture import Turn, one, shipped
from tests.waiting import until
from widgets import Dashboard
from workbench.compressors import Compressor
from workbench.experiment import Experiment
from workbench.lab import Lab
from workbench.partitions import Partition
from workbench.settings import KnobError
from workbench.strategies import Strategy
from workbench.tasks import Digits

RANKS, SPARED = 8, 4
PACE = 200.0  # ms
CHANGE, KILL, KEEP = 3.0, 180.0, 120.0  # seconds between two changes, two deaths, two requested checkpoints
FAMILIES: dict[str, Any] = {"strategy": Strategy, "compressor": Compressor, "partition": Partition}
PLAIN: dict[str, Any] = {"strategy": "DDP", "compressor": "Dense", "partition": "Whole"}
TURNED = ("strategy", "partition", "compressor", "bucket_mb", "density", "every", "accumulate")


def census() -> tuple[int, list[tuple[str, int]], list[tuple[float, str]]]:
    """Returns the count of objects that Python's collector knows, their commonest types, and the largest mappings.

    Mappings are pairs (MB, name), the largest first. Runs on engines, too.
    """
    import gc
    from collections import Counter
    from pathlib import Path

    found, of, name = gc.get_objects(), Counter[str](), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "Anonymous:":
            of[name] += int(rest[0])
        elif not first.endswith(":"):
            begin, end = (int(x, 16) for x in first.split("-"))
            # an arena has 64 MB, a column a mapping of its own
            mapped = f"mapped, {1 << (end - begin >> 20).bit_length()} MB at most"
            name = rest[4].rsplit("/", 1)[-1] if len(rest) > 4 else mapped
    pages = sorted(((round(kb / 1024, 1), name) for name, kb in of.items()), reverse=True)
    return len(found), Counter(type(x).__name__ for x in found).most_common(25), pages[:12]


# -- what is done


def drawn(rng: random.Random) -> Turn:
    """Draws a live change. Members have their usual knobs, because other values may diverge and end the run."""
    what, value = one(rng, RANKS)
    while what not in TURNED:
        what, value = one(rng, RANKS)
    if what in ("strategy", "compressor"):
        member: Any = rng.choice(shipped(FAMILIES[what]))
        return what, member.usual()
    return what, value


class Soak:
    """A lab with a run under way, and a log of its changes and errors."""

    def __init__(self, lab: Lab, rng: random.Random, where: Path, say: Say) -> None:
        self.lab, self.rng, self.where, self.say = lab, rng, where, say
        self.done, self.wrong = Counter[str](), list[str]()
        self.back: list[float] = []  # seconds from a death until as many ranks train again
        self._at: dict[Callable[[], None], float] = {}  # when something is due
        self._first = [{**PLAIN, path: m.usual()} for path, family in FAMILIES.items() for m in shipped(family)]
        rng.shuffle(self._first)
        self.begin()

    def begin(self) -> None:
        self.done["runs"] += 1
        e = Experiment(task=Digits(width=8, hidden=64), ranks=RANKS, pace=PACE, eval_every=50, diverged=0, lr=1e-4,
                       on_nan="stop", on_death="replace", save_every=400)  # fmt: skip
        self.lab.run(e, out=self.where / f"run-{self.done['runs']}")
        self.patient = Patient(self.lab, self.rng)
        self.patient.goes_on("start")

    def turn(self) -> None:
        """Makes one live change. At first it sets each member once, with no other change that could refuse it."""
        what, value = drawn(self.rng)
        turned = self._first.pop() if self._first else {what: value}
        self.say(f"   {turned}")
        try:
            self.lab.set(turned).wait(LIMIT)
            self.done["applied"] += 1
        except KnobError as refusal:
            if "the run ended" in str(refusal):
                raise Stuck(f"{turned}: {refusal}; {self.lab.notes[-3:]}") from None
            self.done["refused"] += 1

    def kill(self) -> None:
        """Kills one rank and waits for its replacement. Uses DDP; tests/campaign.py covers other strategies."""
        self.lab.set(PLAIN).wait(LIMIT)
        p, victim = self.patient, self.rng.choice([rank for rank in self.lab.members if rank >= SPARED])
        began = time.monotonic()
        os.kill(p.pid(victim), 9)
        self.done["killed"] += 1
        if not until(lambda: victim not in self.lab.members and len(self.lab.members) == RANKS, 2 * LIMIT):
            raise Stuck(f"after the kill of rank {victim}: {self.lab.members} train; {self.lab.notes[-4:]}")
        self.back.append(round(time.monotonic() - began, 2))
        p.goes_on("kill")

    def keep(self) -> None:
        """Requests a checkpoint and removes it, because requested ones stay. A regular one may be gone already."""
        shutil.rmtree(self.lab.checkpoint().wait(LIMIT), ignore_errors=True)
        self.done["checkpoints"] += 1

    def census(self) -> None:
        """Prints the objects of the kernel and of rank 0's engine, to find out what grew."""
        self.say(f"   kernel {census()}")
        self.say(f"   rank 0 {self.lab.cluster.call(self.lab.cluster.engines[0].id, census, timeout=LIMIT)}")

    def go_on(self, seconds: float) -> None:
        """Runs the actions that are due, for `seconds`."""
        began = time.monotonic()
        due = {self.turn: CHANGE, self.keep: KEEP, self.kill: KILL}
        while (now := time.monotonic()) < began + seconds:
            for act, every in due.items():
                if now >= self._at.setdefault(act, now + every):
                    self._at[act] = now + every
                    self.safely(act)
            time.sleep(0.1)

    def safely(self, act: Callable[[], None]) -> None:
        """Runs `act` and keeps its error. If the run is over, begins another one."""
        try:
            act()
        except Exception as error:
            self.wrong.append(f"{act.__name__}: {type(error).__name__}: {error}")
            self.say(f"WRONG {self.wrong[-1]}")
        if not self.lab.live:
            self.wrong.append(f"the run ended: {self.lab.notes[-3:]}")
            self.say(f"WRONG {self.wrong[-1]}")
            self.begin()


# -- all of it


def soak(minutes: float, seed: int, say: Say, out: Path | None = None, counted: bool = False) -> dict[str, Any]:
    """Runs the soak and returns actions, errors, growth and every look. out: a file, also written every 10 minutes"""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="soak-") as where, Lab(ranks=RANKS, name=f"soak-{os.getpid()}") as lab:
        soaked = Soak(lab.wait(120), rng, Path(where), say)
        dashboard = Dashboard(lab)
        page, looking = Page(dashboard.board), Looking(lab, say)
        began = time.monotonic()
        try:
            while (left := began + 60 * minutes - time.monotonic()) > 0:
                soaked.go_on(min(left, WARM))
                if counted:  # the census takes memory itself, on the kernel and rank 0 only
                    soaked.safely(soaked.census)
                found = so_far(soaked, page, looking.looks, (time.monotonic() - began) / 60, seed)
                if out:
                    out.write_text(written(found))
        finally:
            looking.close()
            page.close()
            dashboard.close()
    return found


def so_far(soaked: Soak, page: Page, looks: list[Look], minutes: float, seed: int) -> dict[str, Any]:
    read = {"messages": page.messages, "mb": round(page.nbytes / 2**20, 1), "longest": page.longest,
            "opened": page.opened}  # fmt: skip
    return {"seed": seed, "minutes": round(minutes), "ranks": RANKS, "done": dict(soaked.done), "wrong": soaked.wrong,
            "back": soaked.back, "page": read, "steps": looks[-1]["step"] if looks else 0, "grown": grown(looks),
            "looks": list(looks)}  # fmt: skip


def written(found: dict[str, Any]) -> str:
    """Returns the result as JSON, with one look to a line."""
    looks = ",\n".join(json.dumps(one) for one in found["looks"])
    return f"{json.dumps({**found, 'looks': []}, indent=1)[:-4]}[\n{looks}\n]\n}}\n"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--minutes", type=float, default=60.0)
    ask.add_argument("--seed", type=int, default=7)
    ask.add_argument("--census", action="store_true", help="say every ten minutes what objects there are")
    ask.add_argument("--out", type=Path)
    a = ask.parse_args()
    say: Say = lambda line: print(line, flush=True)  # noqa: E731
    found = soak(a.minutes, a.seed, say, a.out, a.census)
    say(json.dumps({**found, "looks": len(found["looks"])}, indent=1))
    sys.exit(bool(found["wrong"]))


if __name__ == "__main__":
    main()
