"""Schedules of pipelines: that each can run, and that its docstring draws what it does."""

from __future__ import annotations

import inspect
import re

import pytest

from tests.ranks import shipped
from workbench.partitions.schedules import Action, GPipe, OneFOneB, Schedule

SCHEDULES = list(shipped(Schedule).values())


def drawn(schedule: Schedule, stages: int, micros: int) -> list[list[str]]:
    """By stage what it computes in each slot of time, "." where it waits; passes take a slot, messages no time."""
    todo = [schedule.actions(stage, stages, micros) for stage in range(stages)]
    done: dict[tuple[int, Action], int] = {}
    rows: list[list[str]] = [[] for _ in range(stages)]
    for slot in range(8 * (micros + stages)):
        if not any(todo):
            return rows
        for stage, row in enumerate(rows):
            needs = (stage - 1 if todo[stage][0].what == "F" else stage + 1) if todo[stage] else -1
            here = bool(todo[stage]) and (not 0 <= needs < stages or done.get((needs, todo[stage][0]), slot) < slot)
            row.append(str(todo[stage][0]) if here else ".")
            if here:
                done[stage, todo[stage].pop(0)] = slot
    raise AssertionError(f"{schedule}: stages wait for each other for ever: {todo}")


@pytest.mark.parametrize("cls", SCHEDULES)
@pytest.mark.parametrize(("stages", "micros"), [(2, 1), (2, 4), (3, 4), (4, 2), (4, 16), (7, 5)])
def test_every_micro_batch_goes_forward_and_back_once_and_nobody_waits_for_ever(
    cls: type[Schedule], stages: int, micros: int
) -> None:
    for stage, row in enumerate(drawn(cls(), stages, micros)):
        passes = [cell for cell in row if cell != "."]
        assert sorted(passes) == sorted(f"{what}{micro}" for what in "FB" for micro in range(micros)), stage
        assert all(passes.index(f"F{m}") < passes.index(f"B{m}") for m in range(micros))
        backs = [cell for cell in passes if cell[0] == "B"]
        assert backs == [f"B{m}" for m in range(micros)], "gradients add up in the order of the micro-batches"


@pytest.mark.parametrize("cls", [GPipe, OneFOneB])
@pytest.mark.parametrize(("stages", "micros"), [(2, 4), (4, 8), (4, 3)])
def test_the_bubble_is_that_of_the_papers(cls: type[Schedule], stages: int, micros: int) -> None:
    rows = drawn(cls(), stages, micros)
    assert len(rows[0]) == 2 * (micros + stages - 1)


@pytest.mark.parametrize("cls", SCHEDULES)
def test_the_docstring_draws_it(cls: type[Schedule]) -> None:
    lines = re.findall(r"^ *stage (\d) +(.*)$", inspect.getdoc(cls) or "", flags=re.M)
    shown = [row.split() for _, row in lines]
    micros = max(int(cell[1:]) for row in shown for cell in row if cell != ".") + 1
    assert shown == drawn(cls(), len(shown), micros)
