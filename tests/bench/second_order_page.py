# ruff: noqa: E501
"""Writes the section of a page of docs/project/benchmarks/ on second order from the results of `tests.bench.second_order`."""

from __future__ import annotations

import math
import statistics
from typing import Any

from tests.bench import second_order as bench
from tests.bench.page import interval, table
from tests.bench.words import listed


def section(d: dict[str, Any]) -> str:
    """Returns steps, seconds and bytes to a loss relative to SGD with momentum."""
    rows, said = [], []
    for goal, method in bench.PAIRS:
        if bench.tried(goal, method, d["cells"]):
            rows.append(_row(d, goal, method, said))
    head = ["task and held-out loss", "method, at its best", "settings tried", "steps to the loss", "steps to SGD's last loss", "times SGD's seconds per step",
            "times SGD's bytes per step", "times SGD's seconds to the loss", "times SGD's bytes to the loss"]  # fmt: skip
    return f"{_about()}\n\n{table(head, rows)}\n{' '.join(said)}\n"


def steps_of(d: dict[str, Any], goal: str, method: str) -> list[float]:
    """Returns the steps to the loss with each seed that tuning has not used, as far as they have run."""
    return [bench.reached(goal, found) for found in _fresh(d, goal, method)]


def steps_to_the_end(d: dict[str, Any], goal: str, method: str) -> list[float]:
    """Returns by seed the steps to SGD's final loss, the median of its seeds."""
    level = statistics.median(found[-1][1] for found in _fresh(d, goal, "SGD"))
    return [min((step for step, loss in found if loss <= level), default=math.inf) for found in _fresh(d, goal, method)]


def slower(d: dict[str, Any], goal: str, method: str) -> list[float]:
    """Returns by round the seconds of a step over SGD's in the same round."""
    by = {(r, name): s for r, name, s in d["seconds"].get(goal, [])}
    return [s / by[r, "SGD"] for (r, name), s in by.items() if name == method]


def _fresh(d: dict[str, Any], goal: str, method: str) -> list[Any]:
    best = bench.best_of(goal, method, d["cells"])
    keys = [bench.key(goal, method, best, seed) for seed in bench.SEEDS]
    return [d["cells"][k] for k in keys if k in d["cells"]]


def _each(steps: list[float]) -> str:
    return ", ".join("never" if math.isinf(x) else f"{x:.0f}" for x in steps)


def _row(d: dict[str, Any], goal: str, method: str, said: list[str]) -> list[str]:
    m, best = bench.METHODS[method], bench.best_of(goal, method, d["cells"])
    steps, base = statistics.median(steps_of(d, goal, method)), statistics.median(steps_of(d, goal, "SGD"))
    rate, other = (ladder[i] for ladder, i in zip(m.ladders, best, strict=True))
    number = len(bench.tried(goal, method, d["cells"]))
    known = [f"{goal}, {bench.GOALS[goal].loss:g}", f"{method}, lr {rate:g}, {m.tuned} {other:g}", str(number),
             _each(steps_of(d, goal, method)), _each(steps_to_the_end(d, goal, method))]  # fmt: skip
    edge = [i for i, ladder in zip(best, m.ladders, strict=True) if i in (0, len(ladder) - 1)]
    if edge:
        said.append(f"The best setting of {method} on {goal} is at the edge of its range.")
    if method == "SGD":
        return [*known, "1", "1", "1", "1"]
    sent = d["bytes"][f"{goal} {method}"] / d["bytes"][f"{goal} SGD"]
    said.append(f"On {goal}, {method} reaches the loss in {steps / base:.2f} of SGD's steps.")
    if not (ratio := slower(d, goal, method)):
        return [*known, "", f"{sent:.2f}", "", f"{sent * steps / base:.2f}"]
    mid, low, high = interval(ratio)
    return [
        *known,
        f"{mid:.2f} [{low:.2f}, {high:.2f}]",
        f"{sent:.2f}",
        f"{mid * steps / base:.2f}",
        f"{sent * steps / base:.2f}",
    ]


def _about() -> str:
    goals = " ".join(
        f"{name} is evaluated every {g.every} steps, for at most {g.steps} steps." for name, g in bench.GOALS.items()
    )
    seeds, tuning = map(listed, (bench.SEEDS, bench.TUNING))
    newton = round(bench.METHODS["Newton"].share * bench.GOALS["Digits"].steps)
    return (
        f"**Steps.** {bench.RANKS} simulated ranks with real tensors train until the held-out loss first reaches the target. Each rank "
        f"has the task's own batch. {goals} Newton trains for at most {newton} steps on Digits. The table shows the steps of seeds {seeds}, which "
        f"tuning does not use. SGD's last loss is its loss at the last evaluation, the median of its seeds.\n\n"
        f"**Tuning.** All methods are tuned by the same rule. Each method has two numbers to tune: the learning rate and one more. The "
        f"rule tries a window of three by three values. Then it tries all eight neighbours of the best pair, until all are tried. The "
        f"worse of seeds {tuning} counts. No tuning run is longer than the best one so far. Newton was not tuned on ByteGPT: ten "
        f"simulated steps of it took 144 s next to other work, and this rule needs hundreds of steps. KFAC has momentum 0.9 and its "
        f"default periods. All other settings have their defaults.\n\n"
        f"**Seconds.** {bench.PROCESSES} processes on this machine, with one thread each, hold a session of each method. They alternate "
        f"in blocks of {bench.BLOCK} steps. The table shows the median over {bench.ROUNDS} rounds of the ratio within a round, with its "
        f"95 % bootstrap interval. The wire is the loopback. The machine was busy with other work.\n\n"
        f"**Bytes.** Rank 0 of {bench.RANKS} sends these bytes."
    )
