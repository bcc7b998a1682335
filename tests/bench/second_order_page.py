# ruff: noqa: E501
"""Writes the section of a page of docs/project/benchmarks/ on second order from the results of `tests.bench.second_order`."""

from __future__ import annotations

import math
import statistics
from typing import Any

from tests.bench import second_order as bench
from tests.bench.page import interval, table


def section(d: dict[str, Any]) -> str:
    """Returns steps, seconds and bytes to a loss relative to SGD with momentum."""
    rows, said = [], []
    for goal, method in bench.PAIRS:
        if bench.tried(goal, method, d["cells"]):
            rows.append(_row(d, goal, method, said))
    head = ["task and held-out loss", "method, at its best", "settings tried", "steps to the loss", "steps to SGD's last loss", "seconds of a step over SGD's",
            "bytes of a step over SGD's", "seconds to the loss over SGD's", "bytes to the loss over SGD's"]  # fmt: skip
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
        said.append(f"{goal}, {method}: its best lies at the end of what may be tried.")
    if method == "SGD":
        return [*known, "1", "1", "1", "1"]
    sent = d["bytes"][f"{goal} {method}"] / d["bytes"][f"{goal} SGD"]
    said.append(f"On {goal} {method} takes {steps / base:.2f} of SGD's steps.")
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
    goals = " and ".join(f"every {g.every} steps of {name}, {g.steps} at most" for name, g in bench.GOALS.items())
    seeds, tuning = (", ".join(map(str, which)) for which in (bench.SEEDS, bench.TUNING))
    newton = round(bench.METHODS["Newton"].share * bench.GOALS["Digits"].steps)
    return (
        f"How many steps until the held-out loss is first at most what was asked for, looked at {goals} ({newton} for Newton): "
        f"{bench.RANKS} simulated ranks with real tensors, the task's own batch on each. Every method has two numbers to tune, "
        f"the learning rate and one more, on the same rule: all of a window of three by three, then all eight neighbours "
        f"of the best as long as one is untried; the worse of seeds {tuning} counts, and no run for tuning is longer than the best so far. Steps are given for seeds {seeds}, which "
        f"tuning has not seen, and beside them those to the loss that SGD has when it was last looked at (the median of seeds). KFAC has momentum 0.9 and its own usual periods; everything else is as by default. Seconds: "
        f"{bench.PROCESSES} processes on this machine, one thread each, which hold a session of each method and alternate by blocks of "
        f"{bench.BLOCK} steps; the median over {bench.ROUNDS} rounds of ratios within a round, with its 95 % bootstrap "
        f"interval. The wire is the loopback; the machine was busy with other work. Bytes: what rank 0 of {bench.RANKS} sends. "
        f"Newton was not tuned on ByteGPT: ten simulated steps of it took 144 s beside other work, and this rule would ask for hundreds."
    )
