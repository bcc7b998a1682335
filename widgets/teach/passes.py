"""When the stages of a pipeline compute, if messages take no time."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from workbench.settings import KnobError


class TimedPass(NamedTuple):
    """A pass of a stage, in units of a forward through a whole stage."""

    stage: int
    action: Any
    begin: float
    end: float


def time_passes(schedule: Any, stages: int, micros: int, steps: int = 1, backward: float = 2.0) -> list[TimedPass]:
    """Returns the passes of a pipeline by stage, in order. Raises KnobError if `schedule` refuses these numbers.

    backward: how long a backward takes; a forward through a whole stage takes 1

    A schedule with a flush begins a step when all stages have ended the step before.
    """
    if not 1 <= stages <= 64 or not 1 <= micros * steps <= 256:
        raise KnobError(f"stages={stages}, micros={micros}: must be 1 to 64 stages and 1 to 256 micro-batches")
    if reason := schedule.refuses(stages, micros):
        raise KnobError(reason)
    flushes = not any(schedule.ahead(stage, stages) for stage in range(stages))
    queues = [_list_actions(schedule, stage, stages, micros, steps) for stage in range(stages)]
    pieces, ended, found = schedule.pieces, {}, []  # type: int, dict[tuple[str, int, int], float], list[TimedPass]
    long = {"F": 1 / pieces, "B": backward / pieces, "I": backward / 2 / pieces, "W": backward / 2 / pieces}
    free = [0.0] * stages
    for last in range(micros, micros * steps + 1, micros) if flushes else [math.inf]:
        free = [max(free)] * stages if flushes else free
        while placed := _place_passes(queues, last, pieces, free, long, ended):
            found += placed
    if any(queues):
        raise KnobError(f"schedule={type(schedule).__name__}(): stages wait for each other; correct its actions")
    return sorted(found, key=lambda one: (one.stage, one.begin))


def _list_actions(schedule: Any, stage: int, stages: int, micros: int, steps: int) -> list[Any]:
    """Returns a stage's actions of all steps. Micro-batches count on from step to step."""
    once = schedule.actions(stage, stages, micros)
    every = [action._replace(micro=action.micro + step * micros) for step in range(steps) for action in once]
    return [once[0]._replace(what="F", micro=k) for k in range(schedule.ahead(stage, stages))] + every


def _place_passes(
    queues: list[list[Any]], last: float, pieces: int, free: list[float], long: dict[str, float],
    ended: dict[tuple[str, int, int], float],
) -> list[TimedPass]:  # fmt: skip
    """Takes each stage's passes of micro-batches before `last` from `queues`, as far as their inputs exist."""
    found, stages = [], len(queues)
    for stage, queue in enumerate(queues):
        while queue and queue[0].micro < last:
            what, micro, chunk = queue[0]
            piece = chunk * stages + stage
            needs = {"F": [("F", piece - 1)], "W": [("B", piece)]}.get(what, [("F", piece), ("B", piece + 1)])
            inputs = [(kind, micro, at) for kind, at in needs if 0 <= at < pieces * stages]
            if any(one not in ended for one in inputs):
                break
            begin = max([free[stage], *(ended[one] for one in inputs)])
            free[stage] = begin + long[what]
            ended["B" if what == "I" else what, micro, piece] = free[stage]
            found.append(TimedPass(stage, queue.pop(0), begin, free[stage]))
    return found
