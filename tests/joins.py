"""Injects faults while ranks join a run, and checks what the survivors train on.

    python -m tests.joins --rounds 300 --out docs/data/joins.json [--minutes 60] [--part 0 --parts 3]

A round is one run of `STEPS` steps. After step `JOIN` new ranks come in, by `lab.resize` or for a rank that was killed
(`on_death="replace"`). At a random moment of the join the round injects one fault or two. Odd rounds run next to two
processes that spin. The seed of a round decides the setting, the kind of fault and its delay after the request.

Each setting has a reference for each way to join: `REFERENCES` undisturbed runs with other seeds. For `resize`, two
ranks train and two more join. For `replace`, four ranks train, one is killed, and a new one replaces it: no other run
has the same number of examples in each step. A round passes in one of two ways. Either the run ends as planned, and
each mean of `WINDOW` losses after the fault lies near the range of the reference. Or the run ends with a documented
error, and no survivor held the full state.

The range of ten runs is narrow: `--alarms` shows how many undisturbed runs leave it. So a mean may lie outside by
`MARGIN` times the width of the range. The margin costs power: `--alarms` also shows how many harmed runs the check
finds (`HARMS`). Survivors that are fewer see fewer examples in each step, and their losses are
higher. So a round whose means lie outside plays a twin: the same seed, and the same number of ranks from the same
steps, but by request and without the fault. If the twin's means lie outside on the same side, the fault is not the
cause, and the round passes.
`--controls` checks undisturbed runs with further seeds. They show how often the check alone gives an alarm.

The file keeps every round. A later call plays the seeds that the file lacks. With `--parts 3` a call plays every third
seed, so that three calls can play side by side, each into a file of its own; `--merge FILE FILE` joins the files.
`--again 3 5` plays the rounds of these seeds once more; their earlier outcomes stay in the file.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

import workbench
from tests.harm import shut
from tests.spinning import spinning
from tests.waiting import until
from workbench import Change, Digits, Experiment, Lab, Pipeline, Run, Tensor, Whole, simulate
from workbench.lab import RankError

STEPS, JOIN, WINDOW, NEAR = 120, 40, 12, 40
REFERENCES = 10
DRAWS = 10  # references with which each simulation is compared
HARMS = {
    "training stops at step 50": 1e-6,
    "the rate is 30 times too large from step 50 on": 30.0,
}  # factors of the rate
MARGIN = 0.25  # times the width of the reference's range
LIMIT = 120.0  # seconds for a run of about ten: a hang, not a busy machine, takes longer
STOPPED = 1.5  # seconds for which a stopped process stands still
GET_DESCRIPTOR = 438  # Linux's system call pidfd_getfd
CUTTING = 3.0  # seconds for which a round looks for a connection to cut
TOGETHER = 0.1  # seconds within which the second of two faults follows
SETTINGS: tuple[tuple[str, Any], ...] = (
    ("DDP", Whole()), ("LocalSGD", Whole()), ("DiLoCo", Whole()), ("ZeRO1", Whole()), ("DDP", Pipeline()),
    ("SlowMo", Whole()), ("ZeRO3", Whole()), ("DDP", Tensor()), ("Gossip", Whole()), ("AsyncServer", Whole()),
    ("TorchDDP", Whole()), ("LocalSGD", Pipeline()), ("ShadowEASGD", Whole()), ("HSDP", Whole()), ("Hogwild", Whole()),
)  # fmt: skip
KINDS = {
    "old": "an old rank killed",
    "new": "a new rank killed",
    "both": "an old and a new rank killed",
    "all old": "all old ranks killed",
    "cut": "every connection between two ranks shut down",
    "two": "two of these, or a process stopped for 1.5 s, within 100 ms",
}
ENDINGS = {  # sentences with which a run may end in a join
    "no rank that is left holds the trained state": "All ranks that had trained died.",
    "and the run cannot go on without it": "A part of the model is lost and there is no checkpoint, or too few ranks "
    "are left for the settings.",
}
REFUSALS = {  # sentences that answer a request for ranks; the run goes on
    "a rank or a connection was lost in the join; ask again": "The old ranks train on without the new ranks.",
    "not there any more; ask again": "A new rank died before the old ranks invited it.",
}

Say = Callable[[str], None]


class Plan(NamedTuple):
    """The actions of one round. delay: share of a usual join that passes before the fault."""

    strategy: str
    partition: Any
    how: str
    kinds: tuple[str, ...]
    delay: float
    gap: float
    busy: bool

    @property
    def setting(self) -> str:
        return name_setting(self.strategy, self.partition)


def name_setting(strategy: str, partition: Any) -> str:
    way = type(partition).__name__
    return strategy if way == "Whole" else f"{strategy}, {way}"


def plan_round(seed: int) -> Plan:
    """Draws the round of this seed."""
    rng = random.Random(seed)
    strategy, partition = SETTINGS[seed % len(SETTINGS)]
    kind = rng.choice(list(KINDS))
    kinds = tuple(rng.choice(("old", "new", "cut", "stop")) for _ in range(2)) if kind == "two" else (kind,)
    how = "replace" if rng.random() < 0.3 else "resize"
    return Plan(strategy, partition, how, kinds, rng.uniform(0.0, 1.3), rng.uniform(0.0, TOGETHER), seed % 2 == 1)


def make_experiment(strategy: str, partition: Any, seed: int, how: str = "resize") -> Experiment:
    """A run that is long enough for a join; checkpoints are made every 20 steps."""
    ranks, pace = (4, 40.0) if how == "replace" else (2, 25.0)  # a replacement takes a second or more to begin
    return Experiment(task=Digits(hidden=512), strategy=getattr(workbench, strategy)(), partition=partition,
                      ranks=ranks, steps=STEPS, pace=pace, eval_every=0, save_every=20, diverged=0, seed=seed,
                      on_death="replace" if how == "replace" else "go on").checked()  # fmt: skip


# -- what a run's losses say


def list_losses(run: Run) -> Any:
    """The rows of all losses. Reads the record once: two reads of a live run may differ in length."""
    rows = run.samples
    return rows[rows["name"] == "loss"]


def list_windows(run: Run, after: float = -math.inf) -> Iterator[tuple[int, float]]:
    """(first step, mean) of each window of `WINDOW` losses that one rank made later than `after` seconds."""
    rows = list_losses(run)
    rows = rows[rows["t"] > after]
    for _, mine in rows.sort_values("t").groupby("rank"):
        means = mine["value"].rolling(WINDOW).mean().dropna()
        steps = mine["step"].shift(WINDOW - 1)[means.index]
        yield from zip(steps.astype(int), means, strict=True)


def widen(reference: dict[str, list[float]], windows: Iterable[tuple[int, float]]) -> None:
    """Adds the windows of an undisturbed run to a reference: the lowest and the highest mean by first step."""
    for step, mean in windows:
        low, high = reference.get(str(step), (math.inf, -math.inf))
        reference[str(step)] = [min(low, mean), max(high, mean)]


def find_outliers(reference: dict[str, list[float]], windows: list[tuple[int, float]],
                  share: float | None = None) -> tuple[list[str], list[str]]:  # fmt: skip
    """Windows above and windows below the range that the reference has within `NEAR` steps, in words.

    A window counts if it lies outside by more than `share` (default: `MARGIN`) times the width of the range, or is
    not a number.
    """
    above, below = list[str](), list[str]()
    for step, mean in windows:
        near = [reference[key] for k in range(step - NEAR, step + NEAR + 1) if (key := str(k)) in reference]
        low, high = min(low for low, _ in near), max(high for _, high in near)
        margin = (MARGIN if share is None else share) * (high - low)
        text = f"mean loss {mean:.3f} from step {step} on; undisturbed {low:.3f} to {high:.3f}"
        if not mean <= high + margin:  # nan, too
            above.append(text)
        elif mean < low - margin:
            below.append(text)
    return above, below


# -- a round


def list_connections(pid: int) -> list[Any]:
    """The connections of a process over TCP; none if it is gone."""
    with suppress(psutil.NoSuchProcess):
        return [c for c in psutil.Process(pid).net_connections("tcp") if c.raddr]
    return []


def shut_in(pid: int, descriptor: int) -> bool:
    """Shuts a socket of another process down. False if it is gone; PermissionError if the system forbids it."""
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        try:
            copy = ctypes.CDLL(None, use_errno=True).syscall(GET_DESCRIPTOR, process, descriptor, 0)
            if copy < 0 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS):
                raise PermissionError("this system does not let one process take a socket of another")
        finally:
            os.close(process)
        if copy >= 0:
            with suppress(OSError), socket.socket(fileno=copy) as wire:
                wire.shutdown(socket.SHUT_RDWR)
                return True
    return False


def ask_for_ranks(lab: Lab, how: str) -> int | None:
    """Lets new ranks begin to join: asks for four ranks, or kills the last one and returns its number."""
    if how == "resize":
        lab.resize(4)
        return None
    victim = lab.members[-1]
    os.kill(next(row["pid"] for row in lab.status if row["rank"] == victim), signal.SIGKILL)
    until(lambda: not lab.live or any(row["rank"] > victim and row["state"] for row in lab.status), LIMIT)
    return victim


class Join:
    """A run whose join is under way, and the processes that take part in it."""

    def __init__(self, lab: Lab, run: Run, plan: Plan, seed: int) -> None:
        self.lab, self.run, self.plan, self.rng = lab, run, plan, random.Random(seed + 1)
        self.old = tuple(lab.members)
        self.pids: dict[int, int] = {}
        self.killed: set[int] = set()
        self.log: list[str] = []
        self.resumes: list[tuple[float, psutil.Process]] = []  # when a stopped process is to go on
        self.look()

    def look(self) -> None:
        """Notes the processes of all ranks that the lab knows now."""
        self.pids |= {row["rank"]: row["pid"] for row in self.lab.status if row["pid"]}

    def begin(self) -> None:
        """Asks for new ranks: by `resize`, or by a death that a new rank replaces."""
        victim = ask_for_ranks(self.lab, self.plan.how)
        if victim is not None:
            self.old = self.old[:-1]
            self.killed.add(victim)

    @property
    def new(self) -> list[int]:
        """Ranks that come in: members, or engines that are to be."""
        self.look()
        first = 2 if self.plan.how == "resize" else max(self.old) + 2
        return [rank for rank in sorted(self.pids) if rank >= first]

    def draw(self, which: str) -> int | None:
        known = [r for r in (self.old if which == "old" else self.new) if r not in self.killed]
        return self.rng.choice(known) if known else None

    def kill(self, rank: int | None) -> None:
        if rank is None:
            self.log.append("no rank to kill")
            return
        with suppress(ProcessLookupError):
            os.kill(self.pids[rank], signal.SIGKILL)
            self.killed.add(rank)
            self.log.append(f"killed rank {rank}")

    def inject(self, kind: str) -> None:
        """Makes one fault now."""
        match kind:
            case "old" | "new":
                self.kill(self.draw(kind))
            case "both":
                self.kill(self.draw("old"))
                self.kill(self.draw("new"))
            case "all old":
                for rank in self.old:
                    self.kill(rank)
            case "cut":
                self.cut()
            case "stop":
                self.stop()

    def stop(self) -> None:
        """Stops a process, and lets it go on later."""
        rank = self.draw(self.rng.choice(("old", "new")))
        if rank is not None:
            process = psutil.Process(self.pids[rank])
            process.suspend()
            self.log.append(f"stopped rank {rank}")
            self.resumes.append((time.monotonic() + STOPPED, process))

    def let_go_on(self) -> None:
        """Lets the stopped processes go on, each after its time."""
        for moment, process in self.resumes:
            time.sleep(max(0.0, moment - time.monotonic()))
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def cut(self) -> None:
        """Shuts down every connection between two ranks, at one end."""
        there = [r for r in (*self.old, *self.new) if r not in self.killed]
        if len(there) < 2:
            self.log.append("no connection to cut")
            return
        one, other = self.rng.sample(there, 2)
        ends, end = 0, time.monotonic() + CUTTING
        while not ends and time.monotonic() < end:  # between two generations there may be none for a moment
            ends = self.shut(one, other)
        self.log.append(f"cut {ends} connections between ranks {one} and {other}")

    def shut(self, one: int, other: int) -> int:
        """Shuts the connections between two ranks down from outside: a call of a busy engine may take seconds."""
        theirs = {(tuple(c.raddr), tuple(c.laddr)) for c in list_connections(self.pids[other])}
        mine = [c for c in list_connections(self.pids[one]) if (tuple(c.laddr), tuple(c.raddr)) in theirs]
        try:
            return sum(shut_in(self.pids[one], c.fd) for c in mine)
        except PermissionError:  # a container may forbid it
            engine = next(e.id for e in self.lab.cluster.engines if e.rank == one)
            return int(self.lab.cluster.call(engine, shut, list(theirs), timeout=LIMIT))


def play(seed: int, reference: dict[str, Any], say: Say) -> dict[str, Any]:
    """One round; "outcome": "went on", "ended" or "wrong", and why."""
    plan, began = plan_round(seed), time.monotonic()
    out: dict[str, Any] = {"seed": seed, "setting": plan.setting, "how": plan.how, "kinds": plan.kinds,
                           "busy": plan.busy}  # fmt: skip
    with spinning(2) if plan.busy else nullcontext(), tempfile.TemporaryDirectory() as folder:
        try:
            with Lab(ranks=4, name=f"joins-{os.getpid()}-{seed}", spare=int(plan.how == "replace")) as lab:
                out |= disturb(lab.wait(LIMIT), plan, seed, reference, Path(folder))
        except Exception as error:
            say(traceback.format_exc())
            out |= {"outcome": "wrong", "why": f"{type(error).__name__}: {error}"}
    if "below" in out:  # losses outside of the range
        try:
            out |= compare_with_twin(out, plan, seed, reference)
        except Exception as error:
            out["twin"] = f"{type(error).__name__}: {error}"
    out["seconds"] = round(time.monotonic() - began, 1)
    say(json.dumps(out))
    return out


def disturb(lab: Lab, plan: Plan, seed: int, reference: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Runs the round's run on a lab, and judges it."""
    e = make_experiment(plan.strategy, plan.partition, 1000 + seed, plan.how)
    run = lab.run(e, out=folder / "run")
    wait_for_step(lab, e.ranks, JOIN)
    join = Join(lab, run, plan, seed)
    join.begin()
    asked = time.monotonic()
    time.sleep(plan.delay * reference["join"])
    moment = read_clock(run)
    for number, kind in enumerate(plan.kinds):
        if number:
            time.sleep(plan.gap)
        join.inject(kind)
    fault = time.time() - run.epoch
    found: dict[str, Any] = {"faults": join.log, "after": round(time.monotonic() - asked, 2)}
    join.let_go_on()
    error = None
    try:
        run.wait(LIMIT)
    except TimeoutError as late:
        where = f"{late}; {lab._live.describe_ranks() if lab._live else ''}; {lab.notes[-4:]}"
        lab.abort()
        return {**found, "outcome": "wrong", "why": f"did not end: {where}"}
    except RankError as raised:
        error = raised
    if made_last_step(run, join, fault):
        return {**found, "outcome": "too late", "why": "the survivors had made the last step"}
    return {**found, **judge(run, join, error, list_windows_after(run, moment), reference)}


