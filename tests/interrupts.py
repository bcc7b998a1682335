"""Interrupts a kernel at random moments: its lab must stay usable, or be closed.

    python -m tests.interrupts --rounds 200 [--seed 7] [--out docs/data/interrupts.json]

A round is one cell in a Jupyter kernel, and one SIGINT to that kernel, like its stop button. The seed and the round's
number decide the cell and the moment. An existing file is continued. Afterwards every rank must make 10 more steps, or
the lab must be closed and leave no process, shared memory, descriptor or file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.harm import Stuck, left
from tests.kernels import GONE, living
from tests.torture import SPARE, start
from tests.waiting import until
from workbench.lab import Lab

ROOT = Path(__file__).parents[1]
RANKS, STEPS = 2, 10
LIMIT = 120.0  # seconds within which a cell answers; a hang takes longer, a busy machine does not
NAME = "interrupted"
BEGIN = f"from tests.interrupts import *; lab, run = None, None; sys.path.insert(0, {str(ROOT)!r})"


class Point(NamedTuple):
    """needs: nothing, idle, training or detached; cell: code to interrupt; seconds: first guess of its duration"""

    needs: str
    cell: str
    seconds: float
    weight: int = 2


POINTS = {
    "open": Point("nothing", "lab = opened()", 0.2),
    "come up": Point("opened", "lab.wait(100)", 6.0),
    "run": Point("idle", "run = lab.run(start(RANKS)); at_step(lab, 2)", 2.0, 3),
    "set": Point("training", "lab.set(*turned({rng})).wait(60)", 0.3, 4),
    "wait": Point("training", "lab.run_now.wait(3)", 3.0, 2),
    "pause": Point("training", "lab.pause(); at_state(lab, 'paused'); lab.step(2); lab.resume()", 0.5),
    "resize": Point("training", "lab.resize({size}).wait(100)", 2.0, 3),
    "save": Point("training", "saved(lab, {folder!r})", 1.0, 3),
    "read": Point("training", "lab.status; repr(lab); lab.run_now.spans; lab.stacks()", 0.5),
    "stop": Point("training", "lab.stop(); lab.run_now.wait(60)", 0.5, 3),
    "close": Point("training", "lab.close()", 2.0, 4),
    "close idle": Point("idle", "lab.close()", 1.5),
    "detach": Point("training", "lab.detach()", 0.2, 1),
    "attach": Point("detached", "lab = Lab.attach(NAME)", 0.3, 1),
}
READY = {
    "nothing": "lab = lab and lab.close()",
    "opened": "lab = lab and lab.close(); lab = opened()",
    "idle": "lab = idle(lab)",
    "training": "lab = training(lab)",
    "detached": "lab = training(lab); lab.detach(); lab = None",
}
ROUND = "result = judged(lab, {again}); lab = None if result == 'closed' else lab_now(); print(result)"


# -- in the kernel


def opened() -> Lab:
    return Lab(ranks=RANKS, name=NAME)


def lab_now() -> Lab:
    from workbench.lab import _labs

    return _labs[NAME]


def at_step(lab: Lab, step: int, limit: float = LIMIT / 2) -> None:
    """Waits until all members have reached the step."""
    if not until(lambda: lab.live and lab.members and all((lab.status[r]["step"] or 0) >= step for r in lab.members),
                 limit):  # fmt: skip
        raise Stuck(f"not at step {step}: {lab!r}, {lab.status}, {lab.notes[-3:]}")


def at_state(lab: Lab, state: str) -> None:
    if not until(lambda: lab.state == state, LIMIT / 2):
        raise Stuck(f"not {state}: {lab!r}, {lab.notes[-3:]}")


def idle(lab: Lab | None) -> Lab:
    lab = (lab or opened()).wait(100)
    lab.stop()
    at_state(lab, "idle") if lab.live else None
    return lab


def training(lab: Lab | None) -> Lab:
    lab = (lab or opened()).wait(100)
    if not lab.live:
        lab.run(start(RANKS))
    at_step(lab, 2)
    return lab


def turned(seed: int) -> tuple[str, Any]:
    rng = random.Random(seed)
    return rng.choice((("lr", 10 ** rng.uniform(-4, -2.5)), ("bucket_mb", rng.uniform(0.01, 1.0)),
                       ("strategy", rng.choice(("DDP", "LocalSGD", "ZeRO3"))),
                       ("batch", rng.randint(1, 32))))  # fmt: skip


def saved(lab: Lab, folder: str) -> None:
    """Makes a checkpoint, and saves the run elsewhere."""
    run = lab.run_now
    assert run and run.path
    before = len(list(Path(run.path).glob("checkpoints/*")))
    lab.checkpoint()
    run.save(folder)
    until(lambda: len(list(Path(run.path or ".").glob("checkpoints/*"))) > before, 20)


def judged(lab: Lab | None, again: str) -> str:
    """ "closed", or "trains" once every rank has made 10 more steps; raises Stuck otherwise.

    again: how a person gets a lab that the interrupted cell did not return
    """
    if again and (lab is None or lab.state == "closed"):
        lab = Lab.attach(NAME) if again == "attach" else opened()
    if lab is None or lab.state == "closed":
        return "closed"
    lab.wait(100)
    if lab.state == "stopping" and not until(lambda: not lab.live, 40):
        raise Stuck(f"it does not stop: {lab!r}, {lab.notes[-3:]}")
    if lab.live:
        if not until(lambda: lab.state != "starting", 60):
            raise Stuck(f"its run does not begin: {lab!r}, {lab.notes[-3:]}")
        lab.resume()
    else:
        lab.run(start(RANKS))
    at_step(lab, max(row["step"] or 0 for row in lab.status) + STEPS)
    return "trains"


# next to it


class Kernel:
    """A Jupyter kernel whose labs meet no other labs."""

    def __init__(self, folder: str) -> None:
        from jupyter_client.manager import start_new_kernel

        env = {**os.environ, "WORKBENCH_RUNTIME_DIR": f"{folder}/runtime", "XDG_DATA_HOME": f"{folder}/data",
               "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}  # fmt: skip
        self.folder, self.first = folder, dict[str, int]()
        self.closings = 0
        self.manager, self.client = start_new_kernel(env=env, cwd=str(ROOT))
        self.process = psutil.Process(self.manager.provisioner.pid)
        self.does(BEGIN)

    def does(self, code: str, after: float | None = None) -> tuple[str, str, float]:
        """Returns (error, output, seconds) of the code. Interrupts it after `after` seconds if it still runs."""
        said, raised, begun, to_come = [""], "", 0.0, after
        asked = self.client.execute(code)
        deadline = time.monotonic() + LIMIT + (after or 0.0)
        while True:
            now = time.monotonic()
            if now > deadline:
                raise Stuck(f"{LIMIT:g} s without an answer to {code}")
            wait = 0.5 if to_come is None or not begun else max(begun + to_come - now, 0.0)
            try:
                message = self.client.get_iopub_msg(timeout=min(wait, 0.5))
            except Exception:  # its queue was empty
                message = None
            if to_come is not None and begun and time.monotonic() >= begun + to_come:
                self.manager.interrupt_kernel()
                to_come = None
            if message is None or message["parent_header"].get("msg_id") != asked:
                continue
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                said.append(content["text"])
            elif message["msg_type"] == "error":
                raised = f"{content['ename']}: {content['evalue']}"
            elif message["msg_type"] == "status" and content["execution_state"] == "busy":
                begun = time.monotonic()
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return raised, "".join(said).strip(), time.monotonic() - begun

    def must(self, code: str) -> str:
        raised, said, _ = self.does(code)
        if raised:
            raise Stuck(f"{code.split('(')[0]}: {raised}")
        return said

    def nothing_left(self) -> None:
        """Raises Stuck if a process, file or socket of a lab still exists after GONE seconds."""
        places = Path(self.folder, "runtime")

        def there() -> list[str]:
            kids = [f"{p.pid} {' '.join(p.cmdline()[-4:])}" for p in self.process.children(recursive=True) if living(p)]
            return kids + [str(p) for p in places.glob("*/*")]

        if not until(lambda: not there(), GONE):
            raise Stuck(f"{GONE:g} s after it was closed: {there()}")
        now, self.closings = left(self.process.pid), self.closings + 1
        now.pop("children")
        self.first = self.first or now
        allowed = SPARE * (1 + self.closings**0.5)
        if grown := {what: n - self.first[what] for what, n in now.items() if n > self.first[what] + allowed}:
            raise Stuck(f"left behind after {self.closings} labs: {grown}")

    def end(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@contextmanager
def kernel(folder: str) -> Iterator[Kernel]:
    made = Kernel(folder)
    try:
        yield made
    finally:
        made.end()


def point_of(seed: int, number: int) -> tuple[str, random.Random]:
    rng = random.Random(f"{seed} {number}")
    return rng.choices(list(POINTS), [p.weight for p in POINTS.values()])[0], rng


def round_of(k: Kernel, seed: int, number: int, takes: dict[str, float]) -> dict[str, Any]:
    """Plays one round. Its outcome is "trains", "closed", or "WRONG: " and a sentence."""
    name, rng = point_of(seed, number)
    point, part, begun = POINTS[name], rng.random(), time.monotonic()
    cell = point.cell.format(rng=rng.randrange(10**6), size=rng.randint(1, RANKS + 1), folder=f"{k.folder}/s{number}")
    out = {"round": number, "point": name, "part": round(part, 3)}
    try:
        k.must(READY[point.needs])
        after = part * takes.get(name, point.seconds)
        raised, _, took = k.does(cell, after)
        out |= {"after": round(after, 3), "raised": raised.split(":")[0] or "nothing"}
        out["hit"] = took > after
        if raised.split(":")[0] != "KeyboardInterrupt":
            takes[name] = took if took < after else takes.get(name, point.seconds)
        again = {"open": "open", "detach": "attach", "attach": "attach"}.get(name, "")
        out["outcome"] = k.must(ROUND.format(again=repr(again)))
        if out["outcome"] == "closed" or name in ("open", "attach"):
            k.must(READY["nothing"]) if out["outcome"] != "closed" else None
            k.nothing_left()
    except Stuck as wrong:
        out["outcome"] = f"WRONG: {wrong}"
    return {**out, "seconds": round(time.monotonic() - begun, 1)}


def play(seed: int, rounds: int, kept: list[dict[str, Any]], keep: Callable[[list[dict[str, Any]]], None],
         say: Callable[[str], None] = print) -> list[dict[str, Any]]:  # fmt: skip
    """Continues after the kept rounds. After a round with an error it starts a new kernel."""
    out, takes = list(kept), dict[str, float]()
    while len(out) < rounds:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, kernel(folder) as k:
            while len(out) < rounds:
                out.append(round_of(k, seed, len(out), takes))
                say(str(out[-1]))
                keep(out)
                if out[-1]["outcome"].startswith("WRONG"):
                    break
            else:
                k.must(READY["nothing"])
                k.nothing_left()
    return out


def summary(seed: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    wrong = [r for r in rounds if r["outcome"].startswith("WRONG")]
    came = Counter(r["outcome"] for r in rounds if r not in wrong)
    hit = sum(bool(r.get("hit")) for r in rounds)
    return {"seed": seed, "rounds": len(rounds), "in the middle": hit, "outcomes": dict(came), "wrong": len(wrong)}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--rounds", type=int, default=200)
    ask.add_argument("--seed", type=int, default=7)
    ask.add_argument("--out", type=Path, help="a file of all rounds; goes on there")
    a = ask.parse_args()
    kept = json.loads(a.out.read_text())["each"] if a.out and a.out.exists() else []

    def keep(rounds: list[dict[str, Any]]) -> None:
        if a.out:
            rows = ",\n".join("  " + json.dumps(one) for one in rounds)
            head = json.dumps(summary(a.seed, rounds), indent=1)[:-2]
            a.out.write_text(f'{head},\n "each": [\n{rows}\n ]\n}}\n')

    found = summary(a.seed, play(a.seed, a.rounds, kept, keep, lambda line: print(line, flush=True)))
    print(found)
    sys.exit(bool(found["wrong"]))


if __name__ == "__main__":
    main()