def wait_for_step(lab: Lab, ranks: int, step: int) -> None:
    """Waits until the first `ranks` ranks have reached a step, or the run is over. Raises TimeoutError."""
    reached = lambda: min((row["step"] or 0 for row in lab.status[:ranks]), default=0) >= step  # noqa: E731
    if not until(lambda: not lab.live or reached(), LIMIT):
        raise TimeoutError(f"the run did not reach step {step}: {lab.notes[-3:]}")


def made_last_step(run: Run, join: Join, fault: float) -> bool:
    """Whether all old ranks that live had made the last step when the fault came. fault: its time in the record."""
    rows = list_losses(run)
    rows = rows[rows["t"] < fault]
    last = rows.groupby("rank")["step"].max()
    living = [rank for rank in join.old if rank not in join.killed] or join.old
    return all(last.get(rank, 0) >= STEPS - 1 for rank in living)


def read_clock(run: Run) -> float:
    """The record's time of the newest loss, in seconds."""
    losses = list_losses(run)
    return float(losses["t"].max()) if len(losses) else 0.0


def list_windows_after(run: Run, moment: float) -> list[tuple[int, float]]:
    return list(list_windows(run, moment))


def judge(run: Run, join: Join, error: RankError | None, windows: list[tuple[int, float]],
          reference: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
    """Whether a run ended as it may."""
    above, below = find_outliers(reference["windows"], windows)
    if error is not None and error.step >= STEPS:
        return {"outcome": "too late", "why": f"the run had made its last step: {error}"}
    if above or below:
        return {"outcome": "wrong", "above": len(above), "below": len(below), "sizes": list_sizes(run),
                "state": run.state,
                "why": f"{len(above) + len(below)} of {len(windows)} windows: {(above + below)[0]}"}  # fmt: skip
    if error is None and run.state == "done":
        if not windows:
            return {"outcome": "too late", "why": "the run had made its last step"}
        return {"outcome": "went on", "why": ""}
    survivors = [rank for rank in join.old if rank not in join.killed]
    text = f"{run.state}: {error or join.lab.notes[-2:]}"
    whole = type(join.plan.partition).__name__ == "Whole" and not join.plan.strategy.startswith(("ZeRO", "HSDP"))
    if whole and survivors:
        return {"outcome": "wrong", "why": f"the run ended, though ranks {survivors} held the full state: {text}"}
    return {"outcome": "ended" if is_documented(error, join.lab.notes) else "wrong", "why": text[:400]}


def is_documented(error: RankError | None, notes: list[str]) -> bool:
    """Whether a run that ended said why, in a sentence that docs/project/reliability.md lists."""
    return any(sentence in text for sentence in ENDINGS for text in (str(error), *map(str, notes[-6:])))


# -- references


def measure_reference(strategy: str, partition: Any, how: str, say: Say) -> dict[str, Any]:
    """Undisturbed runs with the same join: the range of their windows, and seconds that a join takes."""
    windows: dict[str, list[float]] = {}
    joins = []
    for run, took in run_undisturbed(strategy, partition, how, range(3 * REFERENCES)):
        if len(joins) == REFERENCES:
            break
        widen(windows, list_windows(run))
        joins.append(took)
    found = {"join": round(sorted(joins)[len(joins) // 2], 2), "windows": windows}
    say(f"reference of {name_setting(strategy, partition)} ({how}): a join takes {found['join']} s")
    return found


def run_undisturbed(strategy: str, partition: Any, how: str, seeds: Iterable[int]) -> Iterator[tuple[Run, float]]:
    """Runs in which ranks join and nothing else happens; with each, seconds until all four train."""
    with (Lab(ranks=4, name=f"joins-{os.getpid()}-calm", spare=int(how == "replace")) as lab,
          tempfile.TemporaryDirectory() as folder):  # fmt: skip
        lab.wait(LIMIT)
        for seed in seeds:
            e = make_experiment(strategy, partition, seed, how)
            run = lab.run(e, out=Path(folder, str(seed)))
            wait_for_step(lab, e.ranks, JOIN)
            victim = ask_for_ranks(lab, how)
            began = time.monotonic()
            until(lambda: not lab.live or (len(lab.members) == 4 and victim not in lab.members), LIMIT)  # noqa: B023
            took = time.monotonic() - began
            run.wait(LIMIT)
            if run.state != "done":
                raise RuntimeError(f"undisturbed run {seed} of {strategy} ({how}) ended: {run.state}, {lab.notes[-3:]}")
            if any(change.get("new") for *_, change in run.details("members")):
                yield run, took  # in the others the new rank came after the last step


def check_controls(strategy: str, partition: Any, how: str, reference: dict[str, Any],
                   seeds: Iterable[int]) -> list[str]:  # fmt: skip
    """Alarms that the check gives for undisturbed runs with further seeds: one for each run that has any."""
    alarms = []
    for run, _ in run_undisturbed(strategy, partition, how, seeds):
        late = [window for window in list_windows(run) if window[0] >= JOIN]
        above, below = find_outliers(reference["windows"], late)
        alarms += (above + below)[:1]
    return alarms


def list_sizes(run: Run) -> list[tuple[int, int]]:
    """(step, number of ranks) of each change of membership in a run."""
    return [(int(step), len(change["members"])) for step, _, change in run.details("members")]


def compare_with_twin(out: dict[str, Any], plan: Plan, seed: int, reference: dict[str, Any]) -> dict[str, Any]:
    """Plays the run of a round again, with as many ranks at each step, but without the fault.

    Returns {"twin": its first mean outside of the range, in words}, and the outcome "went on" if the means of both
    lie outside on the same side.
    """
    above, below = find_outliers(reference["windows"], play_twin(plan, seed, out["sizes"]))
    alike = (above or not out["above"]) and (below or not out["below"])
    twin = {"twin": (above + below)[0] if above or below else "within the range"}
    return {**twin, "outcome": "went on"} if alike and out["state"] == "done" else twin


def play_twin(plan: Plan, seed: int, sizes: list[tuple[int, int]]) -> list[tuple[int, float]]:
    """The windows, from the join on, of an undisturbed run that is resized at these steps."""
    e = make_experiment(plan.strategy, plan.partition, 1000 + seed, plan.how)
    with (Lab(ranks=4, name=f"joins-{os.getpid()}-twin", spare=int(plan.how == "replace")) as lab,
          tempfile.TemporaryDirectory() as folder):  # fmt: skip
        run = lab.wait(LIMIT).run(e, out=Path(folder, "run"))
        for step, ranks in sizes:
            wait_for_step(lab, 1, step - 1)
            if lab.live and len(lab.members) != ranks:
                lab.resize(ranks)
                until(lambda: not lab.live or len(lab.members) == ranks, LIMIT)  # noqa: B023
        run.wait(LIMIT)
        return [window for window in list_windows(run) if window[0] >= JOIN]


def simulate_windows(strategy: str, seed: int, factor: float = 1.0) -> list[tuple[int, float]]:
    """The windows of a simulation with four ranks. factor: of the learning rate, from step 50 on"""
    torch.set_num_threads(1)
    e = make_experiment(strategy, Whole(), seed, "replace")
    changes = [] if factor == 1.0 else [Change(50, "lr", e.lr * factor)]
    return list(list_windows(simulate(e, real=True, changes=changes)))


def count_alarms(strategy: str, runs: int) -> dict[str, Any]:
    """How many simulations leave the range of `REFERENCES` undisturbed ones, alone and with the margin.

    No rank joins or dies, so each alarm for an undisturbed simulation is chance. Each run is compared with `DRAWS`
    draws of other seeds. "harms": the same counts for a fifth of the seeds, harmed in the ways of `HARMS`
    """
    with ProcessPoolExecutor() as pool:
        each = list(pool.map(simulate_windows, [strategy] * runs, range(runs)))
        harmed = {harm: list(pool.map(simulate_windows, [strategy] * (runs // 5), range(runs // 5), [factor] * runs))
                  for harm, factor in HARMS.items()}  # fmt: skip
    harms = {harm: count_outside(runs_harmed, each) for harm, runs_harmed in harmed.items()}
    return {**count_outside(each, each), "harms": harms}


def count_outside(each: list[list[tuple[int, float]]], undisturbed: list[list[tuple[int, float]]]) -> dict[str, int]:
    """How many runs leave the range of `REFERENCES` undisturbed runs of other seeds. Run k has the k-th seed."""
    rng, alarms = random.Random(0), Counter[float]()
    for k, windows in enumerate(each):
        late = [window for window in windows if window[0] >= JOIN]
        for _ in range(DRAWS):
            reference: dict[str, list[float]] = {}
            for other in rng.sample([i for i in range(len(undisturbed)) if i != k], REFERENCES):
                widen(reference, undisturbed[other])
            alarms.update(share for share in (0.0, MARGIN) if any(find_outliers(reference, late, share)))
    return {"compared": len(each) * DRAWS, "left the range": alarms[0.0], "left the margin": alarms[MARGIN]}


def round_numbers(value: Any) -> Any:
    """The same value with four digits behind the point, so that the file stays small."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: round_numbers(one) for key, one in value.items()}
    return [round_numbers(one) for one in value] if isinstance(value, list | tuple) else value


def count_outcomes(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """How many rounds had each outcome."""
    return {"rounds": len(rounds), **Counter(one["outcome"] for one in rounds)}


def list_seeds(rounds: int, part: int, parts: int) -> list[int]:
    """The seeds of one part; each part has quiet rounds and busy ones."""
    return [seed for seed in range(rounds) if seed // 2 % parts == part]


def find_reference(kept: dict[str, Any], plan: Plan) -> dict[str, Any] | None:
    """The reference for a round's setting and way to join; None if the file lacks it."""
    return kept["references"].get(plan.setting, {}).get(plan.how)


def sort_key(kept: dict[str, Any], seed: int) -> tuple[bool, str, int]:
    """Orders rounds: first those whose reference is there, then those that share a reference."""
    plan = plan_round(seed)
    lacking = find_reference(kept, plan) is None
    return lacking, plan.setting if lacking else "", seed


def merge(files: list[dict[str, Any]]) -> dict[str, Any]:
    """The contents of several files as one. Raises ValueError if two hold the same seed."""
    each = sorted((one for file in files for one in file["each"]), key=lambda one: one["seed"])
    if len({one["seed"] for one in each}) < len(each):
        raise ValueError("two of these files hold a round of the same seed")
    merged = {**files[0], "references": {}, "controls": {}, "each": each, "summary": count_outcomes(each)}
    for file in files:
        for setting, ways in file["references"].items():
            merged["references"][setting] = merged["references"].get(setting, {}) | ways
        merged["controls"] |= file["controls"]
    return merged


def put_round(kept: dict[str, Any], one: dict[str, Any]) -> None:
    """Keeps a round. If its seed was played before, the earlier outcomes stay in it."""
    before = next((old for old in kept["each"] if old["seed"] == one["seed"]), None)
    if before is not None:
        kept["each"].remove(before)
        earlier = [*before.pop("earlier", ()), before]
        one = {**one, "earlier": earlier}
    kept["each"].append(one)


def read_commit() -> str:
    """The commit of the code that a round ran."""
    asked = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True)
    return asked.stdout.strip()


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--rounds", type=int, default=300, help="play the seeds below this")
    ask.add_argument("--minutes", type=float, default=1e6, help="begin no round after so many minutes")
    ask.add_argument("--part", type=int, default=0, help="play only this part of the seeds")
    ask.add_argument("--parts", type=int, default=1)
    ask.add_argument("--again", type=int, nargs="*", default=[], help="play the rounds of these seeds once more")
    ask.add_argument("--merge", type=Path, nargs="*", help="write the contents of these files into one")
    ask.add_argument("--only", type=int, nargs="*", help="play these seeds, and write nothing")
    ask.add_argument("--controls", type=int, default=0, help="check so many undisturbed runs of each setting")
    ask.add_argument("--alarms", nargs="*", help="simulate undisturbed runs of these strategies and count alarms")
    ask.add_argument("--out", type=Path, default=Path("docs/data/joins.json"))
    a = ask.parse_args()
    kept = json.loads(a.out.read_text()) if a.out.exists() else {"references": {}, "controls": {}, "each": []}
    say: Say = lambda line: print(line, flush=True)  # noqa: E731
    end = time.monotonic() + 60 * a.minutes

    def save() -> None:
        if a.only is None:
            a.out.write_text(json.dumps({**kept, "summary": count_outcomes(kept["each"])}) + "\n")

    def refer(plan: Plan) -> dict[str, Any]:
        found = find_reference(kept, plan)
        if found is None:
            found = round_numbers(measure_reference(plan.strategy, plan.partition, plan.how, say))
            kept["references"].setdefault(plan.setting, {})[plan.how] = found
            save()
        return found

    if a.merge:
        kept = merge([json.loads(path.read_text()) for path in a.merge])
        save()
        return
    if a.alarms:
        for strategy in a.alarms:
            kept.setdefault("alarms", {})[strategy] = count_alarms(strategy, 60)
            say(f"{strategy}: {kept['alarms'][strategy]}")
            save()
        return
    if a.controls:
        return check_all_controls(kept, a.controls, save, say)
    if a.only is not None:
        sys.exit(any(play(seed, refer(plan_round(seed)), say)["outcome"] == "wrong" for seed in a.only))
    played = {one["seed"] for one in kept["each"]} | set(a.again)
    left = set(list_seeds(a.rounds, a.part, a.parts)) - played
    for seed in [*a.again, *sorted(left, key=lambda seed: sort_key(kept, seed))]:
        if time.monotonic() > end:
            break
        put_round(kept, {**play(seed, refer(plan_round(seed)), say), "commit": read_commit()})
        save()
    say(json.dumps(count_outcomes(kept["each"])))
    sys.exit(any(one["outcome"] == "wrong" for one in kept["each"]))


def check_all_controls(kept: dict[str, Any], runs: int, save: Callable[[], None], say: Say) -> None:
    """Checks undisturbed runs of each setting and each way to join that has a reference, and notes the alarms."""
    for strategy, partition in SETTINGS:
        setting = name_setting(strategy, partition)
        for how, reference in kept["references"].get(setting, {}).items():
            alarms = check_controls(strategy, partition, how, reference, range(100, 100 + runs))
            kept["controls"][f"{setting} ({how})"] = {"runs": runs, "alarms": alarms}
            say(f"{setting} ({how}): {len(alarms)} alarms {alarms}")
            save()


if __name__ == "__main__":
    main()
